"""Unroll: several stages per origin under teacher forcing, with the same begin and stage as decoding."""

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
    """Which stages carry loss, and the share of each term in it.

    loss = sum over terms of share x (sum of weighted token losses / sum of weights).
    """

    depth_exposure: int
    stages: str = "first_last"

    def share(self, term: str) -> float:
        """Factor of a term in the loss."""
        if self.depth_exposure == 0:
            return 1.0 if term == "first" else 0.0
        if self.stages == "all":  # all N later stages are one term
            return {"first": 1 / (self.depth_exposure + 1), "last": self.depth_exposure / (self.depth_exposure + 1)}[
                term
            ]
        return {
            "first": 0.5 if self.stages == "first_last" else 0.0,
            "last": 0.5 if self.stages == "first_last" else 1.0,
        }[term]

    def of_stage(self, stage: int) -> str | None:
        """The term of a stage's loss, or None if the stage carries no loss."""
        term = "first" if stage == 1 else "last"
        return term if self.share(term) > 0 else None

    def branches(self, stage: int, depth: Tensor) -> Tensor:
        """Branches supervised at a stage. [B, N] bool"""
        if stage == 1 or self.stages == "all":
            return depth >= stage
        return depth == stage  # intermediate stages only pass on own states


class UnrollResult(NamedTuple):
    """Loss and sums of one micro-batch. The loss is already divided by the weights of the whole optimiser step.

    A tuple, because DeepSpeed prepares the backward pass only for losses in tuples, lists and dicts.
    """

    loss: Tensor
    sums: Sums


def masked(labels: Labels, branches: Tensor) -> Labels:
    return replace(labels, mask=labels.mask * branches[..., None])


def detached(state: DraftState) -> DraftState:
    """The state without its graph, so that no gradient flows into earlier stages."""
    own = None if state.own is None else tuple(KV(kv.keys.detach(), kv.values.detach()) for kv in state.own)
    return replace(state, hidden=state.hidden.detach(), own=own)


class Unroll(nn.Module):
    """The module that DeepSpeed wraps: N + 1 stages of a drafter, and their loss.

    Every rank runs all N + 1 stages in every step, so that collective operations match.
    Branches leave the computation when their depth is reached, if `compact`.
    `detach` stops gradients between stages.
    With `recompute` only own states and output of a stage are kept for the backward pass; its layers run again.
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
        # A stage is not random, so the state of the random generators need not be kept.
        return checkpoint(self.drafter.stage, state, anchors, choose, use_reentrant=False, preserve_rng_state=False)

    def forward(self, batch: TextBatch, origins: Origins, totals: Tensor, progress: float) -> UnrollResult:
        """Loss and metrics of one micro-batch.

        `totals` [2] are the sums of label weights, by term, over all micro-batches and ranks of the optimiser step.
        `progress` in [0, 1] is passed to the drafter's loss.
        """
        drafter, k = self.drafter, self.drafter.k
        # Context needs one token more. Any id will do, since the row that pairs with it is never attended to.
        tokens = torch.cat([batch.tokens, batch.tokens[:, -1:]], dim=1)
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
                loss = loss + stage.hidden.sum() * 0  # every parameter is in the graph on every rank
                continue
            labels = masked(labels_of(batch, position, number, k), self.terms.branches(number, depth))
            part = drafter.loss(stage, gather_at(batch.tokens, start), labels, progress, max_rows=self.max_rows)
            loss = loss + self.terms.share(term) * part.sum / totals[TERMS.index(term)].clamp(min=1e-9).to(part.sum)
            measured = {"weighted_loss": (part.sum.detach().float(), part.weight.float()), **part.metrics}
            sums = add_sums(sums, {f"{name}_{term}": pair for name, pair in measured.items()})
            if number > 1:  # metrics of the term "last" also by stage
                sums = add_sums(sums, {f"{name}_stage_{number}": pair for name, pair in part.metrics.items()})
        return UnrollResult(loss, sums)
