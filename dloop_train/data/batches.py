"""Batches: which samples stand in which step and micro-batch, a pure function of (seed, epoch), and their collation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dloop_train.types import Sample


@dataclass(frozen=True)
class TextBatch:
    """Samples padded on the right."""

    ids: tuple[str, ...]
    tokens: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool
    features: Tensor  # [B, T, F]
    last_hidden: Tensor  # [B, T, D]

    def to(self, device: torch.device, dtype: torch.dtype) -> "TextBatch":
        return TextBatch(self.ids, self.tokens.to(device), self.loss_mask.to(device), self.features.to(device, dtype), self.last_hidden.to(device, dtype))


class Source(Protocol):
    """Where a training gets its batches from."""

    lengths: tuple[int, ...]
    """Tokens of every sample."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> TextBatch:
        """Samples as they lie on disk. Called ahead of time, on a thread of its own."""

    def ready(self, batch: TextBatch, device: torch.device, dtype: torch.dtype) -> TextBatch:
        """The batch with all its features, on the device. Called in the step."""


def collate(samples: Sequence[Sample]) -> TextBatch:
    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(sample, name) for sample in samples], batch_first=True)
    return TextBatch(tuple(sample.id for sample in samples), padded("tokens"), padded("loss_mask"), padded("features"), padded("last_hidden"))


WINDOW = 32
"""Steps within which samples are grouped by length."""


def plan_epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Sample indices of every step: shuffled, grouped by length within windows of steps, the last step perhaps smaller."""
    generator = np.random.Generator(np.random.Philox([seed, epoch]))
    order = generator.permutation(len(lengths))
    steps = []
    for start in range(0, len(order), WINDOW * batch_size):
        window = sorted(order[start:start + WINDOW * batch_size].tolist(), key=lambda index: (lengths[index], index))
        grouped = [window[at:at + batch_size] for at in range(0, len(window), batch_size)]
        steps += [grouped[number] for number in generator.permutation(len(grouped))]
    return steps


def micro_batches(step: Sequence[int], micro_batch_size: int, count: int) -> list[list[int]]:
    """Exactly `count` micro-batches of a step, in a global order that ranks share out; a missing one is empty (run as a masked dummy)."""
    cut = [list(step[start:start + micro_batch_size]) for start in range(0, len(step), micro_batch_size)]
    return cut + [[] for _ in range(count - len(cut))]
