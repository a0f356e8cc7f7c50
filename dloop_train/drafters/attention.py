"""Loop attention: queries of N branches over one shared context and over what each branch drafted itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop_train.types import KV


def loop_attention(queries: Tensor, context: KV, own: KV | None, origin: Tensor, scale: float, *, window: int | None = None, causal: bool = False) -> Tensor:
    """Softmax attention of [B, N, Q, H, E] queries; returns the same shape.

    A branch sees the context rows [B, T, G, E] strictly before its origin [B, N] (by position, counted from row 0) and all
    of its own rows [B, N, P, G, E], which stand at origin, origin + 1, ... and of which the queries are the last Q. A window
    counts the query itself; `causal` hides own rows behind the query. Without own rows the queries stand for the last
    context row. The context is shared: it is never repeated per branch.
    """
    batch, branches, slots, heads, size = queries.shape
    groups, length = context.keys.shape[2], context.keys.shape[1]
    if own is None:
        own = KV(*(rows.new_empty(batch, branches, 0, groups, size) for rows in (context.keys, context.values)))
        at = origin[..., None].expand(-1, -1, slots) - 1
    else:
        at = origin[..., None] + torch.arange(own.keys.shape[2] - slots, own.keys.shape[2], device=origin.device)  # [B, N, Q]
    hidden_own = own_hidden(at, origin, own.keys.shape[2], window, causal)
    if (batch, branches) == (1, 1):
        return single_branch(queries, context, own, int(origin), at[0, 0], hidden_own, scale, window)
    # [B, G, N * (H/G) * Q, E]: the heads of a group and the branches share one product with the context
    grouped = queries.unflatten(3, (groups, heads // groups)).permute(0, 3, 1, 4, 2, 5)  # [B, G, N, H/G, Q, E]
    flat = grouped.flatten(2, 4)
    to_context = (flat @ context.keys.permute(0, 2, 3, 1)).unflatten(2, grouped.shape[2:5])  # [B, G, N, H/G, Q, T]
    rows = torch.arange(length, device=origin.device)
    visible = (rows < origin[..., None])[:, :, None]  # [B, N, 1, T]
    if window is not None:
        visible = visible & (at[..., None] - rows < window)  # [B, N, Q, T]
    to_context = to_context.masked_fill(~visible[:, None, :, None], float("-inf"))
    own_keys, own_values = own.keys.permute(0, 3, 1, 2, 4), own.values.permute(0, 3, 1, 2, 4)  # [B, G, N, P, E]
    to_own = grouped.flatten(3, 4) @ own_keys.transpose(-1, -2)  # [B, G, N, H/G * Q, P]
    if hidden_own is not None:
        to_own = to_own.unflatten(3, (-1, slots)).masked_fill(hidden_own[:, None, :, None], float("-inf")).flatten(3, 4)
    scores = torch.cat([to_context.flatten(3, 4), to_own], dim=-1) * scale
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    from_context = weights[..., :length].flatten(2, 3) @ context.values.permute(0, 2, 1, 3)  # [B, G, N * H/G * Q, E]
    mixed = from_context.unflatten(2, (branches, -1)) + weights[..., length:] @ own_values  # [B, G, N, H/G * Q, E]
    return mixed.unflatten(3, (heads // groups, slots)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4)


def own_hidden(at: Tensor, origin: Tensor, count: int, window: int | None, causal: bool) -> Tensor | None:
    """Own rows that a query may not see, or None where it sees all. -> [B, N, Q, P] bool"""
    if not count or (window is None and not causal):
        return None
    behind = at[..., None] - (origin[..., None] + torch.arange(count, device=at.device))[:, :, None]  # how far a row lies back
    hidden = behind < 0 if causal else torch.zeros_like(behind, dtype=torch.bool)
    return hidden if window is None else hidden | (behind.abs() >= window)


def single_branch(queries: Tensor, context: KV, own: KV, origin: int, at: Tensor, hidden_own: Tensor | None, scale: float, window: int | None) -> Tensor:
    """Decoding's case: one branch, of whose context nothing behind the origin is looked at."""
    first = 0 if window is None else max(0, int(at[0]) - window + 1)
    keys = torch.cat([context.keys[:, first:origin], own.keys[:, 0]], dim=1).transpose(1, 2)
    values = torch.cat([context.values[:, first:origin], own.values[:, 0]], dim=1).transpose(1, 2)
    mask = None
    if window is not None or hidden_own is not None:
        mask = torch.ones(len(at), keys.shape[2], dtype=torch.bool, device=at.device)
        seen = max(origin - first, 0)
        if window is not None:
            mask[:, :seen] = at[:, None] - torch.arange(first, first + seen, device=at.device) < window
        if hidden_own is not None:
            mask[:, seen:] = ~hidden_own[0, 0]
    mixed = F.scaled_dot_product_attention(queries[:, 0].transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2)[:, None]


def append(past: tuple[KV, ...] | None, new: tuple[KV, ...], dim: int) -> tuple[KV, ...]:
    """Rows added behind those of the past, layer by layer."""
    if past is None:
        return new
    return tuple(KV(torch.cat([p.keys, n.keys], dim=dim), torch.cat([p.values, n.values], dim=dim)) for p, n in zip(past, new, strict=True))
