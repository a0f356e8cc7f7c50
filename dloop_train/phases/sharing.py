"""Sharing: divide the files of a phase among the ranks.

A phase that was killed continues with the files that are missing.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from dloop_train.ranks import rank, world_size

LOOK_AGAIN = 1.0
"""Seconds between two checks for the files of the other ranks."""


def missing(files: Sequence[Path]) -> list[int]:
    """Numbers of the files that do not exist yet."""
    there = names(files)
    return [number for number, file in enumerate(files) if file.name not in there]


def here(numbers: Sequence[int]) -> list[int]:
    """Those of the numbers that this rank makes.

    The choice depends on the number only, so that ranks that list the folder at different times choose alike.
    """
    return [number for number in numbers if number % world_size() == rank()]


def make_files(
    files: Sequence[Path], sizes: Sequence[int], make: Callable[[int], int], *, unit: str, desc: str
) -> None:
    """Make this rank's share of the missing files, and wait until the other ranks have made theirs.

    `make` writes the file of a number and returns the number of its tokens. `sizes` are counted in `unit`;
    the first rank shows the progress of all ranks.

    Ranks synchronise through the file system, so that none hangs in a collective operation if another one dies.
    The process that started the ranks detects that.
    """
    with tqdm(total=int(sum(sizes)), unit=unit, unit_scale=True, desc=desc, disable=rank() != 0) as bar:
        show(bar, files, sizes)
        bar.initial = bar.n
        started, tokens = time.perf_counter(), 0
        for number in here(missing(files)):
            tokens += make(number)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s a rank", refresh=False)
            show(bar, files, sizes)
        while missing(files):
            time.sleep(LOOK_AGAIN)
            show(bar, files, sizes)
        show(bar, files, sizes)


def show(bar: tqdm, files: Sequence[Path], sizes: Sequence[int]) -> None:
    if not bar.disable:
        there = names(files)
        bar.update(int(sum(size for file, size in zip(files, sizes, strict=True) if file.name in there)) - bar.n)


def names(files: Sequence[Path]) -> set[str]:
    """Names of all entries in the folder of the files, from one directory listing however many files there are."""
    return {entry.name for entry in os.scandir(files[0].parent)} if files and files[0].parent.is_dir() else set()
