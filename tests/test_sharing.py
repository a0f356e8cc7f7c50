"""Tests of sharing generate and cache over ranks: any number of ranks gives the same files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_pipeline import environment, wait_for

from dloop_train.phases.sharing import here, make_files, missing

COMMAND = [
    sys.executable,
    "-m",
    "dloop_train",
    "+drafter=dflash",
    "+target=tiny_llama",
    "launch.threads=1",
    "prompts.limit=64",
    "generate.batch_size=4",
    "generate.max_new_tokens=96",
    "generate.greedy_prompts=3",
    "cache.shard_bytes=60000",
    "phases=[generate,cache]",
]


def test_every_file_is_one_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    shares = []
    for number in range(3):
        monkeypatch.setenv("RANK", str(number))
        shares.append(here(range(1, 10)))
    assert sorted(number for share in shares for number in share) == list(range(1, 10)) and {
        len(share) for share in shares
    } == {3}


def test_only_missing_files_are_made(tmp_path):
    files = [tmp_path / "sub" / f"{number}" for number in range(4)]
    files[0].parent.mkdir()
    files[2].write_text("old")
    made = []

    def make(number):
        made.append(number)
        files[number].write_text("new")
        return 1

    make_files(files, [5, 6, 7, 8], make, unit="row", desc="test")
    assert made == [0, 1, 3] and files[2].read_text() == "old" and missing(files) == []
    make_files([], [], make, unit="row", desc="test")


def made(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes()
        for kind in ("responses", "greedy", "features")
        for file in sorted(root.glob(f"{kind}/*/*"))
        if file.is_file()
    }


def run(root: Path, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *more], env=environment(root), cwd=root, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux's /proc")
def test_two_ranks_make_the_same_files_also_when_one_dies(tmp_path):
    """If one rank dies, the other rank and the command end with an error, and the same command continues the work."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert run(tmp_path / "one").returncode == 0
    root = tmp_path / "two"
    started = subprocess.Popen(
        [*COMMAND, "launch.processes=2"],
        env=environment(root),
        cwd=root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: list(root.glob("responses/*.partial/unmerged/batches/*")), "no batch")
    os.kill(second_rank(root), signal.SIGKILL)
    assert started.wait() != 0 and "dloop_train: generate:" in started.stderr.read()
    there = {file.name: file.stat().st_mtime_ns for file in root.glob("responses/*.partial/unmerged/batches/*.jsonl")}
    assert 0 < len(there) < 16
    result = run(root, "launch.processes=2")
    assert result.returncode == 0, result.stderr[-3000:]
    assert made(root) == made(tmp_path / "one") and len(list(root.glob("features/*/shard-*"))) > 4
    assert result.stderr.count("dloop_train: ") == 0


def second_rank(root: Path) -> int:
    """The process id of rank 1."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                str(root).encode() in (path / "cmdline").read_bytes()
                and b"\0RANK=1\0" in (path / "environ").read_bytes()
            ):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("there is no second rank")
