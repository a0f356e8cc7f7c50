"""Feature store: samples on disk, as safetensors shards of concatenated rows and an index."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dloop_train.data.batches import TextBatch, collate
from dloop_train.types import FeatureSpec, Sample

ROWS = ("tokens", "loss_mask", "features", "last_hidden")
INDEX = "index.npz"
OPEN_SHARDS = 64
"""Number of shards that stay memory-mapped. A large store has more shards than a process may map files."""


@dataclass(frozen=True)
class Index:
    """Location of every sample. Arrays, since a million objects would need a gigabyte on each rank."""

    shard: np.ndarray  # [n] number of the shard
    start: np.ndarray  # [n] first row in the shard
    length: np.ndarray  # [n] number of rows

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def num_shards(self) -> int:
        return int(self.shard[-1]) + 1

    def of_shard(self, number: int) -> range:
        """Indices of the samples of a shard."""
        return range(*np.searchsorted(self.shard, [number, number + 1]).tolist())


def stored(feature_spec: FeatureSpec) -> FeatureSpec:
    """The part of a feature row that is stored as features. The last hidden state is stored apart, for the loss."""
    return replace(feature_spec, last_hidden=False)


def drafters_row(sample: Sample, feature_spec: FeatureSpec) -> Tensor:
    """The feature rows that a drafter reads, from a stored sample. [T, F]"""
    return torch.cat([sample.features, sample.last_hidden], dim=-1) if feature_spec.last_hidden else sample.features


def plan_shards(lengths: Sequence[int], row_bytes: int, shard_bytes: int) -> Index:
    """Divide the samples, in order, into shards of about `shard_bytes`.

    The plan depends only on the arguments, so that a resumed phase gets the same one.
    """
    shards, starts = [], []
    shard, start = 0, 0
    for length in lengths:
        if start and (start + length) * row_bytes > shard_bytes:
            shard, start = shard + 1, 0
        shards.append(shard)
        starts.append(start)
        start += length
    return Index(np.array(shards), np.array(starts), np.array(lengths))


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(folder: Path, number: int, samples: Sequence[Sample]) -> None:
    """Write one shard, to a temporary file that is then renamed. ValueError if a sample has NaN or infinite values."""
    for sample in samples:
        if not (sample.features.isfinite().all() and sample.last_hidden.isfinite().all()):
            raise ValueError(
                f"sample {sample.id}: the target's hidden states have NaN or infinite values; "
                f"check the target's dtype and weights"
            )
    samples = [replace(sample, tokens=sample.tokens.to(torch.int32)) for sample in samples]
    tensors = {name: torch.cat([getattr(sample, name) for sample in samples]).contiguous() for name in ROWS}
    beside = folder / f".{shard_file(folder, number).name}.{os.getpid()}"
    # One metadata entry, since safetensors writes several in random order, and equal shards should be equal files.
    save_file(tensors, beside, metadata={"samples": json.dumps([(sample.id, checksum(sample)) for sample in samples])})
    os.replace(beside, shard_file(folder, number))


def checksum(sample: Sample) -> int:
    """CRC-32 of a sample's id and stored rows. The id is included to detect a shard of other samples."""
    found = crc32(sample.id.encode())
    for name in ROWS:
        found = crc32(getattr(sample, name).contiguous().view(torch.uint8).numpy(), found)
    return found


def write_index(folder: Path, index: Index) -> dict:
    """Write the index. Returns facts for the manifest: shard sizes in bytes and the number of samples."""
    beside = folder / f".{os.getpid()}.{INDEX}"
    np.savez(beside, **vars(index))
    os.replace(beside, folder / INDEX)
    return {
        "shard_sizes": [shard_file(folder, number).stat().st_size for number in range(index.num_shards)],
        "samples": len(index),
    }


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: the store was made by an older version, or is damaged; "
            f"delete {folder} and rerun phases=[cache]"
        )
    with np.load(path) as arrays:
        return Index(**arrays)


class FeatureStore:
    """Reads samples of a complete store, each tensor as one memory-mapped slice.

    The checksum of a sample is verified when it is first read. ValueError if files are truncated or damaged.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict,
        *,
        max_length: int,
        feature_spec: FeatureSpec = FeatureSpec(),  # noqa: B008 a frozen value
    ):
        self.folder, self.max_length, self.feature_spec = folder, max_length, feature_spec
        self.index = read_index(folder)
        self.checked = np.zeros(len(self.index), dtype=bool)
        self.open = lru_cache(OPEN_SHARDS)(self.open)  # a cache per store
        for number, size in enumerate(facts["shard_sizes"]):
            path = shard_file(folder, number)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise ValueError(
                    f"{path} has {found} bytes, its manifest says {size}: truncated or missing; "
                    f"delete {folder} and rerun phases=[cache]"
                )

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.index.length.clip(max=self.max_length).tolist())

    def read(self, indices: Sequence[int]) -> TextBatch:
        return collate([self[index] for index in indices])

    def ready(self, batch: TextBatch, device: torch.device, dtype: torch.dtype) -> TextBatch:
        return batch.to(device, dtype)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Sample:
        number = int(self.index.shard[index])
        start, length = int(self.index.start[index]), int(self.index.length[index])
        file, samples = self.open(number)
        identity, expected = samples[index - self.index.of_shard(number)[0]]
        lying = Sample(identity, **{name: file.get_slice(name)[start : start + length] for name in ROWS})
        if not self.checked[index]:
            if checksum(lying) != expected:
                raise ValueError(
                    f"sample {lying.id} in {shard_file(self.folder, number)} is not what was written: "
                    f"the file is damaged; "
                    f"delete {self.folder} and rerun phases=[cache]"
                )
            self.checked[index] = True
        cut = {name: getattr(lying, name)[: self.max_length] for name in ROWS}
        sample = replace(lying, **cut | {"tokens": cut["tokens"].long()})
        return replace(sample, features=drafters_row(sample, self.feature_spec))

    def open(self, number: int):
        """The file of a shard, and the (id, checksum) of each of its samples."""
        path = shard_file(self.folder, number)
        try:
            file = safe_open(path, "pt")
            return file, json.loads(file.metadata()["samples"])
        except SafetensorError as error:
            raise ValueError(
                f"{path} cannot be read ({error}): the file is damaged; delete {self.folder} and rerun phases=[cache]"
            ) from error
