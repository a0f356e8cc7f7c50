"""Chain drafters: each pass reads a token and a hidden state and drafts one token; k passes a stage."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dloop_train.config import check
from dloop_train.drafters.attention import append
from dloop_train.drafters.base import (
    Choose,
    Drafter,
    DrafterConfig,
    DrafterShape,
    Flops,
    Work,
    frozen_work,
    linear_work,
)
from dloop_train.drafters.layers import RotaryPositions
from dloop_train.drafters.losses import by_slot, hits, only, row_losses, stage_loss
from dloop_train.types import KV, Context, DraftStage, DraftState, Labels, StageLoss


@dataclass(frozen=True, kw_only=True)
class ChainShape(DrafterShape):
    """Shape of a chain drafter's checkpoint."""

    steps: int | None = None
    """Number of passes unrolled in its training, if config.json has it."""


@dataclass(kw_only=True)
class ChainConfig(DrafterConfig):
    """Settings of chain drafters."""

    tokens_per_stage: int = 7
    """k: passes between two decisions of the gate."""
    decay: float = 0.8
    """Token j of a stage has weight decay^j in the loss; j restarts at 0 in each stage."""

    kind = "chain"

    def __post_init__(self):
        super().__post_init__()
        check(self.tokens_per_stage >= 1, f"drafter.tokens_per_stage must be positive, got {self.tokens_per_stage}")
        check(0 < self.decay <= 1, f"drafter.decay must be in (0, 1], got {self.decay}")

    def drafting(self, k: int) -> Self:
        return replace(self, tokens_per_stage=k)

    def as_exported(self, section: dict) -> Self:
        return replace(self, tokens_per_stage=section.get("tokens_per_stage", self.tokens_per_stage))


class ChainDrafter(Drafter):
    """Drafts one token per pass from the last token and a hidden state: first the target's, then its own, fed back.

    The loss is soft cross-entropy with the target's distribution, with weight decay^j in pass j (EAGLE-3's objective).
    """

    shape: ChainShape

    def __init__(self, shape: ChainShape, head, *, k: int, decay: float):
        super().__init__(shape, head)
        self.k, self.decay = k, decay

    # What a family implements

    def project_features(self, features: Tensor) -> Tensor:
        """Feature rows to the hidden states that a first pass reads. [B, T, F] -> [B, T, D]"""
        raise NotImplementedError

    def advance(
        self, tokens: Tensor, fed: Tensor, step: int, state: DraftState, own: tuple[KV, ...] | None
    ) -> tuple[Tensor, tuple[KV, ...] | None]:
        """One pass that reads tokens [B, N] and fed-back states [B, N, D].

        Returns the final layer's output [B, N, D] and the own states, with those of this pass.
        """
        raise NotImplementedError

    def feedback(self, hidden: Tensor) -> Tensor:
        """A pass's output to the hidden state that the next pass reads. [B, N, D] -> [B, N, D]"""
        return hidden

    def head_logits(self, normed: Tensor) -> Tensor:
        """Normed hidden states to logits over the draft vocabulary. [..., D] -> [..., V]"""
        return self.draft_head.logits(normed)

    def head_weights(self) -> tuple[Tensor, ...]:
        """Parameters of the drafter's own lm_head; empty if it uses the target's."""
        return ()

    def compared_rows(self, teacher: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target's logits over the draft vocabulary, and the rows with a loss (None: all). [R, D] -> [R, V], [R]"""
        found = self.teacher_logits(teacher)
        return found.kept, found.taught

    # What all share

    def slot_weights(self) -> Tensor:
        return self.decay ** torch.arange(self.k)

    def open(self, kv: tuple[KV, ...], projected: Tensor, context: Context, origins: Tensor) -> DraftState:
        rows = (origins - 1 - context.start)[..., None].expand(-1, -1, projected.shape[-1])
        # hidden: the state of the last known position, before the origin. [B, N, 1, D]
        return replace(super().open(kv, projected, context, origins), hidden=projected.gather(1, rows)[:, :, None])

    def stage(self, state: DraftState, anchors: Tensor, choose: Choose | None = None) -> DraftStage:
        own, fed = state.own, state.hidden[:, :, -1]
        tokens, hidden_states, chosen = anchors, [], []
        for step in range(self.k):
            hidden, own = self.advance(tokens, fed, step, state, own)
            fed = self.feedback(hidden)
            hidden_states.append(hidden)
            tokens = choose(step, hidden)
            chosen.append(tokens)
        after = replace(state, own=own, position=state.position + self.k, hidden=fed[:, :, None])
        return DraftStage(torch.stack(hidden_states, dim=2), slice(None), after, tokens=torch.stack(chosen, dim=2))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head_logits(self.norm(hidden))

    def loss(self, stage: DraftStage, anchors: Tensor, labels: Labels, progress: float, *, max_rows: int) -> StageLoss:
        # The norm is trained, even if the head after it is frozen, so it is applied outside of row_loss:
        # stage_loss computes gradients of its rows and of head_weights only.
        return stage_loss(
            self.row_loss,
            self.norm(stage.hidden),
            labels,
            self.slot_weights(),
            max_rows=max_rows,
            head_weights=self.head_weights(),
        )

    def row_loss(
        self, normed: Tensor, tokens: Tensor, teacher: Tensor, weights: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.head_logits(normed)
        with torch.no_grad():
            target, taught = self.compared_rows(teacher.to(normed.dtype))
        losses, _ = row_losses(logits, tokens, target, soft=1.0)
        losses = only(losses, taught)
        return (weights * losses).sum(), by_slot(hits(logits, *self.drafted_ids(tokens)), slots, self.k, losses)

    def chain_flops(self, *, context: Work, one: Work, row: Work, has_own: bool) -> Flops:
        """FLOPs of a chain, of which one pass costs `one` and the logits of one slot cost `row`."""
        # The second term is the dot product of both distributions in the soft cross-entropy.
        compared = Work(2 * self.teacher_vocabulary * self.shape.target_hidden_size + 2 * self.shape.draft_vocab_size)
        return Flops(
            context=context,
            stage=self.k * one,
            own=Work(),
            queries=self.k,
            passes=self.k,
            has_own=has_own,
            slots=Work(),
            row=row,
            teacher=compared,
        )


class OwnKeysChain(ChainDrafter):
    """A chain of one layer with keys and values of its own (EAGLE-3, Qwen3.5's MTP).

    Row p pairs the state of position p with the token at p + 1 and predicts the token at p + 2.
    The first pass of a round is row origin - 1, which pairs the last known state with the anchor.
    This row belongs to the branch, so the branch's context is the rows strictly before it.
    """

    lag = 1

    def inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs of token and hidden state to the residual stream [..., D] and the input of attention."""
        raise NotImplementedError

    def context_kv(self, context: Context) -> tuple[tuple[KV, ...], Tensor]:
        projected = self.project_features(context.features)
        # With one layer, the keys of a context row depend on its inputs only, and no attention is computed for it.
        return (
            self.layers[0].self_attn.project(self.inputs(context.tokens[:, 1:], projected)[1], self.places_of(context)),
        ), projected

    def advance(
        self, tokens: Tensor, fed: Tensor, step: int, state: DraftState, own: tuple[KV, ...] | None
    ) -> tuple[Tensor, tuple[KV, ...] | None]:
        layer = self.layers[0]
        places = RotaryPositions((state.position - 1 + step)[..., None])  # [B, N, 1]
        residual, row = (part[:, :, None] for part in self.inputs(tokens, fed))
        own = append(own, (layer.self_attn.project(row, places),), dim=2)
        return layer.finish(residual, layer.self_attn(row, places, state.context[0], own[0], state.context_mask))[
            :, :, 0
        ], own

    def flops(self) -> Flops:
        layer, attention = self.layers[0], self.layers[0].self_attn
        keys = linear_work(attention.k_proj, attention.v_proj)
        return self.chain_flops(
            context=self.fuse_work() + keys,
            one=linear_work(layer) + self.pair_up_work(),
            row=self.head_work(),
            has_own=True,
        )

    def fuse_work(self) -> Work:
        """FLOPs of one context row, from the target's features to the input of the key projection."""
        return linear_work(self.fc, reaches_inputs=False)

    def pair_up_work(self) -> Work:
        """FLOPs of combining a token with a hidden state, in one pass."""
        return Work()

    def head_work(self) -> Work:
        """FLOPs of the logits of one slot."""
        return frozen_work(self.shape.draft_vocab_size, self.shape.hidden_size)
