"""Tests of the command on the tiny target: every phase, kill and resume, and the contents of W&B runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PAIRS, pair_of, processes_of
from wandb_reader import read_identities, read_offline_run

import dloop_train
from dloop_train.targets.responders import decode_plain

REPOSITORY = Path(__file__).parents[1]
COMMAND = [
    sys.executable,
    "-m",
    "dloop_train",
    "+drafter=dflash",
    "+target=tiny_llama",
    "launch.threads=1",
    "train.steps=6",
    "train.save_every=2",
    "train.batch_size=4",
    "train.micro_batch_size=4",
]


def environment(root: Path) -> dict:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"DLOOP_ROOT": str(root), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(root: Path, *overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *overrides], env=environment(root), cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run, started from an empty directory."""
    root, cwd = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("empty")
    result = run(root, cwd=cwd)
    assert result.returncode == 0, result.stderr[-3000:]
    assert not list(cwd.iterdir()), "the command left something in the user's directory"
    return root, result


def test_everything_is_written(finished):
    root, result = finished
    folder = root / "runs" / "dflash-tiny_llama"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "validation.jsonl",
        "drafter/config.json",
        "drafter/model.safetensors",
        "evaluation/settings.json",
        "evaluation/replay.json",
        "report.json",
        "report.html",
    ):
        assert (folder / name).is_file(), name
    assert "trained + gate (DLoop)" in result.stdout + result.stderr
    section = json.loads((folder / "drafter" / "config.json").read_text())["dloop"]
    assert (
        section["threshold"] == -0.5 and section["trained_depth_exposure"] == 3 and section["provenance"]["step"] == 6
    )


def test_a_second_run_skips(finished, tmp_path):
    root, _ = finished
    again = run(root, cwd=tmp_path)
    assert again.returncode == 0
    for phase in ("generate", "cache", "train", "export", "evaluate"):
        assert f"{phase}: done before" in again.stderr


def test_wandb_offline_run_holds_the_training(finished):
    root, _ = finished
    history, summary, config = read_offline_run(root / "runs" / "dflash-tiny_llama")
    losses = [row["train/loss"] for row in history if "train/loss" in row]
    rows = [json.loads(line) for line in open(root / "runs" / "dflash-tiny_llama" / "metrics.jsonl")]
    assert losses == pytest.approx([row["loss"] for row in rows])
    for name in (
        "train/lr",
        "train/grad_norm",
        "train/tokens_per_second",
        "train/weighted_loss_first",
        "train/weighted_loss_last",
        "validation/tau_s1",
        "validation/tau_gated",
        "validation/tokens_per_second_gated",
        "validation/gate_score",
        "validation/loss_first",
    ):
        assert any(key.startswith(name) for row in history for key in row), name
    assert config["train"]["depth_exposure"] == 3
    (train, group, _), (report, other, _) = read_identities(root / "runs" / "dflash-tiny_llama")
    assert train.removesuffix("-train") == report.removesuffix("-report") and group == other
    table = json.loads((root / "runs" / "dflash-tiny_llama" / "report.json").read_text())["settings"]
    assert {one["label"]: summary[f"evaluation/{one['label']}/tau"] for one in table} == {
        one["label"]: one["tau"]["value"] for one in table
    }


QUICK = {("mtp", "tiny_qwen35"), ("mtp_assistant", "tiny_gemma4")}
"""The pairs that differ most from DFlash on Llama. The other tiny pairs run with the slow tests."""
TINY = sorted(
    pair_of(name)[0].removeprefix("+drafter=") + " " + pair_of(name)[1].removeprefix("+target=")
    for name in PAIRS
    if "_tiny_" in name
)


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=() if tuple(pair.split()) in QUICK else pytest.mark.slow) for pair in TINY]
)
def test_every_family_runs_from_prompts_to_a_report(pair, tmp_path):
    """The export, loaded as a user would load it, also streams the target's own text."""
    drafter, target = pair.split()
    command = [
        sys.executable,
        "-m",
        "dloop_train",
        f"+drafter={drafter}",
        f"+target={target}",
        "prompts.limit=8",
        "launch.threads=1",
        "train.steps=2",
        "evaluate.prompts=2",
        "evaluate.dtype=float32",
    ]
    result = subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    folder = tmp_path / "runs" / f"{drafter}-{target}"
    table = {row["label"]: row for row in json.loads((folder / "report.json").read_text())["settings"]}
    assert {"plain decoding", "trained S=1", "trained + gate (DLoop)"} <= table.keys() and (
        folder / "report.html"
    ).is_file()
    model = dloop_train.load(folder / "drafter", target, device="cpu")
    ids = list(range(60, 72))
    assert list(model.tokens(ids, max_new_tokens=16)) == decode_plain(model.target, ids, max_new_tokens=16)


def kill_when(root: Path, started: subprocess.Popen, sign: str) -> bool:
    """Kill -9 the command and its torchrun as soon as a file that matches `sign` exists; the ranks end with them.

    Returns False if the command ended before.
    """
    for _ in range(100_000):
        if list(root.glob(sign)):
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            return True
        if started.poll() is not None:
            return False
        time.sleep(0.001)  # an export of the tiny drafter takes only some milliseconds
    raise AssertionError("the phase did not get that far")


SIGNS = {
    "generate": "responses/*.partial/unmerged/batches/000001.jsonl",
    "cache": "features/*.partial/shard-00001.safetensors",
    "train": "runs/*/checkpoints/last.json",
    "export": "runs/*/drafter.partial",
    "evaluate": "runs/*/evaluation/rounds/*.jsonl",
    "report": "runs/*/report.html",
}


def records(root: Path) -> dict:
    """Results that must not depend on interruptions: responses, features, rounds, losses and weights."""
    folder = root / "runs" / "dflash-tiny_llama"
    rounds = {
        path.name: [[r["accepted"] for r in json.loads(line)["rounds"]] for line in open(path)]
        for path in sorted(folder.glob("evaluation/rounds/*.jsonl"))
    }
    shards = [path.read_bytes() for path in sorted(root.glob("features/*/shard-*"))]
    return {
        "responses": [
            path.read_text() for kind in ("responses", "greedy") for path in sorted(root.glob(f"{kind}/*/*.jsonl"))
        ],
        "shards": shards,
        "rounds": rounds,
        "losses": [(row["step"], row["loss"]) for row in map(json.loads, open(folder / "metrics.jsonl"))],
        "weights": (folder / "drafter" / "model.safetensors").read_bytes(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("phase", sorted(SIGNS))
def test_kill_and_rerun_gives_the_same(phase, finished, tmp_path):
    """After kill -9 inside a phase, the same command gives the same records, losses and accepted counts."""
    small = ["cache.shard_bytes=8000"]
    whole = tmp_path / "whole"
    assert run(whole, *small, cwd=tmp_path).returncode == 0
    root = tmp_path / "killed"
    started = subprocess.Popen(
        [*COMMAND, *small],
        env=environment(root),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert kill_when(root, started, SIGNS[phase]), f"the command ended before it could be killed in {phase}"
    result = run(root, *small, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert records(root) == records(whole)
    assert (root / "runs" / "dflash-tiny_llama" / "report.json").is_file() and any(
        name.startswith("evaluation/") for name in read_offline_run(root / "runs" / "dflash-tiny_llama")[1]
    )


def test_missing_choice_lists_the_options(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "dloop_train", "+target=tiny_llama"],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (
        result.returncode != 0
        and "choose a drafter: +drafter=<dflash|domino|dspark|eagle3|mtp|mtp_assistant>" in result.stderr
    )


def test_unknown_field_lists_the_known(tmp_path):
    result = run(tmp_path, "train.stpes=3", cwd=tmp_path)
    assert (
        result.returncode != 0
        and "stpes" in result.stderr
        and "fields of TrainConfig" in result.stderr
        and "Traceback" not in result.stderr
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the wish to end with one's parent is Linux's")
@pytest.mark.parametrize("victim", ["the command", "torchrun"])
def test_ranks_end_with_their_starter(victim, tmp_path):
    """After kill -9 on the command or on torchrun alone, no rank may keep writing checkpoints beside a rerun."""
    started = subprocess.Popen(
        [*COMMAND, "train.steps=100000"],
        env=environment(tmp_path),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoints/last.json")), "no checkpoint")
    (agent,), (_,) = processes_of(tmp_path, "dloop_train.agent"), processes_of(tmp_path)
    os.kill(started.pid if victim == "the command" else agent, signal.SIGKILL)
    started.wait()
    wait_for(
        lambda: not processes_of(tmp_path) + processes_of(tmp_path, "dloop_train.agent"), "ranks outlived their starter"
    )


def wait_for(condition, failure: str) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(failure)
