"""A plain reference of the loop-aware loss: all branches in every stage, all logits, one dense mask."""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dloop_train.data.batches import TextBatch
from dloop_train.drafters import layers
from dloop_train.drafters.attention import ContextMask
from dloop_train.drafters.base import Drafter
from dloop_train.drafters.chain import ChainDrafter
from dloop_train.drafters.dspark import DSpark
from dloop_train.training.accounting import draft_vocabulary, own_pairs
from dloop_train.training.anchors import Origins, gather_at, labels_of
from dloop_train.training.unroll import Terms, UnrollResult, masked
from dloop_train.types import KV, Context, Labels


class PlainUnroll(nn.Module):
    """Unroll without dropping finished branches, without chunks, and with the target's logits at every position."""

    def __init__(self, drafter: Drafter, terms: Terms):
        super().__init__()
        self.drafter, self.terms = drafter, terms

    def forward(self, batch: TextBatch, origins: Origins, totals: Tensor, progress: float) -> UnrollResult:
        drafter, k = self.drafter, self.drafter.k
        tokens = torch.cat([batch.tokens, batch.tokens[:, -1:]], dim=1)
        stages = []
        with dense_attention():
            state = drafter.begin(Context(tokens, batch.features), origins.position)
            for number in range(1, self.terms.depth_exposure + 2):
                start = origins.position + (number - 1) * k
                stage = drafter.stage(
                    state,
                    gather_at(batch.tokens, start),
                    lambda step, _, start=start: gather_at(batch.tokens, start + step + 1),
                )
                state = stage.state
                stages.append((stage, gather_at(batch.tokens, start)))
        every = [
            masked(labels_of(batch, origins.position, number, k), self.terms.branches(number, origins.depth))
            for number in range(1, len(stages) + 1)
        ]
        logits = [
            drafter.rescore(stage, anchors, labels.tokens)
            for (stage, anchors), labels in zip(stages, every, strict=True)
        ]
        with torch.no_grad():
            target = drafter.head.logits(batch.last_hidden) if compares(drafter) else None
            taught = None if target is None or not drafter.shape.reduced else drafter.t2d[target.argmax(-1)]
            target = target if taught is None else target[..., drafter.kept_ids()]
        loss, slots = 0.0, drafter.slot_weights().to(batch.tokens.device)
        for number, ((stage, anchors), said, labels) in enumerate(zip(stages, logits, every, strict=True), 1):
            term = self.terms.of_stage(number)
            positions = origins.position[..., None] + (number - 1) * k + torch.arange(k, device=batch.tokens.device)
            meant = None if target is None else gather_at(target, positions)
            losses = slot_losses(drafter, said, meant, labels, drafter.confidence(stage, anchors, labels.tokens))
            if taught is not None:
                losses = losses * gather_at(taught, positions)
            share = self.terms.share(term) / totals[("first", "last").index(term)].clamp(min=1e-9)
            loss = loss + (share * (losses * labels.mask * slots).sum()).to(losses.dtype)
        return UnrollResult(loss, {})


def compares(drafter: Drafter) -> bool:
    """Whether the loss uses the target's distribution."""
    return isinstance(drafter, (ChainDrafter, DSpark))


def slot_losses(
    drafter: Drafter, said: Tensor, meant: Tensor | None, labels: Labels, confidence: Tensor | None
) -> Tensor:
    """Loss of every slot, by family. [B, N, k, V] -> [B, N, k]"""
    said = said.float()
    if isinstance(drafter, ChainDrafter):
        return -(torch.softmax(meant.float(), -1) * torch.log_softmax(said, -1)).sum(-1)
    hard = F.cross_entropy(said.flatten(0, 2), labels.tokens.flatten(), reduction="none").view(labels.tokens.shape)
    if not isinstance(drafter, DSpark):
        return hard
    apart = (torch.softmax(said, -1) - torch.softmax(meant.float(), -1)).abs().sum(-1)
    losses = drafter.settings.ce_weight * hard + drafter.settings.l1_weight * apart
    if confidence is None:
        return losses
    accepted = (1 - apart.detach() / 2).clamp(0, 1)
    return losses + drafter.settings.confidence_weight * F.binary_cross_entropy_with_logits(
        confidence.float(), accepted, reduction="none"
    )


@contextmanager
def dense_attention():
    """Replace loop_attention by `dense`: one attention over all branches of a sequence.

    Queries of all branches are one row, context and own states of all branches one row of keys, with one dense mask.
    """
    with mock.patch.object(layers, "loop_attention", dense):
        yield


def dense(
    queries: Tensor,
    context: KV,
    own: KV | None,
    context_mask: ContextMask,
    scale: float,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    origin = context_mask.origin
    batch, branches, slots = queries.shape[:3]
    length, drafted = context.keys.shape[1], 0 if own is None else own.keys.shape[2]
    device = queries.device
    branch = torch.arange(branches, device=device)
    offset = (
        torch.arange(drafted - slots, drafted, device=device) if drafted else torch.full((slots,), -1, device=device)
    )
    at_query = (origin[..., None] + offset).flatten(1)  # [B, N Q]
    at_key = torch.cat(
        [
            torch.arange(length, device=device).expand(batch, -1),
            (origin[..., None] + torch.arange(drafted, device=device)).flatten(1),
        ],
        dim=1,
    )
    of_query, of_key = (
        branch.repeat_interleave(slots),
        torch.cat([torch.full((length,), -1, device=device), branch.repeat_interleave(drafted)]),
    )
    behind = at_query[:, :, None] - at_key[:, None]  # [B, N Q, T + N P]
    before = at_key[:, None, :] < origin.repeat_interleave(slots, dim=1)[:, :, None]
    mine = (of_query[:, None] == of_key) & ((behind >= 0) | (not causal))
    seen = torch.where(of_key < 0, before, mine)
    if window is not None:
        seen = seen & (behind.abs() < window)
    keys, values = (
        rows if own is None else torch.cat([rows, more.flatten(1, 2)], dim=1)
        for rows, more in ((context.keys, own and own.keys), (context.values, own and own.values))
    )
    mixed = F.scaled_dot_product_attention(
        queries.flatten(1, 2).transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2).unflatten(1, (branches, slots))


def plain_bytes(drafter: Drafter, batch: TextBatch, origins: Origins, terms: Terms) -> float:
    """Bytes of logits and masks that the reference holds; the rest of the graph is not counted.

    Logits include their softmax in fp32 and, if the loss uses them, the target's logits.
    """
    branches, stages, flops = origins.depth.numel(), terms.depth_exposure + 1, drafter.flops()
    rows = branches * drafter.k * stages
    logits = rows * draft_vocabulary(drafter) * (16 if compares(drafter) else 8)
    teacher = (
        batch.tokens.numel() * draft_vocabulary(drafter) * batch.features.element_size() if compares(drafter) else 0
    )
    last = (
        branches
        * flops.queries
        / flops.passes
        * (batch.tokens.shape[1] + origins.depth.shape[1] * own_pairs(flops, drafter.k, stages) / flops.queries)
    )
    return logits + teacher + last * len(drafter.layers)
