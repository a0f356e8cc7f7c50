"""DFlash: a block drafter trained with cross-entropy; k tokens in one pass, independent of each other."""

from dataclasses import dataclass

from torch import Tensor

from dloop_train.config import check
from dloop_train.drafters.block import BlockConfig, BlockDrafter, BlockShape
from dloop_train.drafters.losses import by_slot, hits, row_losses, stage_loss
from dloop_train.targets.head import TargetHead
from dloop_train.types import DraftStage, Labels, StageLoss

FORMATS = {"fill_in": "zlab_dflash", "shifted": "deepspec_dflash"}


@dataclass(kw_only=True)
class DFlashConfig(BlockConfig):
    """DFlash, in z-lab's layout (fill_in) or DeepSpec's (shifted)."""

    family = "dflash"
    unpaired = "z-lab and DeepSpec have released DFlash weights for some targets only"

    def __post_init__(self):
        super().__post_init__()
        self.format = self.format or FORMATS[self.alignment]
        check(self.format == FORMATS[self.alignment], f"DFlash files say their alignment by their layout: drafter.alignment={self.alignment} is {FORMATS[self.alignment]}, got drafter.format={self.format!r}")

    @property
    def follows_target(self) -> bool:
        return self.alignment == "shifted"  # DeepSpec's layout

    def build(self, shape: BlockShape, head: TargetHead | None) -> "DFlash":
        return DFlash(shape, head, self.gamma)


class DFlash(BlockDrafter):
    """CE on every slot, weighted exp(-j / gamma) (DFlash's recipe)."""

    def loss(self, stage: DraftStage, anchors: Tensor, labels: Labels, progress: float, *, max_rows: int) -> StageLoss:
        # The norm stays outside: it is trained, while the head below it is frozen.
        return stage_loss(self.row_loss, self.norm(stage.hidden[:, :, stage.predicts]), labels, self.slot_weights(), max_rows=max_rows)

    def row_loss(self, normed: Tensor, tokens: Tensor, teacher: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(normed)
        losses, _ = row_losses(logits, tokens, hard=1.0)
        return (weights * losses).sum(), by_slot(hits(logits, tokens), slots, self.k, losses)
