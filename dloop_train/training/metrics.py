"""Metrics: sums and counts reduced over ranks once, written as JSON lines and to Weights & Biases."""

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
"""Named sums and counts."""


def add_sums(old: Sums, new: Sums) -> Sums:
    """The sums of two parts of a step."""
    both = {
        name: (old[name][0] + total, old[name][1] + count) if name in old else (total, count)
        for name, (total, count) in new.items()
    }
    return old | both


def reduce_sums(sums: Sums) -> dict:
    """Means over all ranks and micro-batches of named (sum, count) pairs; vectors become lists, and None stands where nothing was counted."""
    names = sorted(sums)
    pairs = [
        torch.stack([total.detach().float(), count.detach().float().expand_as(total)])
        for total, count in map(sums.get, names)
    ]
    whole = sum_over_ranks(torch.cat([pair.flatten() for pair in pairs])).split(
        [pair.numel() for pair in pairs]
    )  # one sum for all of them
    return {
        name: mean_of(*summed.view_as(pair).tolist()) for name, summed, pair in zip(names, whole, pairs, strict=True)
    }


def mean_of(total: float | list[float], count: float | list[float]) -> float | list | None:
    if isinstance(total, list):
        return [mean_of(*entry) for entry in zip(total, count, strict=True)]
    return total / count if count else None


HISTOGRAM = "_histogram"
"""Ending of names whose values are counts of equal bins over [0, 1]."""


class MetricLog:
    """metrics.jsonl and validation.jsonl of a run, mirrored to W&B; rows past the resumed step are dropped.

    The validation of step `best` stays: its weights do, and their threshold stands there alone.
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
                write_jsonl(path, [])  # a start at 0 validates again
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
        """Each step once and in order, also where the best one is ahead."""
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
    """The report of a run as a W&B run of the same group: its table, its numbers, its figures, and its files as an artifact."""
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
    """Histograms as W&B draws them; of all else one number each, under names with slashes."""
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
    """Lists and dictionaries as one number an entry; what is unknown is left out."""
    entries = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(entries, dict):
        return {
            key: number for entry, inner in entries.items() for key, number in flat(f"{name}/{entry}", inner).items()
        }
    return {} if value is None else {name: value}


def start_wandb(folder: Path, settings: LogConfig, *, name: str, job: str, config: dict):
    """A W&B run, one for each job of this folder's group, continued when it is there; none at all when disabled."""
    mode = chosen_mode(settings, job)
    if mode == "disabled":
        return None
    os.environ.setdefault("WANDB_DATA_DIR", str(folder))  # where artifacts wait for their upload
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
"""In the run's folder: what its W&B runs are called. A name would lead two folders, or a training that begins anew, into one run, and W&B drops what is behind a run's last step."""


def wandb_id(folder: Path) -> str:
    path = folder / WANDB_ID
    if not path.is_file():
        write_atomic(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def chosen_mode(settings: LogConfig, job: str) -> str:
    """online, offline or disabled. Where nobody says which, a key decides, and it is told."""
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
        found = path.is_file() and host in netrc.netrc(path).hosts  # a default entry is somebody else's
        why = f"neither WANDB_API_KEY nor {path} has a key for {host}"
    except (netrc.NetrcParseError, OSError) as error:
        found, why = None, f"{path} cannot be read: {error}"
    say(f"{job}: W&B logs online to {host}, with the key in {path}" if found else f"{job}: W&B logs offline: {why}")
    return "online" if found else "offline"


def netrc_file() -> Path:
    """Where W&B looks for keys."""
    return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
