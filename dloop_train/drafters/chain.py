"""Chain drafters: one token a pass, fed with the last token and the drafter's own hidden state; a stage is k passes."""

from dataclasses import dataclass, replace

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
    """A chain drafter's checkpoint."""

    steps: int | None = None
    """Passes it was trained to unroll, where the config says so."""


@dataclass(kw_only=True)
class ChainConfig(DrafterConfig):
    """Settings of chain drafters."""

    tokens_per_stage: int = 7
    """k: passes between two questions to the gate."""
    decay: float = 0.8
    """Step weights decay^j, restarted in each stage."""

    kind = "chain"

    def __post_init__(self):
        super().__post_init__()
        check(self.tokens_per_stage >= 1, f"drafter.tokens_per_stage must be positive, got {self.tokens_per_stage}")
        check(0 < self.decay <= 1, f"drafter.decay must be in (0, 1], got {self.decay}")

    def drafting(self, k: int) -> "ChainConfig":
        return replace(self, tokens_per_stage=k)

    def as_exported(self, section: dict) -> "ChainConfig":
        return replace(self, tokens_per_stage=section.get("tokens_per_stage", self.tokens_per_stage))


class ChainDrafter(Drafter):
    """Drafts one token a pass from (last token, hidden state): the target's at first, then what it feeds back itself.

    The loss is soft cross-entropy against the target's distribution, decay^j a step (EAGLE-3's objective).
    """

    shape: ChainShape

    def __init__(self, shape: ChainShape, head, *, k: int, decay: float):
        super().__init__(shape, head)
        self.k, self.decay = k, decay

    # What a family implements

    def project_features(self, features: Tensor) -> Tensor:
        """Feature rows to what the first pass is fed as a hidden state. [B, T, F] -> [B, T, D]"""
        raise NotImplementedError

    def advance(
        self, tokens: Tensor, fed: Tensor, step: int, state: DraftState, own: tuple[KV, ...] | None
    ) -> tuple[Tensor, tuple[KV, ...] | None]:
        """One pass after tokens [B, N] and fed states [B, N, D]: the final layer's output [B, N, D] and the own states behind it."""
        raise NotImplementedError

    def feedback(self, hidden: Tensor) -> Tensor:
        """What of a pass's output the next pass is fed. [B, N, D] -> [B, N, D]"""
        return hidden

    def head_logits(self, normed: Tensor) -> Tensor:
        """Normed hidden states to logits over the draft vocabulary."""
        return self.draft_head.logits(normed)

    def head_weights(self) -> tuple[Tensor, ...]:
        """Parameters of the drafter's own lm_head; none where it reads the target's."""
        return ()

    def compared_rows(self, teacher: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target's logits over the draft vocabulary, and which rows carry loss (None: all). [R, D] -> [R, V], [R]"""
        found = self.teacher_logits(teacher)
        return found.kept, found.taught

    # What all share

    def slot_weights(self) -> Tensor:
        return self.decay ** torch.arange(self.k)

    def open(self, kv: tuple[KV, ...], projected: Tensor, context: Context, origins: Tensor) -> DraftState:
        rows = (origins - 1 - context.start)[..., None].expand(-1, -1, projected.shape[-1])
        return replace(
            super().open(kv, projected, context, origins), hidden=projected.gather(1, rows)[:, :, None]
        )  # [B, N, 1, D]

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
        # The norm stays outside: it is trained, also where the head below it is frozen.
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
        """The products of a chain with so much work in one of its passes."""
        compared = Work(
            2 * self.teacher_vocabulary * self.shape.target_hidden_size + 2 * self.shape.draft_vocab_size
        )  # both distributions meet in one more product
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

    Row p pairs the state of position p with the token at p + 1 and predicts the token at p + 2. The first pass of a round is
    row origin - 1: the last known state with the anchor. It belongs to the branch, so the context it sees is what lies
    strictly before that row.
    """

    lag = 1

    def inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream [..., D] and what enters the attention's projections, of (token, hidden state) pairs."""
        raise NotImplementedError

    def context_kv(self, context: Context) -> tuple[tuple[KV, ...], Tensor]:
        projected = self.project_features(context.features)
        # One layer: the keys of a row need its inputs alone, no attention.
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
        """A context row from the target's features to what the keys' projection reads."""
        return linear_work(self.fc, reaches_inputs=False)

    def pair_up_work(self) -> Work:
        """Pairing a token with a hidden state that the drafter fed back."""
        return Work()

    def head_work(self) -> Work:
        return frozen_work(self.shape.draft_vocab_size, self.shape.hidden_size)
