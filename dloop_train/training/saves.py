"""Saves: checkpoints on disk. Each is there whole or not at all; the last few and the best are kept; any number of ranks reads them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dloop_train.config import check
from dloop_train.drafters.base import Drafter
from dloop_train.ranks import barrier, local_rank, rank, say, world_size
from dloop_train.runs import write_atomic

POINTER = "last.json"
WEIGHTS = "weights.safetensors"
BEST = "best"
PARTIAL = ".partial"
UNIVERSAL = ".universal"
TORCHS_WRITER = ("inline_container", "PytorchStreamWriter")
"""What torch.save's errors of a file name: a RuntimeError, as are those of memory and of lost connections."""
STATE_BYTES = 12
"""Of a trained parameter in a checkpoint, beside the weight itself: its fp32 master and AdamW's two moments."""


@dataclass(frozen=True)
class Last:
    """The checkpoint to go on from."""

    tag: str
    step: int
    world_size: int


@dataclass(frozen=True)
class Best:
    """The weights that validated best."""

    step: int
    score: float


def last_of(folder: Path) -> Last | None:
    """What the pointer says, if there is one."""
    pointer = folder / POINTER
    return Last(**json.loads(pointer.read_text())) if pointer.is_file() else None


def best_of(folder: Path) -> Best | None:
    """What the best weights say of themselves, if there are any."""
    path = folder / BEST / WEIGHTS
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    return Best(int(facts["step"]), float(facts["score"]))


class Checkpoints:
    """A run's checkpoints. Methods that write are called on every rank."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def tidy(self) -> None:
        """Remove what a killed save or conversion left, and what no pointer leads to."""
        if rank() == 0 and self.folder.is_dir():
            last = last_of(self.folder)
            kept = last.tag if last else ""
            for path in self.folder.glob("step-*"):
                if path.suffix in (PARTIAL, UNIVERSAL) or path.name > kept:
                    shutil.rmtree(path)
            if last is None:
                shutil.rmtree(self.folder / BEST, ignore_errors=True)
            elif (best := best_of(self.folder)) is not None:  # a kill between the weights and the note on them
                self.note(best)
        barrier()

    def save(self, engine, drafter: Drafter, step: int, state: dict) -> None:
        """A checkpoint of all ranks, written beside, flushed and renamed; the pointer moves when everything lies on disk."""
        tag = f"step-{step:07d}"
        beside = self.folder / f"{tag}{PARTIAL}"
        if rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.require_room(drafter)
        weights, what = whole_weights(drafter), f"the checkpoint of step {step}"
        with writing(what, self.folder):
            engine.save_checkpoint(str(self.folder), tag=beside.name, client_state=state, save_latest=False)
            write_weights(weights, beside / WEIGHTS, {})
        barrier()
        if local_rank() == 0:  # what the ranks of this machine wrote
            with writing(what, self.folder):
                flush([beside, *beside.rglob("*")])
        barrier()
        if rank() == 0:
            os.replace(beside, self.folder / tag)
            flush([self.folder])
            write_atomic(self.folder / POINTER, json.dumps({"tag": tag, "step": step, "world_size": world_size()}))
            for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
                shutil.rmtree(old)
        barrier()

    def require_room(self, drafter: Drafter) -> None:
        """Stop before a save that cannot end well."""
        needed, free = checkpoint_bytes(drafter), shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(
                f"{self.folder} has {free / 1e9:.3g} GB free, a checkpoint needs {needed / 1e9:.3g} GB; "
                f"the last one is kept. Make room or lower train.keep ({self.keep}), and run the same command again"
            )

    def mark_best(self, drafter: Drafter, best: Best) -> None:
        """Keep these weights in best/. Step and score stand in the file itself, so that they can be renamed together."""
        path = self.folder / BEST / WEIGHTS
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{WEIGHTS}")
        weights = whole_weights(drafter)
        with writing(f"the best weights, of step {best.step},", self.folder):
            write_weights(weights, beside, {"format": "pt", "step": str(best.step), "score": repr(best.score)})
        if rank() == 0:
            os.replace(beside, path)
            self.note(best)
        barrier()

    def note(self, best: Best) -> None:
        write_atomic(self.folder / BEST / "best.json", json.dumps({"step": best.step, "score": best.score}))

    def universal(self, last: Last, stage: int) -> bool:
        """Whether a checkpoint must be read in DeepSpeed's universal form, because other ranks wrote it; makes that form."""
        if last.world_size == world_size() or stage == 0:  # stage 0 divides nothing
            return False
        if rank() == 0:
            say(
                f"train: {last.tag} was written by {last.world_size} rank(s), this run has {world_size()}: converting it"
            )
            convert(self.folder / last.tag, self.folder / f"{last.tag}{UNIVERSAL}")
        barrier()
        return True

    def load(self, engine, last: Last, *, universal: bool) -> dict:
        """Fill the engine; returns what was saved as `state`."""
        tag = last.tag + UNIVERSAL * universal
        check(
            (self.folder / tag).is_dir(),
            f"{self.folder / POINTER} names {tag}, which is not there; bring it back, or delete {self.folder} to start anew",
        )
        path, state = engine.load_checkpoint(str(self.folder), tag=tag)
        check(
            path is not None, f"{self.folder / tag} could not be loaded; delete {self.folder / POINTER} to start anew"
        )
        barrier()
        if universal and rank() == 0:
            shutil.rmtree(self.folder / tag)
        say(f"train: resumed at step {last.step} from {self.folder / last.tag}")
        return state


def convert(checkpoint: Path, universal: Path) -> None:
    """DeepSpeed's own conversion, in a process of its own because it starts workers; whole when it has its name."""
    beside = universal.with_name(universal.name + PARTIAL)
    workers = str(min(4, os.cpu_count() or 1))
    command = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--input_folder",
        str(checkpoint),
        "--output_folder",
        str(beside),
        "--num_extract_workers",
        workers,
        "--num_merge_workers",
        workers,
        "--inject_missing_state",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    check(
        result.returncode == 0,
        f"{checkpoint} could not be converted for {world_size()} rank(s); go on with as many ranks as before.\n{result.stderr[-2000:]}",
    )
    os.replace(beside, universal)
    (checkpoint.parent / "latest_universal").unlink(missing_ok=True)


def write_weights(weights: dict[str, Tensor], path: Path, facts: dict[str, str]) -> None:
    """On the first rank, which has them whole; flushed."""
    if rank() == 0:
        save_file(weights, path, metadata=facts)
        flush([path])


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """A full disk has many names: torch's writer says RuntimeError, safetensors has its own. DeepSpeed also gathers and meets in there, whose errors are let through."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(name in str(error) for name in TORCHS_WRITER):
            raise
        free = shutil.disk_usage(folder).free / 1e9
        raise OSError(
            f"{what} could not be written to {folder} ({free:.3g} GB free): {error}\n"
            f"the last checkpoint is kept; make room and run the same command again"
        ) from error


def checkpoint_bytes(drafter: Drafter) -> int:
    """What a checkpoint takes on disk, about: DeepSpeed keeps the weights and the optimiser, and the weights lie beside them once more."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.element_size(), p.requires_grad) for p in drafter.parameters()]
    return sum(count * (2 * size + STATE_BYTES * trained) for count, size, trained in sizes)


def flush(paths: Iterable[Path]) -> None:
    """Have files and folders on the disk, not in a cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def whole_weights(drafter: Drafter) -> dict[str, Tensor]:
    """On the first rank, parameters and buffers as plain tensors on the CPU, gathered from all ranks under ZeRO-3."""
    with gathered(drafter):
        if rank() != 0:
            return {}
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in drafter.state_dict().items()}


def gathered(drafter: Drafter):
    """Inside, every rank has the whole weights."""
    import deepspeed

    sharded = [parameter for parameter in drafter.parameters() if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded))


def weights_of(folder: Path, checkpoint: str) -> tuple[Path, int]:
    """The weights that export.checkpoint names, and their step."""
    last, best = last_of(folder), best_of(folder)
    check(last is not None, f"{folder} has no checkpoint; run phases=[train] first")
    if checkpoint == "best" and best is not None:
        return folder / BEST / WEIGHTS, best.step
    if checkpoint == "best":
        say(f"export: no step was validated, so {last.tag}, the last checkpoint, is taken")
    tag = f"step-{int(checkpoint):07d}" if checkpoint.isdigit() else last.tag
    there = sorted(path.parent.name for path in folder.glob(f"step-*/{WEIGHTS}"))
    check(tag in there, f"{folder} has no checkpoint {tag}, only {there}; train.keep says how many stay")
    return folder / tag / WEIGHTS, int(tag.removeprefix("step-"))
