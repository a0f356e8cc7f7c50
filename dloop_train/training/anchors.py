"""Anchors: draws the origins of a batch and their numbers of stages, and computes the labels of a stage."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dloop_train.data.batches import TextBatch
from dloop_train.types import Labels


@dataclass(frozen=True)
class Origins:
    """Branches of a batch, sorted by depth (deepest first), then by position.

    Finished branches are therefore at the end of the axis and can be cut off.
    """

    position: Tensor  # [B, N] origins, padded with depth 0 in sequences that have fewer
    depth: Tensor  # [B, N] S, the number of stages to run; 0 for padding

    def alive(self, stage: int) -> int:
        """Branches that reach this stage (from 1) in the sequence with the most.

        At least 1, so that every rank runs every stage.
        """
        return max(1, int((self.depth >= stage).sum(1).max()))


def generator_of(seed: int, epoch: int, sample: str) -> np.random.Generator:
    key = hashlib.sha256(f"{seed}/{epoch}/{sample}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(key[:16], "little")))


def run_lengths(loss_mask: np.ndarray) -> np.ndarray:
    """Number of supervised tokens that follow each position without a gap. [T] -> [T]"""
    runs = np.zeros(len(loss_mask) + 1, dtype=np.int64)
    for position in range(len(loss_mask) - 1, -1, -1):
        runs[position] = runs[position + 1] + 1 if loss_mask[position] else 0
    return runs[1:]


def draw_depths(runs: np.ndarray, k: int, depth_exposure: int, first: np.ndarray, again: np.ndarray) -> np.ndarray:
    """S for each origin: S - 1 ~ U{1..N}, or 1 if stage 2 has no supervised label.

    If stage S has no supervised label, S is drawn again, from 2 to the last stage that has one.
    `first` and `again` are uniform random numbers in [0, 1), one per origin, for the two draws.
    """
    deepest = np.minimum((runs - 1) // k + 1, depth_exposure + 1)  # the last stage that has a supervised label
    if depth_exposure == 0:
        return np.ones_like(runs)
    drawn = 2 + np.floor(first * depth_exposure).astype(np.int64)
    redrawn = 2 + np.floor(again * np.maximum(deepest - 1, 1)).astype(np.int64)
    return np.where(deepest < 2, 1, np.where(drawn <= deepest, drawn, redrawn))


def draw_origins(batch: TextBatch, k: int, *, count: int, depth_exposure: int, seed: int, epoch: int) -> Origins:
    """Up to `count` origins per sample: response tokens whose next token is supervised.

    Draws depend on the seed, the epoch, the sample and the position, not on the batch.
    """
    masks, drawn = batch.loss_mask.cpu().numpy(), [[] for _ in batch.tokens]
    for sample, (row, tokens) in zip(batch.ids, batch.places(), strict=True):
        loss_mask = masks[row, tokens]
        runs = run_lengths(loss_mask)
        candidates = np.flatnonzero(loss_mask & (runs > 0))
        candidates = candidates[candidates > 0]  # position 0 has no feature before it
        noise = generator_of(seed, epoch, sample).random((len(loss_mask), 3))
        chosen = np.sort(candidates[np.argsort(noise[candidates, 0], kind="stable")[:count]])
        depths = draw_depths(runs[chosen], k, depth_exposure, noise[chosen, 1], noise[chosen, 2])
        drawn[row].append(np.stack([chosen + tokens.start, depths]))
    rows = [each[:, np.lexsort((each[0], -each[1]))] for each in (np.concatenate(samples, axis=1) for samples in drawn)]
    widest = max(1, max(len(chosen) for chosen, _ in rows))
    position = torch.ones(len(rows), widest, dtype=torch.long)
    depth = torch.zeros(len(rows), widest, dtype=torch.long)
    for number, (chosen, depths) in enumerate(rows):
        position[number, : len(chosen)] = torch.from_numpy(chosen)
        depth[number, : len(depths)] = torch.from_numpy(depths)
    device = batch.tokens.device
    return Origins(position.to(device), depth.to(device))


def gather_at(values: Tensor, positions: Tensor) -> Tensor:
    """Rows of values [B, T, ...] at positions [B, ...], which are clamped to 0 .. T - 1."""
    positions = positions.clamp(0, values.shape[1] - 1)
    flat = positions.flatten(1)
    index = flat if values.dim() == 2 else flat[..., None].expand(-1, -1, values.shape[-1])
    return values.gather(1, index).unflatten(1, positions.shape[1:])


def supervised(batch: TextBatch, origins: Tensor, stage: int, k: int) -> Tensor:
    """1 for slots of a stage if all tokens from origin + 1 to their label are in the response, else 0. [B, N, k]"""
    reach = torch.arange(1, stage * k + 1, device=origins.device)
    positions = origins[..., None] + reach  # [B, N, s k]
    inside = (positions < batch.tokens.shape[1]) & gather_at(batch.loss_mask, positions)
    if batch.first is not None:  # in a packed row, tokens of the next sample are no labels
        inside = inside & (gather_at(batch.first, positions) == gather_at(batch.first, origins)[..., None])
    return inside.long().cumprod(-1)[..., (stage - 1) * k :].float()


def labels_of(batch: TextBatch, origins: Tensor, stage: int, k: int) -> Labels:
    """Labels of stage `stage` (from 1) of each branch [B, N]."""
    positions = origins[..., None] + (stage - 1) * k + torch.arange(1, k + 1, device=origins.device)  # [B, N, k]
    return Labels(
        gather_at(batch.tokens, positions),
        gather_at(batch.last_hidden, positions - 1),
        supervised(batch, origins, stage, k),
    )
