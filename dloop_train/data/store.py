"""Feature store: samples on disk as safetensors shards of concatenated rows, and a manifest that says where each sample lies."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dloop_train.data.batches import TextBatch, collate
from dloop_train.types import Reads, Sample

ROWS = ("tokens", "loss_mask", "features", "last_hidden")


@dataclass(frozen=True)
class Place:
    """Where a sample lies."""

    id: str
    shard: int
    start: int
    length: int


def stored(reads: Reads) -> Reads:
    """What of a feature row lies on disk as features: the last hidden state has rows of its own, for the loss."""
    return replace(reads, last_hidden=False)


def plan_shards(lengths: Sequence[tuple[str, int]], row_bytes: int, shard_bytes: int) -> list[list[Place]]:
    """Samples in order, cut into shards of about `shard_bytes`. Depends on the lengths alone, so a resumed phase plans the same."""
    shards: list[list[Place]] = [[]]
    start = 0
    for identity, length in lengths:
        if start and (start + length) * row_bytes > shard_bytes:
            shards.append([])
            start = 0
        shards[-1].append(Place(identity, len(shards) - 1, start, length))
        start += length
    return shards


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(folder: Path, number: int, samples: Sequence[Sample]) -> None:
    """One shard, written beside and renamed. NaN or infinity names its sample."""
    for sample in samples:
        if not (sample.features.isfinite().all() and sample.last_hidden.isfinite().all()):
            raise ValueError(f"sample {sample.id}: the target's hidden states have NaN or infinite values; check the target's dtype and weights")
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples]).contiguous() for name in ROWS}
    tensors["tokens"] = tensors["tokens"].to(torch.int32)
    beside = folder / f".{shard_file(folder, number).name}.{os.getpid()}"
    save_file(tensors, beside)
    os.replace(beside, shard_file(folder, number))


def index_of(folder: Path, shards: list[list[Place]]) -> dict:
    """What the manifest keeps: places and the size of every shard."""
    sizes = [shard_file(folder, number).stat().st_size for number in range(len(shards))]
    return {"shard_sizes": sizes, "places": [[place.id, place.shard, place.start, place.length] for shard in shards for place in shard]}


class FeatureStore:
    """Reads samples of a complete store, each tensor as one memory-mapped slice."""

    def __init__(self, folder: Path, facts: dict, *, max_length: int, with_last_hidden: bool = False):
        self.folder = folder
        self.with_last_hidden = with_last_hidden
        self.places = [Place(*place) for place in facts["places"]]
        self.max_length = max_length
        self._files: dict[int, object] = {}
        for number, size in enumerate(facts["shard_sizes"]):
            path = shard_file(folder, number)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise ValueError(f"{path} has {found} bytes, its manifest says {size}: truncated or missing; delete {folder} and rerun phases=[cache]")

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(min(place.length, self.max_length) for place in self.places)

    def read(self, indices: Sequence[int]) -> TextBatch:
        return collate([self[index] for index in indices])

    def ready(self, batch: TextBatch, device: torch.device, dtype: torch.dtype) -> TextBatch:
        return batch.to(device, dtype)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        place = self.places[index]
        if place.shard not in self._files:
            self._files[place.shard] = self.open(place.shard)
        rows = slice(place.start, place.start + min(place.length, self.max_length))
        parts = {name: self._files[place.shard].get_slice(name)[rows] for name in ROWS}
        if not (parts["features"].isfinite().all() and parts["last_hidden"].isfinite().all()):
            raise ValueError(f"sample {place.id} in {shard_file(self.folder, place.shard)} has NaN or infinite features: the file is damaged; "
                             f"delete {self.folder} and rerun phases=[cache]")
        features = torch.cat([parts["features"], parts["last_hidden"]], dim=-1) if self.with_last_hidden else parts["features"]
        return Sample(place.id, parts["tokens"].long(), parts["loss_mask"].bool(), features, parts["last_hidden"])

    def open(self, number: int):
        path = shard_file(self.folder, number)
        try:
            return safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}): the file is damaged; delete {self.folder} and rerun phases=[cache]") from error
