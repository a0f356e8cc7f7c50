"""TargetHead: embedding, final norm and lm_head of the target, loaded alone. Frozen, and never inside the DeepSpeed engine."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TargetHead(nn.Module):
    """What a drafter borrows from its target. Tied matrices are held once, also when they move to another device or dtype."""

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
        """Normed hidden states to logits over the vocabulary. [..., D] -> [..., V]"""
        return softcapped(F.linear(hidden, self.lm_head_weight), self.softcap)

    def of_rows(self, ids: Tensor) -> "TargetHead":
        """The same head with these rows of its lm_head alone, copied once. [V']"""
        return TargetHead(
            self.embed_weight,
            self.lm_head_weight[ids],
            self.norm_weight,
            embed_scale=self.embed_scale,
            softcap=self.softcap,
        )

    @staticmethod
    def of(target) -> "TargetHead":
        """The head of a loaded target, sharing its memory."""
        return TargetHead(
            target.backbone.embed_tokens.weight,
            target.lm_head.weight,
            target.backbone.norm.weight,
            embed_scale=target.spec.embed_scale,
            softcap=target.spec.softcap,
        )


def most_likely(logits: Tensor) -> Tensor:
    """The first id of the largest logit. [..., V] -> [...]

    What argmax says; of bf16 rows on a CPU torch's maximum with indices is several times faster.
    """
    return logits.max(-1).indices


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Gemma's bound on its logits."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
