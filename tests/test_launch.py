"""Tests of starting ranks on this machine: their number, hostfiles, error reports, stop and resume."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import composed, processes_of
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dloop_train import launch
from dloop_train.agent import tell_killed
from dloop_train.config import LaunchConfig
from dloop_train.launch import (
    World,
    command,
    free_port,
    in_separate_ranks,
    launcher_of,
    outside_allocation,
    ranks_of_node,
    read_hostfile,
    world,
    write_environment,
)
from dloop_train.ranks import FAILURE, leave_cause
from dloop_train.runs import Artifact
from dloop_train.targets.sources import default_device

REPOSITORY = Path(__file__).parents[1]
SLURM = {"SLURM_JOB_ID": "1234", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1"}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)


def config_of(tmp_path: Path, **settings):
    return SimpleNamespace(launch=LaunchConfig(**settings), root=tmp_path, name="a")


def hostfile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_who_takes_part(tmp_path, monkeypatch):
    """Ranks run on this machine, in the slots of a hostfile, or in equal numbers on every node of a Slurm allocation.

    With an allocation of one node, srun is needed on the login node but not on the node itself.
    """
    assert world(config_of(tmp_path, processes=3)) == World("torchrun", 1, 3)
    hosts = str(hostfile(tmp_path, "# two kinds of node\na slots=4\nb  slots=2  # the old one\n\n"))
    assert world(config_of(tmp_path, hostfile=hosts)) == World("hostfile", 2, 6)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert world(config_of(tmp_path, processes=2)) == World("srun", 3, 6)
    monkeypatch.setenv("SLURM_NNODES", "1")
    assert (
        launcher_of(LaunchConfig()) == "torchrun"
        and not in_separate_ranks(config_of(tmp_path))
        and not outside_allocation(LaunchConfig())
    )
    monkeypatch.delenv("SLURMD_NODENAME")
    assert (
        launcher_of(LaunchConfig()) == "srun"
        and in_separate_ranks(config_of(tmp_path))
        and outside_allocation(LaunchConfig())
    )


@pytest.mark.parametrize("phase", ["generate", "cache", "evaluate"])
def test_nothing_heavy_runs_where_the_shell_of_salloc_stands(phase, tmp_path, monkeypatch):
    """Even one rank on one node is started by srun, because the shell of salloc may run on a login node."""

    class Started(Exception):
        pass

    def started(config, name, alone=False):
        assert (name, alone) == (phase, phase == "evaluate")
        raise Started

    module = importlib.import_module(f"dloop_train.phases.{phase}")
    monkeypatch.setattr(module, "start_ranks", started)
    monkeypatch.setattr(module, "load_target", None)
    for name in (
        "write_questions",
        "require_taps",
        "all_files",
        "index_of",
        "responses_of",
        "shard_files",
        "require_same_evaluation",
        "settings_of",
        "drafter_folders",
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_: {})
    monkeypatch.setattr(module, "missing", lambda _: [0], raising=False)
    monkeypatch.setattr(Artifact, "facts", lambda _: {})
    if phase == "generate":
        monkeypatch.setattr(module, "all_files", lambda *_: [[]])
    for name, value in SLURM.items() - {("SLURMD_NODENAME", "n1")} | {("SLURM_NNODES", "1")}:
        monkeypatch.setenv(name, value)
    with pytest.raises(Started):
        module.run(composed("+drafter=dflash", "+target=tiny_llama", f"root={tmp_path}"))


def test_each_gpu_has_a_rank_unless_the_cpu_is_asked_for(monkeypatch):
    """DS_ACCELERATOR, DeepSpeed's variable, decides the target's device and the number of ranks."""
    for module, name, value in (
        (torch.accelerator, "is_available", True),
        (torch.accelerator, "device_count", 4),
        (torch.accelerator, "current_accelerator", torch.device("cuda")),
    ):
        monkeypatch.setattr(module, name, lambda value=value: value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert (ranks_of_node(0), default_device().type) == (1, "cpu")
    monkeypatch.delenv("DS_ACCELERATOR")
    assert (ranks_of_node(0), ranks_of_node(2), default_device().type) == (4, 2, "cuda")


def test_a_node_s_gpus_reach_its_ranks(tmp_path, monkeypatch):
    """srun starts one agent on each node, which counts the GPUs of its node.

    If the job has its GPUs because it has whole nodes (--exclusive), the srun step must request them.
    """
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "first_host", lambda: "n1")
    started = command(config_of(tmp_path), ["config.yaml", "train"])
    assert started[0] == "srun" and {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(
        started
    )
    assert (
        not any("gpus" in part for part in started)
        and "--master-addr=n1" in started
        and started[-2:] == ["config.yaml", "train"]
    )
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert "--gpus-per-node=4" in command(config_of(tmp_path), [])
    alone = command(config_of(tmp_path, processes=2), [], alone=True)
    assert {"--nodes=1", "--ntasks=1", "--standalone"} <= set(alone) and alone[
        alone.index("dloop_train.agent") + 1
    ] == "1"


@pytest.mark.parametrize("text, says", [("", "got none"), ("a slots=2\nb\n", "'b'"), ("a slots=two", "slots=two")])
def test_a_hostfile_that_is_none_is_explained(text, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        read_hostfile(hostfile(tmp_path, text))


def test_what_cannot_be_started_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="pdsh, which is not installed"):
        command(config_of(tmp_path, hostfile=str(hostfile(tmp_path, "a slots=1\nb slots=1\n"))), [])
    with pytest.raises(ValueError, match="inside a Slurm allocation"):
        world(config_of(tmp_path, launcher="srun"))
    with pytest.raises(ValueError, match="slots of launch.hostfile both"):
        LaunchConfig(hostfile="hosts", processes=2)
    for launcher in ("torchrun", "srun"):
        with pytest.raises(ValueError, match=f"launch.launcher={launcher} would not read launch.hostfile=hosts"):
            LaunchConfig(launcher=launcher, hostfile="hosts")
    with pytest.raises(ValueError, match="there is no"):
        world(config_of(tmp_path, hostfile=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("count, wanted", [(2, ["given back", "started"]), (0, ["started"])])
def test_ranks_have_the_accelerator_s_memory_to_themselves(count, wanted, tmp_path, monkeypatch):
    """Memory that torch has cached since an earlier phase in this process is released before the ranks start.

    Without an accelerator empty_cache must not be called, since it would raise an error.
    """
    done: list[str] = []
    monkeypatch.setattr(launch, "accelerators", lambda: count)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: done.append("given back"))
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, **__: done.append("started"))
    monkeypatch.setattr(launch, "wait", lambda process, failure: 0)
    launch.start_ranks(config_of(tmp_path, processes=1), "train")
    assert done == wanted


def test_a_port_is_the_job_s_own_while_nobody_else_has_it():
    port = free_port(4321)
    assert free_port(4321) == port
    with socket.socket() as other:
        other.bind(("", port))
        assert free_port(4321) != port


def test_hosts_are_told_no_secrets(tmp_path):
    told = write_environment(
        tmp_path / "environment",
        {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "s", "WANDB_API_KEY": "s", "PATH": "/bin", FAILURE: "f"},
    ).read_text()
    assert told == f"{FAILURE}=f\nHF_HUB_OFFLINE=1\n"


def test_the_first_cause_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FAILURE, str(tmp_path / "failure.txt"))
    leave_cause("train: the cause")
    leave_cause("train: connection closed by peer")
    assert (tmp_path / "failure.txt").read_text() == "train: the cause\n" and not capsys.readouterr().err
    monkeypatch.delenv(FAILURE)
    leave_cause("train: by hand")
    assert capsys.readouterr().err == "dloop_train: train: by hand\n"


@pytest.mark.parametrize(
    "codes, before, after",
    [
        ((1, -signal.SIGABRT), "the cause\n", "the cause"),
        ((-signal.SIGSEGV, -signal.SIGTERM), None, "ended by SIGSEGV"),
        ((1, -signal.SIGTERM), "the cause\n", "the cause"),
        ((-signal.SIGABRT, -signal.SIGKILL), "connection closed by peer\n", "ended by SIGKILL"),
        ((1,), None, None),
    ],
)
def test_a_signal_that_may_be_an_effect_hides_no_cause(codes, before, after, tmp_path, monkeypatch):
    """NCCL's watchdog aborts ranks after another one has failed, so only SIGKILL replaces a recorded cause."""
    failure = tmp_path / "failure.txt"
    monkeypatch.setenv(FAILURE, str(failure))
    if before:
        failure.write_text(before)
    tell_killed("train", [ProcessFailure(rank, 0, code, "none") for rank, code in enumerate(codes)])
    assert (after in failure.read_text()) if after else not failure.exists()
    assert before != "the cause\n" or failure.read_text() == before


@pytest.mark.parametrize(
    "code, nodes, answers, losses, requeued",
    [
        (75, 1, True, 0, "stopped before the time limit"),
        (1, 2, False, 0, "a node does not answer"),
        (1, 2, False, 9, "a node does not answer"),
        (1, 2, False, 10, None),
        (1, 2, True, 0, None),
        (1, 1, False, 0, None),
        (0, 2, False, 0, None),
    ],
)
def test_a_job_goes_back_into_the_queue_as_often_as_its_time_ends_and_ten_times_for_lost_nodes(
    code, nodes, answers, losses, requeued, tmp_path
):
    """The job has been restarted fifty times at its time limit; these restarts do not count as lost nodes."""
    (tmp_path / "bin").mkdir()
    for name, script in {
        "activate": f"PATH={tmp_path}/bin:$PATH",
        "python": f"exit {code}",
        "srun": f"exit {int(not answers)}",
        "scontrol": "echo scontrol: $@",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    log = tmp_path / "slurm" / "mine-7.log"
    log.parent.mkdir()
    log.write_text("slurm: a node does not answer; job 7 goes back\n" * losses)
    environment = (
        os.environ
        | SLURM
        | {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "mine",
            "SLURM_NNODES": str(nodes),
            "SLURM_RESTART_COUNT": "50",
            "DLOOP_ROOT": str(tmp_path),
            "DLOOP_VENV": str(tmp_path),
        }
    )
    assert (
        subprocess.run(["bash", "launchers/slurm_job.sh"], env=environment, cwd=REPOSITORY, check=False).returncode
        == code
    )
    said = log.read_text().splitlines()[losses:]
    assert [line for line in said if line.startswith("scontrol")] == (["scontrol: requeue 7"] if requeued else [])
    assert "start 51" in said[0] and (not requeued or said[-2].startswith(f"slurm: {requeued}"))


class Command:
    """The command on the tiny target, as a subprocess in a process group of its own."""

    def __init__(self, root: Path, *overrides: str):
        self.root = root
        environment = os.environ | {"DLOOP_ROOT": str(root), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        arguments = [
            "+drafter=eagle3",
            "+target=tiny_llama",
            "phases=[generate,cache,train]",
            "launch.threads=1",
            "train.micro_batch_size=4",
            "train.steps=40",
            "train.save_every=4",
            "wandb.mode=disabled",
            *overrides,
        ]
        self.log = root / "log"
        root.mkdir(exist_ok=True)
        with open(self.log, "a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dloop_train", *arguments],
                env=environment,
                cwd=REPOSITORY,
                stderr=file,
                stdout=file,
                start_new_session=True,
            )

    def wait_for_steps(self, count: int) -> None:
        while sum(len(file.read_text().splitlines()) for file in self.root.glob("runs/*/metrics.jsonl")) < count:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.1)

    def end(self) -> int:
        return self.process.wait(300)

    def weights(self) -> bytes:
        return next(self.root.glob("runs/*/checkpoints/step-0000040/weights.safetensors")).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    command = Command(tmp_path_factory.mktemp("whole"), "launch.processes=2")
    assert command.end() == 0, command.log.read_text()[-3000:]
    return command.weights()


@pytest.mark.slow
def test_stopped_and_gone_on_with_is_the_same_training(whole, tmp_path):
    """SIGUSR1 ends a training with exit code 75 and no error, and the same command completes it with equal weights.

    This is tested for ranks given by launch.processes and by a hostfile.
    """
    (tmp_path / "root").mkdir()
    hosts = hostfile(tmp_path, "localhost slots=2\n")
    for who in ("launch.processes=2", f"launch.hostfile={hosts}"):
        command = Command(tmp_path / who[7:9], who)
        command.wait_for_steps(6)
        command.process.send_signal(signal.SIGUSR1)
        assert command.end() == 75
        said = command.log.read_text()
        assert (
            "train: stopped as asked" in said.rstrip().splitlines()[-1]
            and "Traceback" not in said
            and not processes_of(command.root)
        )
        again = Command(command.root, who)
        assert again.end() == 0, again.log.read_text()[-2000:]
        assert "train: resumed at step" in again.log.read_text() and again.weights() == whole


@pytest.mark.slow
def test_a_command_that_is_ended_leaves_no_ranks(tmp_path):
    command = Command(tmp_path / "root", "launch.processes=2", "train.steps=4000")
    command.wait_for_steps(2)
    assert len(processes_of(command.root)) == 2
    command.process.terminate()
    assert command.end() == 128 + signal.SIGTERM and not processes_of(command.root)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told(tmp_path):
    """The reported cause is the signal, not the broken connection that the other rank reports."""
    command = Command(tmp_path / "root", "launch.processes=2", "train.steps=4000")
    command.wait_for_steps(2)
    os.kill(processes_of(command.root)[1], signal.SIGKILL)
    assert command.end() == 1
    assert (
        f"dloop_train: train: a rank on {socket.gethostname()} was ended by SIGKILL"
        in command.log.read_text().rstrip().splitlines()[-1]
    )
    assert not processes_of(command.root)
