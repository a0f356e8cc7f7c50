"""TargetHead: embedding, final norm and lm_head of the target, without its layers.

They are frozen and never part of the DeepSpeed engine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TargetHead(nn.Module):
    """The target's weights that a drafter uses.

    Tied matrices are stored once, also after they are moved to another device or dtype.
    """

    def __init__(
        self,
        embed: Tensor,
        lm_head: Tensor,
        norm: Tensor | None = None,
        *,
        embed_scale: float = 1.0,
        softcap: float | None = None,
    ):
        super().__init__()
        self.embed_scale, self.softcap = embed_scale, softcap
        self.register_buffer("embed_weight", embed, persistent=False)
        self.register_buffer("own_lm_head", None if lm_head is embed else lm_head, persistent=False)
        self.register_buffer("norm_weight", norm, persistent=False)

    @property
    def lm_head_weight(self) -> Tensor:
        return self.embed_weight if self.own_lm_head is None else self.own_lm_head

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids to input embeddings. [...] -> [..., D]"""
        rows = F.embedding(tokens, self.embed_weight)
        return rows if self.embed_scale == 1.0 else rows * torch.tensor(self.embed_scale, dtype=rows.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm to logits over the vocabulary. [..., D] -> [..., V]"""
        return softcapped(F.linear(hidden, self.lm_head_weight), self.softcap)

    def of_rows(self, ids: Tensor) -> "TargetHead":
        """A head with only the rows `ids` [V'] of this lm_head. The rows are copied; the rest is shared."""
        return TargetHead(
            self.embed_weight,
            self.lm_head_weight[ids],
            self.norm_weight,
            embed_scale=self.embed_scale,
            softcap=self.softcap,
        )

    @staticmethod
    def of(target) -> "TargetHead":
        """The head of a loaded target; shares its memory."""
        return TargetHead(
            target.backbone.embed_tokens.weight,
            target.lm_head.weight,
            target.backbone.norm.weight,
            embed_scale=target.spec.embed_scale,
            softcap=target.spec.softcap,
        )


def most_likely(logits: Tensor) -> Tensor:
    """The first id of the largest logit. [..., V] -> [...]

    The same as argmax. For bf16 rows on a CPU, torch's maximum with indices is several times faster.
    """
    return logits.max(-1).indices


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Gemma's softcapping of logits; None leaves them unchanged."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
