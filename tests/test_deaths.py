"""Tests of interrupted runs: exact results after SIGKILL at any time, and one clear message per error."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dloop_train.data.store import read_index
from dloop_train.ranks import STOPPED
from dloop_train.runs import read_jsonl
from dloop_train.training.saves import best_of, last_of

REPOSITORY = Path(__file__).parents[1]
COMMAND = [
    sys.executable,
    "-m",
    "dloop_train",
    "+drafter=dflash",
    "+target=tiny_llama",
    "launch.threads=1",
    "wandb.mode=disabled",
    "train.batch_size=4",
    "train.micro_batch_size=1",
    "train.validate_prompts=1",
]


def start(root, name, *overrides, ranks=2):
    environment = os.environ | {"DLOOP_ROOT": str(root), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, f"name={name}", f"launch.processes={ranks}", *overrides],
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(started):
    """Wait for the end of a command and return its exit code and stderr."""
    said = started.communicate(timeout=600)[1]
    return started.returncode, said


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Root folder with responses and features, for all trainings in this file."""
    root = tmp_path_factory.mktemp("root")
    code, said = end(start(root, "features", "phases=[generate,cache]", ranks=1))
    assert code == 0, said
    return root


@pytest.mark.slow
def test_a_poisoned_shard_ends_both_ranks_and_is_named_once(root, tmp_path):
    """Only one rank reads the sample; without a check the other would wait for it in an all-reduce."""
    shutil.copytree(root, tmp_path / "root")
    shard = next((tmp_path / "root").glob("features/*/shard-00000.safetensors"))
    with safe_open(shard, "pt") as file:
        tensors, facts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    number = 9
    tensors["features"][int(read_index(shard.parent).start[number]) + 2, 3] = torch.nan
    name = json.loads(facts["samples"])[number][0]
    save_file(tensors, shard, metadata=facts)
    began = time.monotonic()
    code, said = end(start(tmp_path / "root", "poisoned", "phases=[train]", "train.steps=12"))
    assert code != 0 and time.monotonic() - began < 300
    assert said.count("is not what was written") == 1 and f"sample {name} in {shard}" in said
    assert "Traceback" not in said, "the launcher's own traceback hides the cause"


@pytest.mark.slow
def test_settings_that_would_corrupt_are_refused_by_name_and_others_are_logged(root):
    assert end(start(root, "settings", "phases=[train]", "train.steps=2", ranks=1))[0] == 0
    code, said = end(start(root, "settings", "phases=[train]", "train.steps=2", "deepspeed=zero2", ranks=1))
    assert (
        code != 0
        and "was trained with deepspeed=zero1 deepspeed.offload=false, this run has deepspeed=zero2" in said
        and "go on with deepspeed=zero1" in said
    )
    code, said = end(start(root, "settings", "phases=[train]", "train.steps=2", "train.lr=0.5", ranks=1))
    assert code != 0 and "train: found" in said and "'lr': 6e-05" in said
    code, said = end(
        start(root, "settings", "phases=[train]", "train.steps=2", "train.keep=5", "train.micro_batch_size=2", ranks=2)
    )
    assert (
        code == 0
        and "train.keep was 2 and is 5 from now on" in said
        and "train.micro_batch_size was 1 and is 2 from now on" in said
    )


def everybody(root, name):
    """Ids of the processes with this run in their command line, including the command itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{root}/runs/{name}/" in said or (f"name={name} " in said and "dloop_train" in said):
            found.append(int(path.parent.name))
    return found


def kill(root, name, started):
    """Send SIGKILL to all processes of the run, so that none can clean up."""
    for _ in range(50):
        for process in everybody(root, name):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not everybody(root, name):
            break
        time.sleep(0.01)
    started.communicate()


def wait_until(started, condition):
    """Wait until `condition()` is true; False if the command ended before."""
    while not condition():
        if started.poll() is not None:
            return False
        time.sleep(0.001)
    return True


def killed_in_a_save(started, checkpoints, ranks, moment):
    return wait_until(started, lambda: list(checkpoints.glob("step-*.partial")))


def killed_at_random(started, checkpoints, ranks, moment):
    """Wait until `moment` seconds after the next checkpoint by `ranks` ranks; False if the command ended before."""
    before = last_of(checkpoints)
    if not wait_until(
        started, lambda: last_of(checkpoints) not in (None, before) and last_of(checkpoints).world_size == ranks
    ):
        return False
    time.sleep(moment)
    return started.poll() is None


def killed_in_a_later_save(started, checkpoints, ranks, moment):
    return killed_at_random(started, checkpoints, ranks, 0) and killed_in_a_save(started, checkpoints, ranks, 0)


WAYS = (killed_at_random, killed_in_a_save, killed_in_a_later_save)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("others", [(), (4, 8)], ids=["two ranks", "two ranks, twice one"])
def test_killed_ten_times_equals_uninterrupted(others, root):
    """All processes are killed ten times, also during saves, and the same command is run again each time."""
    settings, name = (
        ("phases=[train]", "train.steps=40", "train.save_every=1", "train.validate_every=7", "train.lr=1e-3"),
        f"killed-{len(others)}",
    )
    if not (root / "runs" / "whole").exists():
        assert end(start(root, "whole", *settings))[0] == 0
    (root / "runs" / name).mkdir()
    shutil.copy(
        root / "runs" / "whole" / "costs.json", root / "runs" / name
    )  # both choose the best checkpoint with the same cost table
    checkpoints, moments, kills = root / "runs" / name / "checkpoints", random.Random(0), []
    for attempt in range(10):
        ranks = 1 if attempt in others else 2
        started, way = start(root, name, *settings, ranks=ranks), WAYS[0 if attempt in others else attempt % 3]
        assert way(started, checkpoints, ranks, moments.uniform(0, 0.5)), (
            f"attempt {attempt} ended by itself: {end(started)}"
        )
        kill(root, name, started)
        kills.append((way.__name__, ranks, last_of(checkpoints) and last_of(checkpoints).step))
    print(kills)
    code, said = end(start(root, name, *settings))
    assert code == 0, said
    one, two = (
        load_file(root / "runs" / which / "checkpoints" / "step-0000040" / "weights.safetensors")
        for which in ("whole", name)
    )
    rows, whole = (read_jsonl(root / "runs" / which / "metrics.jsonl") for which in (name, "whole"))
    assert [row["step"] for row in rows] == [row["step"] for row in whole] == list(range(1, 41))
    for key, weight in one.items():
        if others:
            torch.testing.assert_close(two[key], weight, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(two[key], weight), key
    if not others:
        assert [(row["loss"], row["grad_norm"]) for row in rows] == [(row["loss"], row["grad_norm"]) for row in whole]
        validated, all_validated = (
            [row | {"seconds": 0} for row in read_jsonl(root / "runs" / which / "validation.jsonl")]
            for which in (name, "whole")
        )
        assert validated == all_validated and [row["step"] for row in validated] == [*range(0, 41, 7), 40]
        assert best_of(checkpoints) == best_of(root / "runs" / "whole" / "checkpoints")
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-0000039", "step-0000040"]


@pytest.mark.slow
def test_a_stop_that_is_asked_for_leaves_with_its_own_code(root):
    """The ranks save and exit with their own code; the training is not marked as done, so that it can be resumed."""
    started = start(root, "stopped", "phases=[train]", "train.steps=400", "train.save_every=1000")
    folder = root / "runs" / "stopped"
    assert wait_until(
        started, lambda: (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size
    )
    (folder / "stop").touch()
    code, said = end(started)
    assert code == STOPPED, said
    assert (
        last_of(folder / "checkpoints") is not None
        and not (folder / "checkpoints" / "done.json").exists()
        and not (folder / "stop").exists()
    )
