"""Metrics: sums and counts reduced over ranks once, written as JSON lines and to Weights & Biases."""

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from dloop_train.config import LogConfig
from dloop_train.ranks import rank, sum_over_ranks
from dloop_train.runs import read_jsonl, write_jsonl

Sums = dict[str, tuple[Tensor, Tensor]]
"""Named sums and counts."""


def add_sums(old: Sums, new: Sums) -> Sums:
    """The sums of two parts of a step."""
    both = {name: (old[name][0] + total, old[name][1] + count) if name in old else (total, count) for name, (total, count) in new.items()}
    return old | both


def reduce_sums(sums: Sums) -> dict[str, float | list[float]]:
    """Means over all ranks and micro-batches of named (sum, count) pairs; vectors stay vectors."""
    means = {}
    for name in sorted(sums):
        total, count = (part.detach().float() for part in sums[name])
        both = sum_over_ranks(torch.stack([total, count.expand_as(total)]))
        mean = (both[0] / both[1].clamp(min=1e-9)).tolist()
        means[name] = mean
    return means


class MetricLog:
    """metrics.jsonl and validation.jsonl of a run, mirrored to W&B; rows past the resumed step are dropped."""

    def __init__(self, folder: Path, settings: LogConfig, *, name: str, config: dict, start: int):
        self.folder = folder
        self.run = None
        if rank() != 0:
            return
        for file in ("metrics.jsonl", "validation.jsonl"):
            path = folder / file
            rows = [row for row in read_jsonl(path) if row["step"] <= start] if start and path.is_file() else []  # a start at 0 validates again
            write_jsonl(path, rows)
        self.run = start_wandb(folder, settings, name=name, config=config)

    def write(self, step: int, row: dict) -> None:
        self._append("metrics.jsonl", step, row, "train")

    def validation(self, step: int, row: dict) -> None:
        self._append("validation.jsonl", step, row, "validation")

    def _append(self, file: str, step: int, row: dict, section: str) -> None:
        if rank() != 0:
            return
        with open(self.folder / file, "a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, **row}) + "\n")
        if self.run is not None:
            self.run.log({f"{section}/{name}": value for name, value in flat(row).items()}, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


def log_table(folder: Path, settings: LogConfig, *, name: str, rows: list[dict[str, str]], summary: dict[str, float]) -> None:
    """The final table of a run, and its numbers as the run's summary."""
    run = start_wandb(folder, settings, name=name, config={})
    if run is None:
        return
    import wandb
    run.log({"evaluation/table": wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])})
    run.summary.update({f"evaluation/{key}": value for key, value in summary.items()})
    run.finish()


def flat(row: dict) -> dict[str, float]:
    """Vectors become one number a slot."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, list):
            numbers |= {f"{name}/{index}": item for index, item in enumerate(value)}
        else:
            numbers[name] = value
    return numbers


def start_wandb(folder: Path, settings: LogConfig, *, name: str, config: dict):
    """A W&B run; offline where there is no key, and none at all when disabled."""
    if settings.mode == "disabled":
        return None
    import wandb
    key = os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").is_file()
    mode = ("online" if key else "offline") if settings.mode == "auto" else settings.mode
    return wandb.init(project=settings.project, name=name, id=name, resume="allow", group=name, mode=mode, dir=str(folder), config=config,
                      settings=wandb.Settings(silent=True, console="off"))
