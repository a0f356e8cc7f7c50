"""Chain drafters: one token a pass, fed with the last token and the drafter's own hidden state; a stage is k passes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dloop_train.config import check
from dloop_train.drafters.attention import append
from dloop_train.drafters.base import Choose, Drafter, DrafterConfig, DrafterShape, linear_flops
from dloop_train.types import KV, Context, DraftStage, DraftState


@dataclass(frozen=True, kw_only=True)
class ChainShape(DrafterShape):
    """A chain drafter's checkpoint."""

    draft_vocab_size: int
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

    def as_exported(self, section: dict) -> "ChainConfig":
        return replace(self, tokens_per_stage=section.get("tokens_per_stage", self.tokens_per_stage))


class ChainDrafter(Drafter):
    """Row p of a chain pairs the feature of position p with the token at p + 1 and predicts the token at p + 2.

    The first pass of a round is row origin - 1: the last known feature with the anchor. It belongs to the branch, so the
    context it sees is what lies strictly before that row.
    """

    shape: ChainShape

    def __init__(self, shape: ChainShape, head, *, k: int, decay: float):
        super().__init__(shape, head)
        self.k, self.decay = k, decay

    def project_features(self, features: Tensor) -> Tensor:
        """Target features to the drafter's width. [B, T, L*D] -> [B, T, D]"""
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        return self.head.embed(tokens).to(self.norm.weight.dtype)

    def paired(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Embedding first, hidden state second, each behind its own norm. -> [..., 2 D]"""
        layer = self.layers[0]
        return torch.cat([layer.input_layernorm(self.embed(tokens)), layer.hidden_norm(hidden)], dim=-1)

    def slot_weights(self) -> Tensor:
        return self.decay ** torch.arange(self.k)

    def context_kv(self, context: Context) -> tuple[tuple[KV, ...], Tensor]:
        projected = self.project_features(context.features)
        positions = torch.arange(context.start, context.start + projected.shape[1], device=projected.device).expand(projected.shape[:2])
        # One layer: the keys of a row need its inputs alone, no attention.
        return (self.layers[0].self_attn.project(self.paired(context.tokens[:, 1:], projected), positions),), projected

    def open(self, kv: tuple[KV, ...], projected: Tensor, start: int, origins: Tensor) -> DraftState:
        rows = (origins - 1 - start)[..., None].expand(-1, -1, projected.shape[-1])
        hidden = projected.gather(1, rows)[:, :, None]  # [B, N, 1, D]
        return DraftState(context=kv, own=None, origin=origins, position=origins, hidden=hidden)

    def stage(self, state: DraftState, anchors: Tensor, choose: Choose | None = None) -> DraftStage:
        layer, own = self.layers[0], state.own
        hidden, tokens, said, chosen = state.hidden[:, :, -1], anchors, [], []
        for step in range(self.k):
            positions = (state.position - 1 + step)[..., None]  # [B, N, 1]
            row = self.paired(tokens, hidden)[:, :, None]
            own = append(own, (layer.self_attn.project(row, positions),), dim=2)
            mixed = hidden + layer.self_attn(row, positions, state.context[0], own[0], state.origin - 1)[:, :, 0]
            hidden = mixed + layer.mlp(layer.post_attention_layernorm(mixed))
            said.append(hidden)
            tokens = choose(step, hidden)
            chosen.append(tokens)
        stacked = torch.stack(said, dim=2)  # [B, N, k, D]
        after = replace(state, own=own, position=state.position + self.k, hidden=stacked)
        return DraftStage(stacked, slice(None), after, tokens=torch.stack(chosen, dim=2))

    def flops_per_stage(self) -> int:
        head = 2 * self.shape.draft_vocab_size * self.shape.sizes.hidden_size
        return self.k * (linear_flops(self.layers[0]) + head + linear_flops(self.fc))
