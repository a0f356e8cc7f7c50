"""EAGLE-3: a one-layer chain drafter, with a Llama layer (SpecForge's layout) or a Qwen3 layer (DeepSpec's)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.base import DecoderLayer, LayerSizes
from dloop_train.drafters.chain import ChainConfig, ChainDrafter, ChainShape
from dloop_train.drafters.layers import RMSNorm
from dloop_train.drafters.losses import by_slot, soft_cross_entropy, stage_loss
from dloop_train.targets.head import TargetHead
from dloop_train.types import DraftStage, Labels, StageLoss, TargetSpec

FORMATS = ("specforge_eagle3", "deepspec_eagle3")


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape(ChainShape):
    """An EAGLE-3 checkpoint."""

    own_lm_head: bool
    """A trained lm_head over the draft vocabulary (SpecForge); otherwise a frozen copy of the target's."""
    fc_norm: bool = False
    """EAGLE-3.1: one norm a tap before fc."""
    num_taps: int = 3
    """How many taps a file reads that names none."""


@dataclass(kw_only=True)
class Eagle3Config(ChainConfig):
    """EAGLE-3."""

    draft_vocab_size: int = 0
    """Reduced draft vocabulary of a drafter from scratch: the most frequent response tokens. 0 keeps the target's."""
    fc_norm: bool = False

    family = "eagle3"

    def __post_init__(self):
        super().__post_init__()
        self.format = self.format or "specforge_eagle3"
        check(self.format in FORMATS, f"drafter.format of eagle3 must be one of {FORMATS}, got {self.format!r}")
        check(self.layers == 1, f"eagle3 drafters have one layer, got drafter.layers={self.layers}")

    def shape(self, target: TargetSpec, taps: list[int]) -> Eagle3Shape:
        qwen3 = self.format == "deepspec_eagle3"
        return Eagle3Shape(format=self.format, sizes=LayerSizes.of(target.text_config, head_norms=qwen3), num_layers=1, taps=tuple(taps),
                           num_target_layers=target.num_layers, vocab_size=target.vocab_size, target_hidden_size=target.hidden_size,
                           draft_vocab_size=(0 if qwen3 else self.draft_vocab_size) or target.vocab_size, own_lm_head=not qwen3,
                           fc_norm=self.fc_norm, steps=self.tokens_per_stage if qwen3 else None, state="raw")

    def build(self, shape: Eagle3Shape, head: TargetHead | None) -> "Eagle3":
        return Eagle3(shape, head, k=self.tokens_per_stage, decay=self.decay)


class Eagle3(ChainDrafter):
    """Feeds back its pre-norm output; the loss is soft cross-entropy against the target, 0.8^j a step."""

    shape: Eagle3Shape

    def __init__(self, shape: Eagle3Shape, head: TargetHead | None, *, k: int, decay: float):
        super().__init__(shape, head, k=k, decay=decay)
        sizes, taps = shape.sizes, len(shape.taps) or shape.num_taps
        self.fc = nn.Linear(taps * shape.target_hidden_size, sizes.hidden_size, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(shape.target_hidden_size, sizes.rms_norm_eps) for _ in range(taps)) if shape.fc_norm else None
        layer = DecoderLayer(sizes, 2 * sizes.hidden_size)
        layer.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers.append(layer)
        self.lm_head = nn.Linear(sizes.hidden_size, shape.draft_vocab_size, bias=False) if shape.own_lm_head else None
        reduced = shape.draft_vocab_size < shape.vocab_size
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool) if reduced else None)

    def keep_tokens(self, ids: Tensor) -> None:
        """Make these target ids [V_draft] (ascending) the draft vocabulary."""
        check(len(ids) == self.shape.draft_vocab_size, f"{len(ids)} ids for a draft vocabulary of {self.shape.draft_vocab_size}")
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True

    def kept_ids(self) -> Tensor | None:
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def token_ids(self, drafted: Tensor) -> Tensor:
        return drafted if self.d2t is None else drafted + self.d2t[drafted]

    def project_features(self, features: Tensor) -> Tensor:
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return self.head.logits(normed) if self.lm_head is None else self.lm_head(normed)

    def loss(self, stage: DraftStage, anchors: Tensor, labels: Labels, progress: float, *, max_rows: int) -> StageLoss:
        return stage_loss(self.row_loss, self.norm(stage.hidden[:, :, stage.predicts]), labels, self.slot_weights(),
                          max_rows=max_rows, frozen=self.lm_head is None)

    def row_loss(self, normed: Tensor, tokens: Tensor, teacher: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(normed) if self.lm_head is None else self.lm_head(normed)
        kept = self.kept_ids()
        with torch.no_grad():
            target = self.head.logits(teacher.to(normed.dtype), kept)
            correct = self.token_ids(logits.argmax(-1)) == tokens
        losses = soft_cross_entropy(logits, target)
        return (weights * losses).sum(), by_slot(correct, slots, self.k, losses)
