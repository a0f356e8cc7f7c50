"""Reach: how likely decoding gets to each slot of a branch, by the drafter's own probabilities of the text before it."""

from dataclasses import replace

import torch
from torch import Tensor

from dloop_train.drafters.base import Drafter
from dloop_train.drafters.losses import divided
from dloop_train.types import DraftStage


@torch.no_grad()
def likelihoods(drafter: Drafter, stage: DraftStage, anchors: Tensor, tokens: Tensor, max_rows: int) -> Tensor:
    """The probability that each slot drafts the text's token where the slots before it did; 0 for tokens that cannot be drafted. [B, N, k]

    At most max_rows rows of logits are alive at once.
    """
    batch, branches, k = tokens.shape
    ids, known = drafter.drafted_ids(tokens)
    # ZeRO-3 gathers a head in every call, so that all ranks must make as many
    size = branches if any(map(divided, drafter.parameters())) else max(1, max_rows // (batch * k))
    found = []
    for start in range(0, branches, size):
        part = slice(start, start + size)
        logits = drafter.rescore(replace(stage, hidden=stage.hidden[:, part]), anchors[:, part], tokens[:, part])
        found.append(torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).gather(-1, ids[:, part, :, None])[..., 0])
    return torch.cat(found, dim=1) if known is None else torch.cat(found, dim=1) * known


def reach(reached: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
    """Of branches that decoding gets to with probability `reached` [B, N]: the same for each slot of their next stage [B, N, k], and for what follows it [B, N]."""
    ways = torch.cat([reached[..., None], reached[..., None] * likely.cumprod(-1)], dim=-1)
    return ways[..., :-1], ways[..., -1]
