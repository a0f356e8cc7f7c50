"""Tests on a Slurm cluster of two nodes: all phases, stop and requeue, and the crash of a node."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
REPOSITORY = Path(__file__).parents[1]
CLUSTER = os.environ.get("DLOOP_TEST_CLUSTER", "")
"""Folder of the cluster that slurm_cluster.sh started; empty if there is none."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
SETTINGS = [
    "+drafter=eagle3",
    "+target=tiny_llama",
    "prompts.limit=32",
    "train.steps=40",
    "train.save_every=4",
    "train.micro_batch_size=4",
    "launch.threads=1",
    "evaluate.dtype=float32",
    "export.checkpoint=last",
    "gate.threshold=-0.5",
]
"""The last checkpoint and a fixed threshold, since the best ones in validation also depend on measured times."""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    if not CLUSTER:
        pytest.skip("no cluster: bash launchers/test.sh slurm starts one")


class Job:
    """A submitted job."""

    def __init__(self, root: Path, script: str, *overrides: str, flags: tuple[str, ...] = ()):
        self.root = root
        root.mkdir(exist_ok=True)
        environment = os.environ | {
            "DLOOP_ROOT": str(root),
            "DLOOP_VENV": sys.prefix,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }
        command = [
            "sbatch",
            "--parsable",
            f"--output={root / 'slurm.out'}",
            *flags,
            f"launchers/{script}",
            *SETTINGS,
            *overrides,
        ]
        self.id = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    def state(self) -> str:
        shown = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", self.id], capture_output=True, text=True, check=True
        ).stdout
        return shown.split("JobState=")[1].split()[0]

    def log(self) -> str:
        return "".join(file.read_text(errors="replace") for file in sorted(self.root.glob("slurm/*.log")))

    def wait_for(self, reached, seconds: float = 400) -> None:
        """Wait until `reached()` is true; fail if the job ends before. `sbatch --wait` polls too seldom for this."""
        deadline = time.monotonic() + seconds
        while not reached():
            state = self.state()
            assert (time.monotonic() < deadline and state not in ENDED) or reached(), (
                f"job {self.id} is {state}, and that was not reached\n{self.log()[-3000:]}"
            )
            time.sleep(0.2)

    def end(self) -> str:
        """Wait for the end of the job and return its final state."""
        self.wait_for(lambda: self.state() in ENDED)
        return self.state()

    def finish(self) -> None:
        assert self.end() == "COMPLETED", self.log()[-3000:]

    def signal(self, name: str) -> None:
        """Send a signal to the batch script, as Slurm does before the time limit."""
        subprocess.run(["scancel", f"--signal={name}", "--batch", self.id], check=True)


def steps(root: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in root.glob("runs/*/metrics.jsonl"))


def records(root: Path) -> dict:
    """Results of a run that must not depend on interruptions."""
    run = root / "runs" / "eagle3-tiny_llama"
    rounds = {
        path.name: [[r["accepted"] for r in json.loads(line)["rounds"]] for line in open(path)]
        for path in sorted(run.glob("evaluation/rounds/*.jsonl"))
    }
    return {
        "responses": [
            path.read_text() for kind in ("responses", "greedy") for path in sorted(root.glob(f"{kind}/*/*.jsonl"))
        ],
        "rounds": rounds,
        "shards": [path.read_bytes() for path in sorted(root.glob("features/*/shard-*"))],
        "losses": [(row["step"], row["loss"]) for row in map(json.loads, open(run / "metrics.jsonl"))],
        "weights": (run / "drafter" / "model.safetensors").read_bytes(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run on two nodes."""
    job = Job(tmp_path_factory.mktemp("slurm") / "whole", "slurm.sbatch")
    job.finish()
    return job


def test_all_phases_run_on_two_nodes(whole):
    """One rank runs on each node, since there are no GPUs; the log is written below the root."""
    run = whole.root / "runs" / "eagle3-tiny_llama"
    assert (run / "report.json").is_file() and (run / "report.html").is_file()
    last = json.loads((run / "checkpoints" / "last.json").read_text())
    assert (last["world_size"], last["step"]) == (2, 40)
    assert "on n[1-2], start 1" in whole.log() and "on 2 rank(s)" in whole.log()


def test_stopped_before_the_time_limit_and_requeued(whole, tmp_path):
    """After USR1 during training the run saves, the job is requeued, and its results are those of a whole run."""
    job = Job(tmp_path / "requeued", "slurm.sbatch")
    job.wait_for(lambda: steps(job.root) >= 6)
    job.signal("USR1")
    job.finish()
    log = job.log()
    assert "asked to stop" in log and "stopped as asked" in log and "start 2" in log and "train: resumed at step" in log
    assert steps(job.root) == 40 and "Traceback" not in log
    assert records(job.root) == records(whole.root)


def test_stopped_while_it_answers_prompts(tmp_path):
    """On one node, with the other script: generate stops at once after USR1, and resumes from its last batch."""
    job = Job(
        tmp_path / "answering",
        "slurm_one_node.sbatch",
        "phases=[generate]",
        "generate.batch_size=1",
        "prompts.limit=200",
        flags=("--mem=4G", "--cpus-per-task=2"),
    )
    job.wait_for(lambda: len(list(job.root.glob("responses/*.partial/unmerged/batches/*.jsonl"))) >= 2)
    job.signal("USR1")
    job.finish()
    assert "stopped as asked" in job.log() and "start 2" in job.log()
    assert list(job.root.glob("responses/*/manifest.json"))


def crash(node: int) -> None:
    """Kill everything on a node at once: its daemon, the job's step and its ranks."""
    pids = subprocess.run(
        ["ip", "netns", "pids", f"dloop{node}"], capture_output=True, text=True, check=True
    ).stdout.split()
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)


def test_a_node_that_dies_costs_the_steps_since_the_last_checkpoint(whole, tmp_path):
    """The job is requeued and starts again when the node is back."""
    job = Job(tmp_path / "crashed", "slurm.sbatch")
    job.wait_for(lambda: steps(job.root) >= 10)
    crash(2)
    job.wait_for(lambda: "a node does not answer" in job.log())
    # Slurm would still send a node that is back too soon the order to end the step that died with it. The next start
    # has a step with the same number, which that order would end.
    job.wait_for(lambda: job.state() != "RUNNING")
    subprocess.run(["scontrol", "hold", job.id], check=True)
    subprocess.run(["bash", str(Path(__file__).with_name("slurm_cluster.sh")), "node", CLUSTER, "2"], check=True)
    job.wait_for(nothing_is_left_to_tell)
    subprocess.run(["scontrol", "release", job.id], check=True)
    job.finish()
    assert "start 2" in job.log() and "train: resumed at step" in job.log()
    assert records(job.root) == records(whole.root)


def nothing_is_left_to_tell() -> bool:
    """Whether both nodes are idle and Slurm has no messages for them left to send."""
    nodes = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"], capture_output=True, text=True, check=True
    ).stdout.split()
    told = subprocess.run(["sdiag"], capture_output=True, text=True, check=True).stdout
    return nodes == ["idle", "idle"] and "Agent queue size: 0" in " ".join(told.split())


def test_the_shell_of_salloc_stands_outside(tmp_path):
    """As on a login node, every phase that computes is started on the node with srun, even with one rank."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(f'#!/bin/bash\necho "${{@: -1}}" >> {tmp_path}/started\nexec {shutil.which("srun")} "$@"\n')
    srun.chmod(0o755)
    environment = os.environ | {
        "DLOOP_ROOT": str(tmp_path / "root"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
    }
    said = subprocess.run(
        [
            "salloc",
            "--nodes=1",
            "--mem=4G",
            "--cpus-per-task=2",
            sys.executable,
            "-m",
            "dloop_train",
            *SETTINGS,
            "train.steps=4",
        ],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    assert (tmp_path / "started").read_text().split() == ["generate", "cache", "train", "evaluate"]
    assert (tmp_path / "root" / "runs" / "eagle3-tiny_llama" / "report.json").is_file()


def damage(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-8])


def test_an_error_of_one_rank_ends_all_and_is_told_once_and_last(tmp_path):
    """The error is printed once, after the messages of Slurm and torchrun."""
    Job(tmp_path / "poisoned", "slurm.sbatch", "phases=[generate,cache]").finish()
    damage(next((tmp_path / "poisoned").glob("features/*/shard-*")))
    job = Job(tmp_path / "poisoned", "slurm.sbatch", "phases=[train]")
    assert job.end() == "FAILED"
    *_, told, who = job.log().rstrip().splitlines()
    assert (
        told.startswith("dloop_train: train: ")
        and "shard-00000.safetensors" in told
        and who in ("(rank 0 of 2)", "(rank 1 of 2)")
    )
    assert job.log().count(told) == 1 and "Traceback" not in job.log()
