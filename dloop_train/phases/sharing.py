"""Sharing: files made one by one, shared out over the ranks. A killed phase goes on with those that are missing."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from dloop_train.ranks import rank, world_size

LOOK_AGAIN = 1.0
"""Seconds between looks at what the other ranks have made."""


def missing(files: Sequence[Path]) -> list[int]:
    """Numbers of the files that are not there yet."""
    there = names(files)
    return [number for number, file in enumerate(files) if file.name not in there]


def here(numbers: Sequence[int]) -> list[int]:
    """Those that this rank makes. By their number alone, so that ranks which look at different times agree."""
    return [number for number in numbers if number % world_size() == rank()]


def make_files(
    files: Sequence[Path], sizes: Sequence[int], make: Callable[[int], int], *, unit: str, desc: str
) -> None:
    """Make this rank's share of what is missing, and wait for the others'; the first rank shows how far all are. `make` returns its tokens.

    Ranks meet in the file system: a rank that dies is its starter's matter, and none waits in a collective meanwhile.
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
    """What is in their folder: one look, however many they are."""
    return {entry.name for entry in os.scandir(files[0].parent)} if files and files[0].parent.is_dir() else set()
