"""Loop attention: queries of N branches over one shared context and over what each branch drafted itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop_train.types import KV


def loop_attention(queries: Tensor, context: KV, own: KV, origin: Tensor, scale: float) -> Tensor:
    """Softmax attention of [B, N, Q, H, E] queries; returns the same shape.

    A branch sees the context rows [B, T, G, E] strictly before its origin [B, N] (by position, counted from row 0) and all
    of its own rows [B, N, P, G, E]. The context is shared: it is never repeated per branch.
    """
    if queries.shape[:2] == (1, 1):
        known = int(origin)
        return single_branch(queries, KV(context.keys[:, :known], context.values[:, :known]), own, scale)
    batch, branches, slots, heads, size = queries.shape
    groups = context.keys.shape[2]
    # [B, G, N * (H/G) * Q, E]: the heads of a group and the branches share one product with the context
    grouped = queries.unflatten(3, (groups, heads // groups)).permute(0, 3, 1, 4, 2, 5)  # [B, G, N, H/G, Q, E]
    flat = grouped.flatten(2, 4)
    to_context = (flat @ context.keys.permute(0, 2, 3, 1)).unflatten(2, grouped.shape[2:5])  # [B, G, N, H/G, Q, T]
    visible = torch.arange(context.keys.shape[1], device=origin.device) < origin[..., None]  # [B, N, T]
    to_context = to_context.masked_fill(~visible[:, None, :, None, None, :], float("-inf"))
    own_keys, own_values = own.keys.permute(0, 3, 1, 2, 4), own.values.permute(0, 3, 1, 2, 4)  # [B, G, N, P, E]
    to_own = grouped.flatten(3, 4) @ own_keys.transpose(-1, -2)  # [B, G, N, H/G * Q, P]
    scores = torch.cat([to_context.flatten(3, 4), to_own], dim=-1) * scale
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    length = context.keys.shape[1]
    from_context = weights[..., :length].flatten(2, 3) @ context.values.permute(0, 2, 1, 3)  # [B, G, N * H/G * Q, E]
    mixed = from_context.unflatten(2, (branches, -1)) + weights[..., length:] @ own_values  # [B, G, N, H/G * Q, E]
    return mixed.unflatten(3, (heads // groups, slots)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4)


def single_branch(queries: Tensor, context: KV, own: KV, scale: float) -> Tensor:
    """Decoding's case: one branch, and a context that ends where it starts."""
    keys = torch.cat([context.keys, own.keys[:, 0]], dim=1).transpose(1, 2)
    values = torch.cat([context.values, own.values[:, 0]], dim=1).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(queries[:, 0].transpose(1, 2), keys, values, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2)[:, None]


def append(past: tuple[KV, ...] | None, new: tuple[KV, ...], dim: int) -> tuple[KV, ...]:
    """Rows added behind those of the past, layer by layer."""
    if past is None:
        return new
    return tuple(KV(torch.cat([p.keys, n.keys], dim=dim), torch.cat([p.values, n.values], dim=dim)) for p, n in zip(past, new, strict=True))
