"""Domino: DFlash's backbone plus a GRU over the drafted tokens that corrects each slot's logits."""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.base import Flops, Work, linear_work
from dloop_train.drafters.block import BlockConfig, BlockShape
from dloop_train.drafters.losses import by_slot, hits, row_losses, stage_loss
from dloop_train.drafters.token_head import TokenHeadDrafter, before
from dloop_train.targets.head import TargetHead
from dloop_train.types import DraftStage, Labels, StageLoss, TargetSpec


@dataclass(frozen=True, kw_only=True)
class DominoShape(BlockShape):
    """Shape of a Domino checkpoint."""

    emb_dim: int
    """Width of the correction's bottleneck."""
    gru_hidden_dim: int
    pure_draft_prefix_len: int = 1
    """Number of drafted tokens, from the first on, whose logits are not corrected."""


@dataclass(kw_only=True)
class DominoConfig(BlockConfig):
    """Settings of Domino."""

    gamma: float = 7.0
    emb_dim: int = 256
    """Width of the correction's bottleneck, for a drafter from scratch."""
    gru_hidden_dim: int = 1024
    """Hidden size of the GRU, for a drafter from scratch."""
    num_draft_tokens: int = 0
    """Tokens drafted per stage. 0 is the checkpoint's number, or as many as the slots allow.

    SpecForge and SGLang leave the last slot unused.
    """
    base_share: float = 0.0
    """Weight of the loss of the uncorrected logits at the start of training; it falls linearly.

    0 suits released weights, whose training is past that phase.
    """
    base_until: float = 1.0
    """Share of the training, in (0, 1], after which that weight is zero."""

    family = "domino"
    unpaired = "Domino weights are released for Qwen3-4B and Qwen3-8B"

    def __post_init__(self):
        super().__post_init__()
        self.format = self.format or "specforge_domino"
        check(0 <= self.base_share <= 1, f"drafter.base_share must be in [0, 1], got {self.base_share}")
        check(0 < self.base_until <= 1, f"drafter.base_until must be in (0, 1], got {self.base_until}")
        check(self.num_draft_tokens >= 0, f"drafter.num_draft_tokens must not be negative, got {self.num_draft_tokens}")

    def with_loop_settings(self, shape: DominoShape) -> DominoShape:
        looped = super().with_loop_settings(shape)
        most = replace(looped, num_draft_tokens=None).k
        check(
            self.num_draft_tokens <= most,
            f"drafter.num_draft_tokens is {self.num_draft_tokens}, "
            f"a block of {looped.width} slots drafts at most {most}",
        )
        return replace(looped, num_draft_tokens=self.num_draft_tokens or shape.num_draft_tokens)

    def as_exported(self, section: dict) -> Self:
        return replace(super().as_exported(section), num_draft_tokens=0)

    def shape(self, target: TargetSpec, taps: list[int]) -> DominoShape:
        return DominoShape(
            **self.shape_fields(target, taps),
            emb_dim=self.emb_dim,
            gru_hidden_dim=self.gru_hidden_dim,
            num_draft_tokens=self.num_draft_tokens or None,
        )

    def build(self, shape: DominoShape, head: TargetHead | None) -> "Domino":
        return Domino(shape, head, self.gamma, base_share=self.base_share, base_until=self.base_until)


class Domino(TokenHeadDrafter):
    """Domino. The loss is cross-entropy of the corrected logits, at first mixed with that of the backbone's logits."""

    shape: DominoShape

    def __init__(
        self, shape: DominoShape, head: TargetHead | None, gamma: float, *, base_share: float, base_until: float
    ):
        super().__init__(shape, head, gamma)
        self.base_share, self.base_until = base_share, base_until
        width, memory = shape.hidden_size, shape.gru_hidden_dim
        self.prefix_gru = nn.GRU(shape.target_hidden_size, memory, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + memory, shape.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(shape.emb_dim, shape.draft_vocab_size, bias=False),
        )
        # The first drafted tokens are uncorrected: `corrected` sets their codes to zero, and `expand` has no bias.
        self.uncorrected = shape.pure_draft_prefix_len
        self.register_buffer(
            "corrected", (torch.arange(shape.k) >= shape.pure_draft_prefix_len).float()[:, None], persistent=False
        )

    def codes(self, normed: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.embed(before(anchors, tokens)).flatten(0, 1)  # [B N, k, D]
        memories = self.prefix_gru(embedded)[0].unflatten(0, anchors.shape)  # [B, N, k, M]
        return F.silu(self.embed_proj[0](torch.cat([normed, memories], dim=-1))) * self.corrected.to(normed.dtype)

    def prepare(self, normed: Tensor) -> Tensor:
        """The backbone's part of the input to the bottleneck's activation. [B, N, k, D] -> [B, N, k, emb_dim]"""
        return F.linear(normed, self.embed_proj[0].weight[:, : self.shape.hidden_size])

    def start(self, anchors: Tensor) -> Tensor:
        nothing = self.norm.weight.new_zeros(*anchors.shape, self.shape.gru_hidden_dim)
        return self.update_memory(nothing, anchors)

    def update_memory(self, memory: Tensor, tokens: Tensor) -> Tensor:
        _, after = self.prefix_gru(self.embed(tokens).flatten(0, 1)[:, None], memory.flatten(0, 1)[None].contiguous())
        return after[0].unflatten(0, tokens.shape)

    def code(self, prepared: Tensor, slot: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        inner = prepared[:, :, slot] + F.linear(memory, self.embed_proj[0].weight[:, self.shape.hidden_size :])
        return F.silu(inner) * self.corrected[slot].to(inner.dtype), memory

    def expand(self, codes: Tensor) -> Tensor:
        return self.embed_proj[2](codes)

    def start_head(self) -> None:
        """Corrections start at zero."""
        self.embed_proj[2].weight.zero_()

    def loss(self, stage: DraftStage, anchors: Tensor, labels: Labels, progress: float, *, max_rows: int) -> StageLoss:
        normed = self.normed(stage)
        share = self.base_share * (1 - min(progress / self.base_until, 1.0))

        def row_loss(
            normed: Tensor, tokens: Tensor, teacher: Tensor, weights: Tensor, slots: Tensor, codes: Tensor
        ) -> tuple[Tensor, Tensor]:
            base = self.draft_head.logits(normed)
            final = base + self.expand(codes)
            losses, _ = row_losses(final, tokens, hard=1 - share)
            if share:
                losses = losses + row_losses(base, tokens, hard=share)[0]
            return (weights * losses).sum(), by_slot(hits(final, tokens), slots, self.k, losses)

        return stage_loss(
            row_loss,
            normed,
            labels,
            self.slot_weights(),
            max_rows=max_rows,
            head_weights=(self.embed_proj[2].weight,),
            extra=(self.codes(normed, anchors, labels.tokens),),
        )

    def flops(self) -> Flops:
        plain, embedded, remembered = (
            super().flops(),
            2 * self.prefix_gru.weight_ih_l0.numel(),
            2 * self.prefix_gru.weight_hh_l0.numel(),
        )
        # Backward has the weights' gradients in all slots, and a memory's gradient in all but the first:
        # embeddings are frozen, and the first slot starts from zeros.
        gru = self.k * Work(embedded + remembered, embedded + remembered) + (self.k - 1) * Work(0, remembered)
        return replace(
            plain, slots=gru + self.k * linear_work(self.embed_proj[0]), row=plain.row + linear_work(self.embed_proj[2])
        )
