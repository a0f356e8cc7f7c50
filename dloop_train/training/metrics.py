"""Metrics: reduces sums and counts over ranks and logs them as JSON lines and to Weights & Biases."""

import io
import json
import netrc
import os
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dloop_train.config import LogConfig
from dloop_train.ranks import rank, say, sum_over_ranks
from dloop_train.runs import keep_rows, read_jsonl, write_atomic, write_jsonl

Sums = dict[str, tuple[Tensor, Tensor]]
"""(sum, count) by name."""


def add_sums(old: Sums, new: Sums) -> Sums:
    """Add the sums and counts of two parts of a step, name by name."""
    both = {
        name: (old[name][0] + total, old[name][1] + count) if name in old else (total, count)
        for name, (total, count) in new.items()
    }
    return old | both


def reduce_sums(sums: Sums) -> dict:
    """Means over all ranks, by name. Vectors become lists; a mean is None if its count is 0."""
    names = sorted(sums)
    pairs = [
        torch.stack([total.detach().float(), count.detach().float().expand_as(total)])
        for total, count in map(sums.get, names)
    ]
    # One all-reduce for all of them.
    whole = sum_over_ranks(torch.cat([pair.flatten() for pair in pairs])).split([pair.numel() for pair in pairs])
    return {
        name: mean_of(*summed.view_as(pair).tolist()) for name, summed, pair in zip(names, whole, pairs, strict=True)
    }


def mean_of(total: float | list[float], count: float | list[float]) -> float | list | None:
    if isinstance(total, list):
        return [mean_of(*entry) for entry in zip(total, count, strict=True)]
    return total / count if count else None


HISTOGRAM = "_histogram"
"""Suffix of names whose values are counts in equal bins over [0, 1]."""


class MetricLog:
    """metrics.jsonl and validation.jsonl of a run, also sent to W&B. Rows after the resumed step `start` are dropped.

    The validation of step `best` stays, since its weights are kept and their threshold is recorded only there.
    """

    def __init__(
        self, folder: Path, settings: LogConfig, *, name: str, config: dict, start: int, best: int | None = None
    ):
        self.folder = folder
        self.run = None
        if rank() != 0:
            return
        for file, kept in (("metrics.jsonl", None), ("validation.jsonl", best)):
            path = folder / file
            if start and path.is_file():
                keep_rows(path, lambda row, kept=kept: row["step"] <= start or row["step"] == kept)
            else:
                write_jsonl(path, [])  # a training that starts at step 0 validates again
        if start == 0:
            (folder / WANDB_ID).unlink(missing_ok=True)
        self.run = start_wandb(folder, settings, name=name, job="train", config=config)

    def write(self, step: int, row: dict) -> None:
        if rank() != 0:
            return
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, **row}) + "\n")
        self._mirror(step, row, "train")

    def validation(self, step: int, row: dict) -> None:
        """Write a validation. A row of the same step is replaced and rows stay sorted.

        The row of the best step may be later than this one, after a resume from an earlier checkpoint.
        """
        if rank() != 0:
            return
        path = self.folder / "validation.jsonl"
        others = [other for other in read_jsonl(path) if other["step"] != step]
        write_jsonl(path, sorted([*others, {"step": step, **row}], key=lambda row: row["step"]))
        self._mirror(step, row, "validation")

    def _mirror(self, step: int, row: dict, section: str) -> None:
        if self.run is not None:
            self.run.log({f"{section}/{name}": value for name, value in for_wandb(row).items()}, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


def log_report(
    folder: Path,
    settings: LogConfig,
    *,
    name: str,
    config: dict,
    rows: list[dict[str, str]],
    summary: dict[str, float],
    figures: dict[str, bytes],
    files: dict[str, str],
) -> None:
    """Log a report as a W&B run of the same group: table, numbers, figures, and files as an artifact."""
    run = start_wandb(folder, settings, name=name, job="report", config=config)
    if run is None:
        return
    import wandb

    run.log(
        {"evaluation/table": wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])}
        | {f"figures/{title}": wandb.Image(Image.open(io.BytesIO(png))) for title, png in figures.items()}
    )
    run.summary.update({f"evaluation/{key}": value for key, value in summary.items()})
    artifact = wandb.Artifact(f"{name}-report", type="report")
    for file, text in files.items():
        with artifact.new_file(file) as out:
            out.write(text)
    run.log_artifact(artifact)
    run.finish()


def for_wandb(row: dict) -> dict:
    """A row for W&B: histograms as W&B objects, all other values as single numbers under names with slashes."""
    values = {}
    for name, value in row.items():
        if name.endswith(HISTOGRAM):
            import wandb

            values[name.removesuffix(HISTOGRAM)] = wandb.Histogram(
                np_histogram=(np.array(value), np.linspace(0, 1, len(value) + 1))
            )
        else:
            values |= flat(name, value)
    return values


def flat(name: str, value) -> dict[str, float]:
    """Flatten lists and dictionaries to one number per entry. None is left out."""
    entries = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(entries, dict):
        return {
            key: number for entry, inner in entries.items() for key, number in flat(f"{name}/{entry}", inner).items()
        }
    return {} if value is None else {name: value}


def start_wandb(folder: Path, settings: LogConfig, *, name: str, job: str, config: dict):
    """The W&B run of a job in this folder's group, continued if it exists. None if W&B is disabled."""
    mode = chosen_mode(settings, job)
    if mode == "disabled":
        return None
    os.environ.setdefault("WANDB_DATA_DIR", str(folder))  # where artifacts are staged for the upload
    import wandb

    identity = wandb_id(folder)
    return wandb.init(
        project=settings.project,
        name=f"{name} {job}",
        id=f"{identity}-{job}",
        resume="allow",
        group=f"{name}-{identity}",
        job_type=job,
        mode=mode,
        dir=str(folder),
        config=config,
        settings=wandb.Settings(silent=True, console="off"),
    )


WANDB_ID = "wandb_id"
"""File in the run's folder with the random id of its W&B runs.

With the run's name as id, two folders, or a training that starts again, would log to the same W&B run.
W&B drops rows whose step is before the last one of a run.
"""


def wandb_id(folder: Path) -> str:
    path = folder / WANDB_ID
    if not path.is_file():
        write_atomic(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def chosen_mode(settings: LogConfig, job: str) -> str:
    """online, offline or disabled.

    With wandb.mode=auto and no WANDB_MODE, logging is online if a key is found; the choice is printed.
    """
    if settings.mode != "auto":
        return settings.mode
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    if os.environ.get("WANDB_API_KEY"):
        say(f"{job}: W&B logs online to {host}, with WANDB_API_KEY")
        return "online"
    path = netrc_file()
    try:
        found = path.is_file() and host in netrc.netrc(path).hosts  # a default entry is for other hosts
        why = f"neither WANDB_API_KEY nor {path} has a key for {host}"
    except (netrc.NetrcParseError, OSError) as error:
        found, why = None, f"{path} cannot be read: {error}"
    say(f"{job}: W&B logs online to {host}, with the key in {path}" if found else f"{job}: W&B logs offline: {why}")
    return "online" if found else "offline"


def netrc_file() -> Path:
    """The file in which W&B looks for keys."""
    return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
