"""Saves: atomic checkpoints on disk, of which the last ones and the best weights are kept."""

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
"""Words in the RuntimeErrors of torch.save that concern a file.

They distinguish these from RuntimeErrors about memory or lost connections.
"""
STATE_BYTES = 12
"""Bytes of a trained parameter in a checkpoint besides its weight: fp32 master weight and AdamW's two moments."""


@dataclass(frozen=True)
class Last:
    """The checkpoint from which training resumes."""

    tag: str
    step: int
    world_size: int


@dataclass(frozen=True)
class Best:
    """Step and score of the weights with the best validation."""

    step: int
    score: float


def last_of(folder: Path) -> Last | None:
    """The last complete checkpoint according to last.json. None if there is none."""
    pointer = folder / POINTER
    return Last(**json.loads(pointer.read_text())) if pointer.is_file() else None


def best_of(folder: Path) -> Best | None:
    """Step and score from the metadata of the best weights. None if there are none."""
    path = folder / BEST / WEIGHTS
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    return Best(int(facts["step"]), float(facts["score"]))


class Checkpoints:
    """A run's checkpoints. All methods but `require_room` and `note` are called on every rank."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def tidy(self) -> None:
        """Remove the remains of a killed save or conversion, and checkpoints later than the one in last.json."""
        if rank() == 0 and self.folder.is_dir():
            last = last_of(self.folder)
            kept = last.tag if last else ""
            for path in self.folder.glob("step-*"):
                if path.suffix in (PARTIAL, UNIVERSAL) or path.name > kept:
                    shutil.rmtree(path)
            if last is None:
                shutil.rmtree(self.folder / BEST, ignore_errors=True)
            elif (best := best_of(self.folder)) is not None:  # after a kill between writing weights and best.json
                self.note(best)
        barrier()

    def save(self, engine, drafter: Drafter, step: int, state: dict) -> None:
        """Write a checkpoint of all ranks to a partial folder, flush and rename it. Then update last.json.

        Raises OSError if there is too little disk space or writing fails.
        """
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
        if local_rank() == 0:  # the files that the ranks of this machine wrote
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
        """Raise OSError if the disk has too little space for a checkpoint."""
        needed, free = checkpoint_bytes(drafter), shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(
                f"{self.folder} has {free / 1e9:.3g} GB free, a checkpoint needs {needed / 1e9:.3g} GB; "
                f"the last one is kept. Make room or lower train.keep ({self.keep}), and run the same command again"
            )

    def mark_best(self, drafter: Drafter, best: Best) -> None:
        """Write weights to best/. Step and score are in the file's metadata, so that one rename replaces all three."""
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
        """Whether a checkpoint must be loaded in DeepSpeed's universal form, because of another number of ranks.

        If so, the form is created.
        """
        if last.world_size == world_size() or stage == 0:  # stage 0 divides nothing over ranks
            return False
        if rank() == 0:
            say(
                f"train: {last.tag} was written by {last.world_size} rank(s), "
                f"this run has {world_size()}: converting it"
            )
            convert(self.folder / last.tag, self.folder / f"{last.tag}{UNIVERSAL}")
        barrier()
        return True

    def load(self, engine, last: Last, *, universal: bool) -> dict:
        """Load a checkpoint into the engine. Returns what was saved as `state`.

        A universal form is deleted afterwards.
        """
        tag = last.tag + UNIVERSAL * universal
        check(
            (self.folder / tag).is_dir(),
            f"{self.folder / POINTER} names {tag}, which is not there; "
            f"restore it, or delete {self.folder} to start anew",
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
    """Run DeepSpeed's conversion to the universal form. The result is renamed to `universal` when complete.

    It runs in a separate process because it starts workers.
    """
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
        f"{checkpoint} could not be converted for {world_size()} rank(s); go on with as many ranks as before.\n"
        f"{result.stderr[-2000:]}",
    )
    os.replace(beside, universal)
    (checkpoint.parent / "latest_universal").unlink(missing_ok=True)


def write_weights(weights: dict[str, Tensor], path: Path, facts: dict[str, str]) -> None:
    """Write and flush weights on the first rank, the only one that has them whole."""
    if rank() == 0:
        save_file(weights, path, metadata=facts)
        flush([path])


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Raise errors of writing a file as OSError, with the free space in the message.

    Torch's writer raises RuntimeError and safetensors its own error if the disk is full.
    RuntimeErrors of other origin, such as DeepSpeed's collective operations, are not changed.
    """
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
    """Approximate size of a checkpoint on disk.

    It contains the weights twice, in DeepSpeed's files and as safetensors, and the optimiser's state.
    """
    sizes = [(getattr(p, "ds_numel", p.numel()), p.element_size(), p.requires_grad) for p in drafter.parameters()]
    return sum(count * (2 * size + STATE_BYTES * trained) for count, size, trained in sizes)


def flush(paths: Iterable[Path]) -> None:
    """Write files and folders from the operating system's cache to disk (fsync)."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def whole_weights(drafter: Drafter) -> dict[str, Tensor]:
    """Parameters and buffers as plain tensors on the CPU, gathered from all ranks under ZeRO-3.

    Called on every rank; all but the first get an empty dictionary.
    """
    with gathered(drafter):
        if rank() != 0:
            return {}
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in drafter.state_dict().items()}


def gathered(drafter: Drafter):
    """Context manager in which every rank has the whole weights, also under ZeRO-3."""
    import deepspeed

    sharded = [parameter for parameter in drafter.parameters() if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded))


def weights_of(folder: Path, checkpoint: str) -> tuple[Path, int]:
    """Path and step of the weights that export.checkpoint selects: best, last or a step. Checks that they exist."""
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
