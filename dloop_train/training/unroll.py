"""Unroll: the drafting loop under teacher forcing, which is what DeepSpeed wraps. The same begin and stage as decoding."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dloop_train.data.batches import TextBatch
from dloop_train.drafters.base import Choose, Drafter, select_branches
from dloop_train.training.anchors import Origins, gather_at, labels_of, supervised
from dloop_train.training.metrics import Sums, add_sums
from dloop_train.types import KV, Context, DraftStage, DraftState, Labels

TERMS = ("first", "last")


@dataclass(frozen=True)
class Terms:
    """Which stages carry loss, and how the terms are weighed: loss = sum of share x (sum / weight)."""

    depth_exposure: int
    stages: str = "first_last"

    def share(self, term: str) -> float:
        if self.depth_exposure == 0:
            return 1.0 if term == "first" else 0.0
        if self.stages == "all":  # the N later stages stand in one term
            return {"first": 1 / (self.depth_exposure + 1), "last": self.depth_exposure / (self.depth_exposure + 1)}[
                term
            ]
        return {
            "first": 0.5 if self.stages == "first_last" else 0.0,
            "last": 0.5 if self.stages == "first_last" else 1.0,
        }[term]

    def of_stage(self, stage: int) -> str | None:
        """The term that a stage's loss belongs to, or None where it carries none."""
        term = "first" if stage == 1 else "last"
        return term if self.share(term) > 0 else None

    def branches(self, stage: int, depth: Tensor) -> Tensor:
        """Branches supervised at a stage. [B, N] bool"""
        if stage == 1 or self.stages == "all":
            return depth >= stage
        return depth == stage  # intermediate stages lend hidden states alone


class UnrollResult(NamedTuple):
    """Sums of one micro-batch; the loss is already divided by the weights of the whole optimiser step.

    A tuple, because DeepSpeed looks for the loss in tuples, lists and dicts alone: what it does before a backward pass hangs on it.
    """

    loss: Tensor
    sums: Sums


def masked(labels: Labels, branches: Tensor) -> Labels:
    return replace(labels, mask=labels.mask * branches[..., None])


def detached(state: DraftState) -> DraftState:
    """The same state without its graph: no gradient reaches the stages before."""
    own = None if state.own is None else tuple(KV(kv.keys.detach(), kv.values.detach()) for kv in state.own)
    return replace(state, hidden=state.hidden.detach(), own=own)


class Unroll(nn.Module):
    """N + 1 stages on every rank in every step; branches whose depth is reached leave the computation.

    With `recompute`, of a stage only its own states and its output are kept for the backward pass.
    """

    def __init__(
        self,
        drafter: Drafter,
        terms: Terms,
        *,
        max_rows: int,
        detach: bool = False,
        compact: bool = True,
        recompute: bool = False,
    ):
        super().__init__()
        self.drafter, self.terms, self.detach, self.max_rows, self.compact, self.recompute = (
            drafter,
            terms,
            detach,
            max_rows,
            compact,
            recompute,
        )

    def weights(self, batch: TextBatch, origins: Origins) -> Tensor:
        """Label weights of each term in a micro-batch, known before the forward pass. [2] as TERMS"""
        slots = self.drafter.slot_weights().to(batch.tokens.device).double()
        totals = torch.zeros(len(TERMS), dtype=torch.float64, device=batch.tokens.device)
        for stage in range(1, self.terms.depth_exposure + 2):
            term = self.terms.of_stage(stage)
            if term is not None:
                mask = (
                    supervised(batch, origins.position, stage, self.drafter.k)
                    * self.terms.branches(stage, origins.depth)[..., None]
                )
                totals[TERMS.index(term)] += (mask.double() * slots).sum()
        return totals

    def stage(self, state: DraftState, anchors: Tensor, choose: Choose) -> DraftStage:
        if not (self.recompute and torch.is_grad_enabled()):
            return self.drafter.stage(state, anchors, choose)
        return checkpoint(
            self.drafter.stage, state, anchors, choose, use_reentrant=False, preserve_rng_state=False
        )  # nothing in it is random

    def forward(self, batch: TextBatch, origins: Origins, totals: Tensor, progress: float) -> UnrollResult:
        """`totals` [2] are the weights of the whole optimiser step, over micro-batches and ranks."""
        drafter, k = self.drafter, self.drafter.k
        tokens = torch.cat(
            [batch.tokens, batch.tokens[:, -1:]], dim=1
        )  # the row that pairs with the token after the text is never seen
        state = drafter.begin(Context(tokens, batch.features, first=batch.first), origins.position)
        loss, sums = 0.0, {}
        for number in range(1, self.terms.depth_exposure + 2):
            alive = origins.alive(number) if self.compact else origins.depth.shape[1]
            state = select_branches(state, alive)
            position, depth = origins.position[:, :alive], origins.depth[:, :alive]
            start = position + (number - 1) * k
            stage = self.stage(
                state,
                gather_at(batch.tokens, start),
                lambda step, _, start=start: gather_at(batch.tokens, start + step + 1),
            )
            state = stage.state
            if self.detach:
                state = detached(state)
            term = self.terms.of_stage(number)
            if term is None:
                loss = loss + stage.hidden.sum() * 0  # keep every parameter in the graph on every rank
                continue
            labels = masked(labels_of(batch, position, number, k), self.terms.branches(number, depth))
            part = drafter.loss(stage, gather_at(batch.tokens, start), labels, progress, max_rows=self.max_rows)
            loss = loss + self.terms.share(term) * part.sum / totals[TERMS.index(term)].clamp(min=1e-9).to(part.sum)
            measured = {"weighted_loss": (part.sum.detach().float(), part.weight.float()), **part.metrics}
            sums = add_sums(sums, {f"{name}_{term}": pair for name, pair in measured.items()})
            if number > 1:  # the last stage of some branches, told apart by how deep it is
                sums = add_sums(sums, {f"{name}_stage_{number}": pair for name, pair in part.metrics.items()})
        return UnrollResult(loss, sums)
