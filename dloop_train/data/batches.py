"""Batches: collates samples, and divides an epoch into steps, micro-batches and shares of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dloop_train.types import Sample


@dataclass(frozen=True)
class TextBatch:
    """Samples padded on the right, or packed: all in one row, one after the other."""

    ids: tuple[str, ...]
    tokens: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool
    features: Tensor  # [B, T, F]
    last_hidden: Tensor  # [B, T, D]
    lengths: tuple[int, ...] = ()
    """Tokens of each sample; empty if every sample fills its row."""
    first: Tensor | None = None  # [B, T] packed samples: the first position of each token's sample

    def to(self, device: torch.device, dtype: torch.dtype) -> "TextBatch":
        return replace(
            self,
            tokens=self.tokens.to(device),
            loss_mask=self.loss_mask.to(device),
            features=self.features.to(device, dtype),
            last_hidden=self.last_hidden.to(device, dtype),
            first=None if self.first is None else self.first.to(device),
        )

    def places(self) -> list[tuple[int, slice]]:
        """Row of each sample, and the slice of its tokens in that row."""
        lengths = self.lengths or (self.tokens.shape[1],) * len(self.ids)
        if self.first is None:
            return [(row, slice(0, length)) for row, length in enumerate(lengths)]
        ends = list(accumulate(lengths))
        return [(0, slice(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


class Source(Protocol):
    """What a training reads its batches from."""

    lengths: tuple[int, ...]
    """Tokens of every sample."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> TextBatch:
        """A batch of samples as stored. Called ahead of the step, in another thread."""

    def ready(self, batch: TextBatch, device: torch.device, dtype: torch.dtype) -> TextBatch:
        """The batch with all its features, on the device. Called in the step."""


def collate(samples: Sequence[Sample]) -> TextBatch:
    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(sample, name) for sample in samples], batch_first=True)

    return TextBatch(
        tuple(sample.id for sample in samples),
        padded("tokens"),
        padded("loss_mask"),
        padded("features"),
        padded("last_hidden"),
        tuple(len(sample.tokens) for sample in samples),
    )


def packed(batch: TextBatch) -> TextBatch:
    """The samples of a padded batch in one row, without padding. `first` keeps them separate."""

    def joined(rows: Tensor) -> Tensor:
        return torch.cat([rows[row, tokens] for row, tokens in batch.places()])[None]

    lengths = tuple(tokens.stop for _, tokens in batch.places())
    starts = torch.tensor([0, *accumulate(lengths)][:-1])
    first = starts.repeat_interleave(torch.tensor(lengths))[None].to(batch.tokens.device)
    return TextBatch(
        batch.ids,
        joined(batch.tokens),
        joined(batch.loss_mask),
        joined(batch.features),
        joined(batch.last_hidden),
        lengths,
        first,
    )


WINDOW = 32
"""Steps within which samples are grouped by length."""


def plan_epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Sample indices of every step of an epoch, as a function of `seed` and `epoch`.

    They are shuffled and grouped by length within WINDOW steps. One step may have fewer samples.
    """
    generator = np.random.Generator(np.random.Philox([seed, epoch]))
    order = generator.permutation(len(lengths))
    steps = []
    for start in range(0, len(order), WINDOW * batch_size):
        window = sorted(order[start : start + WINDOW * batch_size].tolist(), key=lambda index: (lengths[index], index))
        grouped = [window[at : at + batch_size] for at in range(0, len(window), batch_size)]
        steps += [grouped[number] for number in generator.permutation(len(grouped))]
    return steps


def micro_batches(step: Sequence[int], micro_batch_size: int) -> list[list[int]]:
    """The micro-batches of a step. They do not depend on the number of ranks."""
    return [list(step[start : start + micro_batch_size]) for start in range(0, len(step), micro_batch_size)]


def share_out(micros: Sequence[list[int]], lengths: Sequence[int], ranks: int, count: int) -> list[list[list[int]]]:
    """Micro-batches for every rank, `count` each. A missing one is an empty list, which is run as a masked dummy.

    Ranks wait for each other in every micro-batch and at the end of the step.
    Therefore the micro-batches of one turn have similar numbers of tokens.
    In each turn the largest one is assigned to the rank with the fewest tokens so far.
    """

    def tokens(micro: list[int]) -> int:
        return sum(lengths[index] for index in micro)

    waiting = sorted(micros, key=lambda micro: (-tokens(micro), micro))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    had = [0] * ranks
    for turn in range(count):
        least_first = sorted(range(ranks), key=lambda rank: (had[rank], rank))
        for place, rank in enumerate(least_first):
            at = turn * ranks + place
            micro = list(waiting[at]) if at < len(waiting) else []
            shares[rank].append(micro)
            had[rank] += tokens(micro)
    return shares
