"""EAGLE-3: a one-layer chain drafter, in SpecForge's layout or in DeepSpec's.

SpecForge's layout has a Llama layer. DeepSpec's has a Gemma 4 layer for Gemma 4 targets and a Qwen3 layer for others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.base import Work, linear_work
from dloop_train.drafters.chain import ChainConfig, ChainShape, OwnKeysChain
from dloop_train.drafters.layers import DecoderLayer, norm_of
from dloop_train.drafters.sizes import architecture_of, layers_for
from dloop_train.targets.head import TargetHead
from dloop_train.targets.target import Target
from dloop_train.types import TargetSpec

FORMATS = ("specforge_eagle3", "deepspec_eagle3")


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape(ChainShape):
    """Shape of an EAGLE-3 checkpoint."""

    own_lm_head: bool
    """Whether it has a trained lm_head over the draft vocabulary (SpecForge); else the target's is used, frozen."""
    fc_norm: bool = False
    """EAGLE-3.1: one norm per tap before fc."""
    num_taps: int = 3
    """Number of taps, for files that do not list them."""

    def on(self, target: TargetSpec, taps: Sequence[int]) -> "Eagle3Shape":
        """Official files list no taps. Three taps are the layers that the authors use, another number the caller's."""
        if self.taps:
            return self
        found = (1, target.num_layers // 2 - 1, target.num_layers - 4) if self.num_taps == 3 else tuple(taps)
        check(
            len(found) == self.num_taps,
            f"the drafter reads {self.num_taps} taps and names none; set drafter.taps=[...] to as many",
        )
        return replace(self, taps=found)


@dataclass(kw_only=True)
class Eagle3Config(ChainConfig):
    """Settings of EAGLE-3."""

    fc_norm: bool = False
    outside: str = "skip"
    """Rows whose most likely token of the target is outside a reduced draft vocabulary.

    skip: they have no loss (the released recipe). train: they have the loss of all other rows, with the target's
    distribution renormalised to the draft vocabulary.
    """

    family = "eagle3"
    reduced_format = "specforge_eagle3"
    unpaired = "EAGLE-3 weights fit one target each, and none are known for this one"

    def __post_init__(self):
        super().__post_init__()
        self.format = self.format or "specforge_eagle3"
        check(self.format in FORMATS, f"drafter.format of eagle3 must be one of {FORMATS}, got {self.format!r}")
        check(
            self.format == "specforge_eagle3" or not (self.draft_vocab_size or self.fc_norm),
            f"drafter.draft_vocab_size and drafter.fc_norm belong to specforge_eagle3; the layout {self.format} has "
            "neither, leave them out",
        )
        check(self.outside in ("skip", "train"), f"drafter.outside must be skip or train, got {self.outside!r}")
        check(self.layers == 1, f"eagle3 drafters have one layer, got drafter.layers={self.layers}")

    def shape(self, target: TargetSpec, taps: list[int]) -> Eagle3Shape:
        deepspec = self.format == "deepspec_eagle3"
        native = "gemma4" if architecture_of(target.text_config) == "gemma4" else "qwen3"
        return Eagle3Shape(
            format=self.format,
            layers=layers_for(target.text_config, native if deepspec else "llama", 1),
            taps=tuple(taps),
            num_target_layers=target.num_layers,
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=(0 if deepspec else self.draft_vocab_size) or target.vocab_size,
            own_lm_head=not deepspec,
            fc_norm=self.fc_norm,
            steps=self.tokens_per_stage if deepspec else None,
            state="raw",
            head_scales=(target.embed_scale, target.softcap) if deepspec and native == "gemma4" else None,
        )

    def build(self, shape: Eagle3Shape, head: TargetHead | None) -> "Eagle3":
        return Eagle3(shape, head, k=self.tokens_per_stage, decay=self.decay, skip_outside=self.outside == "skip")


class Eagle3(OwnKeysChain):
    """EAGLE-3. It feeds back its output before the final norm."""

    shape: Eagle3Shape
    vocabulary_rows = ("lm_head.weight",)

    def __init__(self, shape: Eagle3Shape, head: TargetHead | None, *, k: int, decay: float, skip_outside: bool = True):
        super().__init__(shape, head, k=k, decay=decay)
        self.skip_outside = skip_outside
        sizes, taps = shape.layers[0], len(shape.taps) or shape.num_taps
        self.fc = nn.Linear(taps * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.fc_norm = (
            nn.ModuleList(norm_of(sizes, shape.target_hidden_size) for _ in range(taps)) if shape.fc_norm else None
        )
        layer = DecoderLayer(sizes, 2 * shape.hidden_size)
        layer.hidden_norm = norm_of(sizes, shape.hidden_size)
        self.layers.append(layer)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False) if shape.own_lm_head else None

    def initialise(self, target: Target) -> None:
        """fc starts as the identity on the deepest tap, if the hidden sizes match."""
        width = self.shape.hidden_size
        if self.shape.target_hidden_size == width:
            self.fc.weight.zero_()
            self.fc.weight[:, -width:] = torch.eye(width)

    def start_vocabulary(self, counts: Counter[int], lm_head: Tensor, stop_ids: Sequence[int]) -> None:
        super().start_vocabulary(counts, lm_head, stop_ids)
        if self.lm_head is not None:
            kept = self.kept_ids()
            self.lm_head.weight.copy_(lm_head if kept is None else lm_head[kept])

    def project_features(self, features: Tensor) -> Tensor:
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The raw hidden state, and [embedding, hidden state], each after its own norm. -> [..., D] and [..., 2 D]"""
        layer = self.layers[0]
        return hidden, torch.cat([layer.input_layernorm(self.embed(tokens)), layer.hidden_norm(hidden)], dim=-1)

    def require_reducible(self) -> None:
        check(
            self.lm_head is not None,
            f"drafter.draft_vocab_size: the layout {self.shape.format} has no draft vocabulary; leave it out",
        )

    @property
    def teacher_vocabulary(self) -> int:
        return self.shape.vocab_size if self.skip_outside else self.shape.draft_vocab_size

    def compared_rows(self, teacher: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().compared_rows(teacher) if self.skip_outside else (self.draft_head.logits(teacher), None)

    def head_weights(self) -> tuple[Tensor, ...]:
        return () if self.lm_head is None else (self.lm_head.weight,)

    def head_logits(self, normed: Tensor) -> Tensor:
        return self.draft_head.logits(normed) if self.lm_head is None else self.lm_head(normed)

    def fuse_work(self) -> Work:
        return linear_work(self.fc, reaches_inputs=self.fc_norm is not None)

    def head_work(self) -> Work:
        return super().head_work() if self.lm_head is None else linear_work(self.lm_head)
