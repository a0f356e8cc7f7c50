"""Block drafters: one pass of W slots drafts a stage; own states are context rows of the next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

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
    """Shape of a block drafter's checkpoint."""

    width: int
    """W: slots of a pass, anchor included (the public block_size)."""
    alignment: str
    """fill_in: slot j predicts the token at anchor + j, k = W - 1. shifted: slot j predicts anchor + j + 1, k = W."""
    mask_token_id: int
    num_anchors: int = 512
    """Not used here; kept for layouts that store it."""
    num_draft_tokens: int | None = None
    """k, if a checkpoint drafts fewer tokens than its slots allow."""

    def __post_init__(self):
        super().__post_init__()
        check(
            self.k >= 1,
            f"block_size {self.width} with num_draft_tokens {self.num_draft_tokens} leaves a {self.alignment} drafter "
            "no token to draft",
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
    """W: slots of a pass, anchor included. 0 is the checkpoint's width, or 8 from scratch.

    The shapes of the weights do not depend on it.
    """
    alignment: str = ""
    """fill_in or shifted. Required, since nothing else tells them apart and the wrong one only lowers acceptance."""
    gamma: float = 4.0
    """Slot weights exp(-j / gamma)."""
    state: str = "context_norm"
    """Form of own states in later stages, computed from the final layer's output.

    context_norm: by the norm of the fused target features. post_norm: by the final norm. raw: unchanged.
    """
    slot: str = "own"
    """Fill-in blocks: which slots' states become own states at the k positions of a stage.

    own: slots 0 .. k - 1. next: slots 1 .. k.
    """
    backbone: str = ""
    """For init=scratch: a block drafter, named as in `init`, whose layers, fc and norms this one starts from."""

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
            f"drafter.backbone is for drafters from scratch, drafter.init says {self.init}; omit one of them",
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
        """Whether the public layout has Gemma 4's layers for a Gemma 4 target. All other drafters have Qwen3's."""
        return False

    def with_loop_settings(self, shape: BlockShape) -> BlockShape:
        return replace(shape, state=self.state, slot=self.slot, width=self.width or shape.width)

    def drafting(self, k: int) -> Self:
        return replace(self, width=k + (self.alignment == "fill_in"))

    def as_exported(self, section: dict) -> Self:
        # Without loop-aware training the export's form of own states was not trained, and these settings apply.
        trained = {
            name: section[name]
            for name in ("state", "slot")
            if section.get("trained_depth_exposure") and name in section
        }
        return replace(self, width=0, **trained)

    def shape(self, target: TargetSpec, taps: list[int]) -> BlockShape:
        return BlockShape(**self.shape_fields(target, taps))

    def shape_fields(self, target: TargetSpec, taps: list[int]) -> dict:
        """Fields of the shape that all block drafters from scratch share."""
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
    """Raise ValueError unless all layers are Qwen3's: only the speculators layout stores a draft vocabulary."""
    found = sorted({layer.architecture for layer in layers})
    check(
        found == ["qwen3"],
        "drafter.draft_vocab_size: the layout that can say a draft vocabulary holds qwen3 layers, "
        f"this drafter has {', '.join(found)}; leave it out",
    )


class BlockDrafter(Drafter):
    """The parallel backbone of DFlash.

    Every layer attends to the fused target features, to own states of earlier stages and to the block's slots.
    """

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
        rows = self.hidden_norm(self.fc(context.features))  # computed once, the same for all layers
        places = self.places_of(context)
        return tuple(layer.self_attn.project(rows, places) for layer in self.layers), rows

    def require_reducible(self) -> None:
        require_qwen3(self.shape.layers)

    def absorb(self, state: DraftState) -> DraftState:
        """Project own states of the last stage to keys and values of every layer (DLoop, Eq. 3).

        They become k context rows at the positions of that stage.
        """
        if state.hidden is None:
            return state
        rows = state.hidden[:, :, self.own_slots]
        if self.shape.state == "context_norm":
            rows = self.hidden_norm(rows)
        elif self.shape.state == "post_norm":
            rows = self.norm(rows)
        # [B, N, k]; state.position is already that of the next stage
        places = RotaryPositions(state.position[..., None] - self.k + torch.arange(self.k, device=rows.device))
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
        """Initialise a token head beside a backbone that is already trained. Called under no_grad; DFlash has none."""

    def initialise(self, target: Target) -> None:
        """hidden_norm starts as the first layer's input norm.

        fc starts as the identity on the deepest tap, if the hidden sizes match.
        """
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
