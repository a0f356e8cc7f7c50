"""Block drafters: one pass of W slots drafts a whole stage; own states enter the next stage as context entries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

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
from dloop_train.drafters.layers import DecoderLayer, RotaryPositions, norm_of
from dloop_train.drafters.sizes import LayerSizes, architecture_of, layers_for
from dloop_train.targets.head import TargetHead
from dloop_train.targets.target import Target
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
    num_draft_tokens: int | None = None
    """k where a checkpoint drafts fewer tokens than its slots allow."""

    def __post_init__(self):
        super().__post_init__()
        check(
            self.k >= 1,
            f"block_size {self.width} with num_draft_tokens {self.num_draft_tokens} leaves a {self.alignment} drafter no token to draft",
        )
        check(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is not in the vocabulary of {self.vocab_size}",
        )

    @property
    def k(self) -> int:
        most = self.width - 1 if self.alignment == "fill_in" else self.width
        return most if self.num_draft_tokens is None else min(self.num_draft_tokens, most)

    def expected_fields(self, target: TargetSpec, taps: Sequence[int]) -> dict:
        return super().expected_fields(target, taps) | {"mask_token_id": target.mask_token_id}


@dataclass(kw_only=True)
class BlockConfig(DrafterConfig):
    """Settings of block drafters."""

    width: int = 0
    """W: slots of a pass, anchor included. 0 takes the checkpoint's own, or 8 from scratch. Weights do not depend on it."""
    alignment: str = ""
    """fill_in or shifted. Required: nothing else tells them apart, and the wrong one only costs acceptance."""
    gamma: float = 4.0
    """Slot weights exp(-j / gamma)."""
    state: str = "context_norm"
    """Form of own states in later stages: context_norm | post_norm | raw (DESIGN: extra stage)."""
    slot: str = "own"
    """Fill-in blocks: which slots' states stand at the positions of a stage, own | next."""
    backbone: str = ""
    """With init scratch: a block drafter (as init names one) whose layers, fc and norms this one starts from."""

    kind = "block"
    needs = "drafter.alignment=<fill_in|shifted>"

    def __post_init__(self):
        super().__post_init__()
        check(
            self.state in ("context_norm", "post_norm", "raw"),
            f"drafter.state must be context_norm, post_norm or raw, got {self.state!r}",
        )
        check(self.slot in ("own", "next"), f"drafter.slot must be own or next, got {self.slot!r}")
        check(
            not self.backbone or self.init in ("", "scratch"),
            f"drafter.backbone is for drafters from scratch, drafter.init says {self.init}; leave one of them out",
        )
        check(
            self.alignment in ALIGNMENTS, f"drafter.alignment is required: one of {ALIGNMENTS}, got {self.alignment!r}"
        )
        check(
            self.width == 0 or self.width >= 2,
            f"drafter.width must be at least 2, or 0 for the checkpoint's own, got {self.width}",
        )
        check(self.gamma > 0, f"drafter.gamma must be positive, got {self.gamma}")

    @property
    def follows_target(self) -> bool:
        """Whether a drafter of a Gemma 4 target has Gemma 4's layers; the public layouts decide. All others have Qwen3's."""
        return False

    def with_loop_settings(self, shape: BlockShape) -> BlockShape:
        return replace(shape, state=self.state, slot=self.slot, width=self.width or shape.width)

    def drafting(self, k: int) -> "BlockConfig":
        return replace(self, width=k + (self.alignment == "fill_in"))

    def as_exported(self, section: dict) -> "BlockConfig":
        trained = {
            name: section[name]
            for name in ("state", "slot")
            if section.get("trained_depth_exposure") and name in section
        }
        return replace(self, width=0, **trained)

    def shape(self, target: TargetSpec, taps: list[int]) -> BlockShape:
        return BlockShape(**self.shape_fields(target, taps))

    def shape_fields(self, target: TargetSpec, taps: list[int]) -> dict:
        """What all block drafters from scratch have in common."""
        native = self.follows_target and architecture_of(target.text_config) == "gemma4"
        layers = layers_for(target.text_config, "gemma4" if native else "qwen3", self.layers)
        if self.draft_vocab_size:
            require_qwen3(layers)
        return dict(
            format=self.reduced_format if self.draft_vocab_size else self.format,
            draft_vocab_size=self.draft_vocab_size,
            layers=layers,
            taps=tuple(taps),
            num_target_layers=target.num_layers,
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            width=self.width or 8,
            alignment=self.alignment,
            mask_token_id=target.mask_token_id,
            state=self.state,
            slot=self.slot,
            head_scales=(target.embed_scale, target.softcap) if native else None,
        )


def require_qwen3(layers: Sequence[LayerSizes]) -> None:
    """The speculators layout, which alone can say a draft vocabulary, holds Qwen3's layers."""
    found = sorted({layer.architecture for layer in layers})
    check(
        found == ["qwen3"],
        f"drafter.draft_vocab_size: the layout that can say a draft vocabulary holds qwen3 layers, this drafter has {', '.join(found)}; leave it out",
    )


class BlockDrafter(Drafter):
    """The parallel backbone of DFlash: every layer attends to the fused target features and to the block's own slots."""

    shape: BlockShape

    def __init__(self, shape: BlockShape, head: TargetHead | None, gamma: float):
        super().__init__(shape, head)
        self.fc = nn.Linear(len(shape.taps) * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = norm_of(shape.layers[0], shape.hidden_size)
        self.layers.extend(DecoderLayer(sizes, shape.hidden_size) for sizes in shape.layers)
        self.gamma, self.k = gamma, shape.k
        fill_in = shape.alignment == "fill_in"
        self.predicts = slice(1, 1 + self.k) if fill_in else slice(0, self.k)
        self.own_slots = slice(1, 1 + self.k) if fill_in and shape.slot == "next" else slice(0, self.k)

    def slot_weights(self) -> Tensor:
        return torch.exp(-torch.arange(self.k) / self.gamma)

    def context_kv(self, context: Context) -> tuple[tuple[KV, ...], Tensor]:
        rows = self.hidden_norm(self.fc(context.features))  # once, the same for every layer
        places = self.places_of(context)
        return tuple(layer.self_attn.project(rows, places) for layer in self.layers), rows

    def require_reducible(self) -> None:
        require_qwen3(self.shape.layers)

    def absorb(self, state: DraftState) -> DraftState:
        """Own states of the last stage become k context entries at its positions, projected by every layer (the paper's Eq. 3)."""
        if state.hidden is None:
            return state
        rows = state.hidden[:, :, self.own_slots]
        if self.shape.state == "context_norm":
            rows = self.hidden_norm(rows)
        elif self.shape.state == "post_norm":
            rows = self.norm(rows)
        places = RotaryPositions(
            state.position[..., None] - self.k + torch.arange(self.k, device=rows.device)
        )  # [B, N, k]
        entries = tuple(layer.self_attn.project(rows, places) for layer in self.layers)
        return replace(state, own=append(state.own, entries, dim=2), hidden=None)

    def stage(self, state: DraftState, anchors: Tensor, choose: Choose | None = None) -> DraftStage:
        state = self.absorb(state)
        width = self.shape.width
        slots = torch.full((*anchors.shape, width), self.shape.mask_token_id, device=anchors.device)
        slots[..., 0] = anchors
        places = RotaryPositions(state.position[..., None] + torch.arange(width, device=anchors.device))  # [B, N, W]
        rows = self.embed(slots)
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(rows)
            block = layer.self_attn.project(normed, places)
            own = block if state.own is None else append((state.own[index],), (block,), dim=2)[0]
            rows = layer.finish(rows, layer.self_attn(normed, places, state.context[index], own, state.context_mask))
        return DraftStage(rows, self.predicts, replace(state, position=state.position + self.k, hidden=rows))

    def start_head(self) -> None:
        """Initialise what stands beside a backbone that has learnt already; called without gradients."""

    def initialise(self, target: Target) -> None:
        """The fused features start as the output of the deepest tap, behind the norm of the first copied layer."""
        width = self.shape.hidden_size
        self.hidden_norm.weight.copy_(self.layers[0].input_layernorm.weight)
        if self.shape.target_hidden_size == width:
            self.fc.weight.zero_()
            self.fc.weight[:, -width:] = torch.eye(width)

    def flops(self) -> Flops:
        keys = linear_work(
            *(part for layer in self.layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj))
        )
        return Flops(
            context=linear_work(self.fc, reaches_inputs=False) + keys,
            stage=self.shape.width * linear_work(self.layers),
            own=keys,
            queries=self.shape.width,
            passes=1,
            has_own=True,
            slots=Work(),
            row=frozen_work(self.shape.draft_vocab_size, self.shape.hidden_size),
            teacher=Work(),
        )
