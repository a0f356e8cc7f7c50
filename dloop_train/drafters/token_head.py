"""Token heads: small heads that correct each slot's logits by the tokens drafted before it."""

from typing import Any

import torch
from torch import Tensor

from dloop_train.drafters.base import Pick
from dloop_train.drafters.block import BlockDrafter
from dloop_train.targets.target import Target
from dloop_train.types import DraftStage


class TokenHeadDrafter(BlockDrafter):
    """A block drafter whose logits are the backbone's plus a correction for each slot.

    The correction is `expand` of a code, which depends on the slot and on the tokens before it.
    The head starts again with the anchor of each stage: token j depends on [anchor, tokens 0 .. j - 1].
    """

    uncorrected = 0
    """Number of slots, from the first on, whose code is zero: their logits are the backbone's."""

    # What a family implements

    def codes(self, normed: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Codes of all slots for a block of `tokens` [B, N, k]. [B, N, k, D] -> [B, N, k, r]"""
        raise NotImplementedError

    def prepare(self, normed: Tensor) -> Any:
        """The part of the codes that depends on the backbone only, for all slots at once."""
        raise NotImplementedError

    def start(self, anchors: Tensor) -> Any:
        """The head's memory after the anchors [B, N]."""
        raise NotImplementedError

    def code(self, prepared: Any, slot: int, memory: Any) -> tuple[Tensor, Any]:
        """The code of one slot [B, N, r], and the memory after this slot."""
        raise NotImplementedError

    def update_memory(self, memory: Any, tokens: Tensor) -> Any:
        """The memory after one more token [B, N]."""
        raise NotImplementedError

    def expand(self, codes: Tensor) -> Tensor:
        """Codes to corrections of the logits. [..., r] -> [..., V]"""
        raise NotImplementedError

    # What all share

    def initialise(self, target: Target) -> None:
        super().initialise(target)
        self.start_head()

    def normed(self, stage: DraftStage) -> Tensor:
        """Hidden states of the drafted slots after the final norm, as the lm_head reads them. [B, N, k, D]"""
        return self.norm(stage.hidden[:, :, stage.predicts])

    def draft_tokens(self, stage: DraftStage, anchors: Tensor, pick: Pick) -> Tensor:
        normed = self.normed(stage)
        base, prepared, memory, tokens = self.draft_head.logits(normed), self.prepare(normed), self.start(anchors), []
        for slot in range(self.k):
            code, memory = self.code(prepared, slot, memory)
            tokens.append(pick(base[:, :, slot] if slot < self.uncorrected else base[:, :, slot] + self.expand(code)))
            memory = self.update_memory(memory, tokens[-1])
        return torch.stack(tokens, dim=2)

    def rescore(self, stage: DraftStage, anchors: Tensor, tokens: Tensor) -> Tensor:
        normed = self.normed(stage)
        return self.draft_head.logits(normed) + self.expand(self.codes(normed, anchors, tokens))


def before(anchors: Tensor, tokens: Tensor) -> Tensor:
    """The token before each drafted one. [B, N] and [B, N, k] -> [B, N, k]"""
    return torch.cat([anchors[..., None], tokens[..., :-1]], dim=-1)
