"""DFlash: a block drafter that drafts k tokens in one pass, independently of each other."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dloop_train.config import check
from dloop_train.drafters.base import Flops, Work
from dloop_train.drafters.block import BlockConfig, BlockDrafter, BlockShape
from dloop_train.drafters.losses import by_slot, hits, only, row_losses, stage_loss
from dloop_train.targets.head import TargetHead
from dloop_train.types import DraftStage, Labels, StageLoss

FORMATS = {"fill_in": "zlab_dflash", "shifted": "deepspec_dflash"}
LOSSES = {"ce": {"hard": 1.0}, "soft_ce": {"soft": 1.0}, "l1": {"variation": 2.0}}
"""Weights for row_losses. Total variation is half the L1 distance, hence the 2."""


@dataclass(kw_only=True)
class DFlashConfig(BlockConfig):
    """Settings of DFlash, in z-lab's layout (fill_in) or DeepSpec's (shifted)."""

    loss: str = "ce"
    """ce: cross-entropy with the text's tokens (the released recipe). soft_ce: with the target's distribution.

    l1: the L1 distance from the target's distribution.
    """

    family = "dflash"
    reduced_format = "speculators_dflash"
    unpaired = "z-lab and DeepSpec have released DFlash weights for some targets only"

    def __post_init__(self):
        super().__post_init__()
        check(self.loss in LOSSES, f"drafter.loss of dflash must be one of {tuple(LOSSES)}, got {self.loss!r}")
        self.format = self.format or FORMATS[self.alignment]
        check(
            self.format == FORMATS[self.alignment],
            f"the layout of a DFlash file fixes its alignment: drafter.alignment={self.alignment} is "
            f"{FORMATS[self.alignment]}, got drafter.format={self.format!r}",
        )

    @property
    def follows_target(self) -> bool:
        return self.alignment == "shifted"  # DeepSpec's layout

    def build(self, shape: BlockShape, head: TargetHead | None) -> "DFlash":
        return DFlash(shape, head, self.gamma, self.loss)


class DFlash(BlockDrafter):
    """DFlash. The loss of slot j has weight exp(-j / gamma).

    It is cross-entropy with the text (the released recipe) or a distance from the target's distribution.
    """

    def __init__(self, shape: BlockShape, head: TargetHead | None, gamma: float, loss: str = "ce"):
        super().__init__(shape, head, gamma)
        self.mixture = LOSSES[loss]

    def loss(self, stage: DraftStage, anchors: Tensor, labels: Labels, progress: float, *, max_rows: int) -> StageLoss:
        # The norm is trained, so it is applied outside of row_loss: stage_loss computes gradients of its rows only.
        return stage_loss(
            self.row_loss, self.norm(stage.hidden[:, :, stage.predicts]), labels, self.slot_weights(), max_rows=max_rows
        )

    def row_loss(
        self, normed: Tensor, tokens: Tensor, teacher: Tensor, weights: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, (places, known), target = self.draft_head.logits(normed), self.drafted_ids(tokens), None
        if "hard" not in self.mixture:
            with torch.no_grad():
                target = self.teacher_logits(teacher.to(normed.dtype))
        losses, _ = row_losses(logits, places, None if target is None else target.kept, **self.mixture)
        losses = only(losses, known if target is None else target.taught)
        return (weights * losses).sum(), by_slot(hits(logits, places, known), slots, self.k, losses)

    def flops(self) -> Flops:
        plain, shape = super().flops(), self.shape
        if "hard" in self.mixture:
            return plain
        return replace(
            plain, teacher=Work(2 * self.teacher_vocabulary * shape.target_hidden_size + 4 * shape.draft_vocab_size)
        )
