"""Block drafters: one pass of W slots drafts a whole stage; own states enter the next stage as context entries."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.attention import append
from dloop_train.drafters.base import Choose, DecoderLayer, Drafter, DrafterConfig, DrafterShape, LayerSizes, linear_flops
from dloop_train.drafters.layers import RMSNorm
from dloop_train.targets.head import TargetHead
from dloop_train.types import KV, Context, DraftStage, DraftState, TargetSpec

ALIGNMENTS = ("fill_in", "shifted")


@dataclass(frozen=True, kw_only=True)
class BlockShape(DrafterShape):
    """A block drafter's checkpoint."""

    width: int
    """W: slots of a pass, anchor included (the public block_size)."""
    alignment: str
    """fill_in: slot j predicts anchor + j, k = W - 1. shifted: slot j predicts anchor + j + 1, k = W."""
    mask_token_id: int
    num_anchors: int = 512
    """Kept for the layouts that write it."""


@dataclass(kw_only=True)
class BlockConfig(DrafterConfig):
    """Settings of block drafters."""

    width: int = 0
    """W: slots of a pass, anchor included. 0 takes the checkpoint's own, or 8 from scratch. Weights do not depend on it."""
    alignment: str = ""
    """fill_in or shifted. Required: nothing else tells them apart, and the wrong one only costs acceptance."""
    gamma: float = 4.0
    """Slot weights exp(-j / gamma)."""

    kind = "block"

    def __post_init__(self):
        super().__post_init__()
        check(self.alignment in ALIGNMENTS, f"drafter.alignment is required: one of {ALIGNMENTS}, got {self.alignment!r}")
        check(self.width == 0 or self.width >= 2, f"drafter.width must be at least 2, or 0 for the checkpoint's own, got {self.width}")
        check(self.gamma > 0, f"drafter.gamma must be positive, got {self.gamma}")

    def looped(self, shape: BlockShape) -> BlockShape:
        return replace(shape, state=self.state, slot=self.slot, width=self.width or shape.width)

    def as_exported(self, section: dict) -> "BlockConfig":
        trained = {name: section[name] for name in ("state", "slot") if section.get("trained_depth_exposure") and name in section}
        return replace(self, width=0, **trained)

    def shape(self, target: TargetSpec, taps: list[int]) -> BlockShape:
        head_norms = target.text_config["model_type"].startswith("qwen3")
        # The public block layouts are Qwen3's; a drafter from scratch follows them whatever its target is.
        return BlockShape(format=self.format, sizes=LayerSizes.of(target.text_config, head_norms=True if self.format else head_norms),
                          num_layers=self.layers, taps=tuple(taps), num_target_layers=target.num_layers, vocab_size=target.vocab_size,
                          target_hidden_size=target.hidden_size, width=self.width or 8, alignment=self.alignment,
                          mask_token_id=target.mask_token_id, state=self.state, slot=self.slot)


class BlockDrafter(Drafter):
    """The parallel backbone of DFlash: every layer attends to the fused target features and to the block's own slots."""

    shape: BlockShape

    def __init__(self, shape: BlockShape, head: TargetHead | None, gamma: float):
        super().__init__(shape, head)
        sizes = shape.sizes
        self.fc = nn.Linear(len(shape.taps) * shape.target_hidden_size, sizes.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers.extend(DecoderLayer(sizes, sizes.hidden_size) for _ in range(shape.num_layers))
        self.gamma = gamma
        fill_in = shape.alignment == "fill_in"
        self.k = shape.width - 1 if fill_in else shape.width
        self.predicts = slice(1, None) if fill_in else slice(0, None)
        self.own_slots = slice(1, None) if fill_in and shape.slot == "next" else slice(0, self.k)

    def slot_weights(self) -> Tensor:
        return torch.exp(-torch.arange(self.k) / self.gamma)

    def context_kv(self, context: Context) -> tuple[tuple[KV, ...], Tensor]:
        rows = self.hidden_norm(self.fc(context.features))  # once, the same for every layer
        positions = torch.arange(context.start, context.start + rows.shape[1], device=rows.device).expand(rows.shape[:2])
        return tuple(layer.self_attn.project(rows, positions) for layer in self.layers), rows

    def absorb(self, state: DraftState) -> DraftState:
        """Own states of the last stage become k context entries at its positions, projected by every layer (the paper's Eq. 3)."""
        if state.hidden is None:
            return state
        rows = state.hidden[:, :, self.own_slots]
        if self.shape.state == "context_norm":
            rows = self.hidden_norm(rows)
        elif self.shape.state == "post_norm":
            rows = self.norm(rows)
        positions = state.position[..., None] - self.k + torch.arange(self.k, device=rows.device)  # [B, N, k]
        entries = tuple(layer.self_attn.project(rows, positions) for layer in self.layers)
        return replace(state, own=append(state.own, entries, dim=2), hidden=None)

    def stage(self, state: DraftState, anchors: Tensor, choose: Choose | None = None) -> DraftStage:
        state = self.absorb(state)
        width = self.shape.width
        slots = torch.full((*anchors.shape, width), self.shape.mask_token_id, device=anchors.device)
        slots[..., 0] = anchors
        positions = state.position[..., None] + torch.arange(width, device=anchors.device)  # [B, N, W]
        rows = self.head.embed(slots).to(self.norm.weight.dtype)
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(rows)
            block = layer.self_attn.project(normed, positions)
            own = block if state.own is None else append((state.own[index],), (block,), dim=2)[0]
            rows = rows + layer.self_attn(normed, positions, state.context[index], own, state.origin)
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        return DraftStage(rows, self.predicts, replace(state, position=state.position + self.k, hidden=rows))

    def flops_per_stage(self) -> int:
        layers = sum(linear_flops(layer) for layer in self.layers)
        head = 2 * self.shape.vocab_size * self.shape.sizes.hidden_size
        return self.shape.width * layers + self.k * head + self.k * linear_flops(self.fc)
