"""DSpark: DFlash's backbone plus a Markov head over the previous token and a confidence head."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.base import Flops, Work, linear_work
from dloop_train.drafters.block import BlockConfig, BlockShape
from dloop_train.drafters.losses import by_slot, hits, only, row_losses, stage_loss
from dloop_train.drafters.token_head import TokenHeadDrafter, before
from dloop_train.targets.head import TargetHead
from dloop_train.types import DraftStage, Labels, StageLoss, TargetSpec

HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DSparkShape(BlockShape):
    """Shape of a DSpark checkpoint."""

    markov_rank: int
    markov_head_type: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    """Whether the confidence head also reads the Markov head's embedding of the token before."""

    def __post_init__(self):
        super().__post_init__()
        check(
            self.markov_head_type in HEADS,
            f"markov_head_type {self.markov_head_type!r} is not supported; {', '.join(HEADS)} are",
        )


@dataclass(kw_only=True)
class DSparkConfig(BlockConfig):
    """Settings of DSpark."""

    alignment: str = "shifted"
    markov_rank: int = 256
    """Rank of the Markov head. This and the next three settings are for drafters from scratch."""
    markov_head_type: str = "vanilla"
    """vanilla: a bias that depends on the token before. gated: also on the slot's hidden state.

    rnn: also on all earlier tokens since the anchor.
    """
    confidence: bool = True
    confidence_with_markov: bool = True
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    detach_confidence: bool = False
    """Whether the confidence loss has no gradient to the backbone and the Markov embedding."""

    family = "dspark"
    reduced_format = "speculators_dspark"
    unpaired = "DSpark weights are released for Qwen3-4B, Qwen3-8B, Qwen3-14B and Gemma-4-12B"
    needs = ""

    def __post_init__(self):
        super().__post_init__()
        self.format = self.format or "deepspec_dspark"
        check(
            self.markov_head_type in HEADS,
            f"drafter.markov_head_type must be one of {HEADS}, got {self.markov_head_type!r}",
        )
        check(
            self.markov_rank >= 1,
            f"drafter.markov_rank must be positive, got {self.markov_rank}; "
            "without a Markov head it is +drafter=dflash",
        )
        negative = [name for name in ("ce_weight", "l1_weight", "confidence_weight") if getattr(self, name) < 0]
        check(not negative, f"drafter.{negative} must not be negative")

    @property
    def follows_target(self) -> bool:
        return True

    def shape(self, target: TargetSpec, taps: list[int]) -> DSparkShape:
        return DSparkShape(
            **self.shape_fields(target, taps),
            markov_rank=self.markov_rank,
            markov_head_type=self.markov_head_type,
            confidence=self.confidence,
            confidence_with_markov=self.confidence_with_markov,
        )

    def build(self, shape: DSparkShape, head: TargetHead | None) -> "DSpark":
        return DSpark(shape, head, self)


class MarkovHead(nn.Module):
    """A low-rank bias on the logits from the token before.

    The kinds gated and rnn also read the slot's hidden state, rnn also the earlier tokens of the stage.
    """

    def __init__(self, shape: DSparkShape):
        super().__init__()
        rank, width = shape.markov_rank, shape.hidden_size
        self.kind = shape.markov_head_type
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def code(self, normed: Tensor, embedded: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [..., r] of slots [..., D] after tokens embedded as [..., r], and the memory after them [..., r]."""
        if self.kind == "vanilla":
            return embedded, memory
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([normed, embedded], dim=-1))) * embedded, memory
        gate, candidate, out = self.joint_proj(torch.cat([memory, embedded, normed], dim=-1)).chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return torch.tanh(out), kept * memory + (1 - kept) * torch.tanh(candidate)


class DSpark(TokenHeadDrafter):
    """DSpark. The loss is cross-entropy + L1 distance from the target's distribution + the confidence loss, weighted.

    The confidence loss is binary cross-entropy with the acceptance probability (see TeacherLogits.acceptance), which
    is one minus half the L1 distance if the vocabulary is not reduced.
    """

    shape: DSparkShape
    vocabulary_rows = ("markov_head.markov_w2.weight",)

    def __init__(self, shape: DSparkShape, head: TargetHead | None, settings: DSparkConfig):
        super().__init__(shape, head, settings.gamma)
        self.settings = settings
        self.markov_head = MarkovHead(shape)
        self.confidence_head = None
        if shape.confidence:
            inputs = shape.hidden_size + (shape.markov_rank if shape.confidence_with_markov else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(inputs, 1, bias=True)})

    def codes(self, normed: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.markov_head.markov_w1(before(anchors, tokens))  # [B, N, k, r]
        if self.markov_head.kind != "rnn":
            return self.markov_head.code(normed, embedded, embedded)[0]
        memory, codes = torch.zeros_like(embedded[:, :, 0]), []
        for slot in range(self.k):
            code, memory = self.markov_head.code(normed[:, :, slot], embedded[:, :, slot], memory)
            codes.append(code)
        return torch.stack(codes, dim=2)

    def prepare(self, normed: Tensor) -> Tensor:
        return normed

    def start(self, anchors: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.markov_head.markov_w1(anchors)
        return embedded, torch.zeros_like(embedded)

    def update_memory(self, memory: tuple[Tensor, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.markov_head.markov_w1(tokens), memory[1]

    def code(self, prepared: Tensor, slot: int, memory: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        embedded, past = memory
        code, past = self.markov_head.code(prepared[:, :, slot], embedded, past)
        return code, (embedded, past)

    def expand(self, codes: Tensor) -> Tensor:
        return self.markov_head.markov_w2(codes)

    def start_head(self) -> None:
        """Biases start at zero, embeddings at random values with a norm of about one."""
        nn.init.normal_(self.markov_head.markov_w1.weight, std=self.shape.markov_rank**-0.5)
        self.markov_head.markov_w2.weight.zero_()

    def confidence(self, stage: DraftStage, anchors: Tensor, tokens: Tensor) -> Tensor | None:
        return None if self.confidence_head is None else self.confidence_logits(self.normed(stage), anchors, tokens)

    def confidence_logits(self, normed: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        parts = [normed] + (
            [self.markov_head.markov_w1(before(anchors, tokens))] if self.shape.confidence_with_markov else []
        )
        if self.settings.detach_confidence:
            parts = [part.detach() for part in parts]
        return self.confidence_head["proj"](torch.cat(parts, dim=-1))[..., 0]

    def loss(self, stage: DraftStage, anchors: Tensor, labels: Labels, progress: float, *, max_rows: int) -> StageLoss:
        normed = self.normed(stage)
        extra = (self.codes(normed, anchors, labels.tokens),)
        if self.confidence_head is not None:
            extra += (self.confidence_logits(normed, anchors, labels.tokens),)
        return stage_loss(
            self.row_loss,
            normed,
            labels,
            self.slot_weights(),
            max_rows=max_rows,
            head_weights=(self.markov_head.markov_w2.weight,),
            extra=extra,
        )

    def row_loss(
        self,
        normed: Tensor,
        tokens: Tensor,
        teacher: Tensor,
        weights: Tensor,
        slots: Tensor,
        codes: Tensor,
        confidence: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits, (places, known) = self.draft_head.logits(normed) + self.expand(codes), self.drafted_ids(tokens)
        with torch.no_grad():
            target = self.teacher_logits(teacher.to(normed.dtype))
        # The L1 distance is twice the total variation. Rows whose label or most likely token of the target is outside a
        # reduced vocabulary have neither cross-entropy nor L1. The confidence is trained on all rows, since decoding
        # may need it for any of them.
        losses, distance = row_losses(
            logits, places, target.kept, hard=self.settings.ce_weight, variation=2 * self.settings.l1_weight
        )
        losses = only(losses, None if known is None else known & target.taught)
        if confidence is not None:
            accepted = target.acceptance(logits, distance)
            losses = losses + self.settings.confidence_weight * F.binary_cross_entropy_with_logits(
                confidence.to(accepted.dtype), accepted, reduction="none"
            )
        return (weights * losses).sum(), by_slot(hits(logits, places, known), slots, self.k, losses)

    def flops(self) -> Flops:
        plain, head = super().flops(), self.markov_head
        inner = linear_work(*(getattr(head, name) for name in ("gate_proj", "joint_proj") if hasattr(head, name)))
        confidence = linear_work(self.confidence_head, reaches_inputs=not self.settings.detach_confidence)
        return replace(
            plain,
            slots=self.k * (inner + confidence),
            row=plain.row + linear_work(head.markov_w2),
            # The second term is two dot products of the distributions, for their distance.
            teacher=Work(2 * self.teacher_vocabulary * self.shape.target_hidden_size + 4 * self.shape.draft_vocab_size),
        )
