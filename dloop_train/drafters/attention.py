"""Loop attention: queries of N branches over one shared context and over what each branch drafted itself."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop_train.types import KV

QUERIES = 512
"""Queries a head that look at the context together where the mask is dense: they see as many rows as the last of their branches."""


def visible(row: Tensor, first: Tensor, origin: Tensor, at: Tensor | None, window: int | None) -> Tensor:
    """Whether a query at row `at` sees a row of the context: of its own document, strictly before its origin, within its window.

    The one rule of every context mask, dense or in blocks.
    """
    seen = (row >= first) & (row < origin)
    return seen if window is None else seen & (at - row < window)


class ContextMask:
    """What branches [B, N] see of the context: rows from `first`, where their document begins, to the one before `origin`.

    Masks are made once, for all layers and, where no window moves with the queries, for all stages.
    """

    def __init__(self, origin: Tensor, first: Tensor, whole: "ContextMask | None" = None):
        self.origin, self.first, self.whole = origin, first, whole
        self.made: dict[Hashable, Any] = {}

    def select_branches(self, branches: int | Tensor) -> "ContextMask":
        """So many branches from the first on, whose masks are cut from those of all; or those of an index."""
        if isinstance(branches, int):
            return ContextMask(self.origin[:, :branches], self.first[:, :branches], self.whole or self)
        return ContextMask(self.origin[:, branches], self.first[:, branches])

    def once(self, key: Hashable, make) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def gather_at(self, ahead: Sequence[int]) -> Tensor:
        """Rows of queries that stand so far ahead of the origin. [B, N, Q]"""
        return self.origin[..., None] + torch.tensor(ahead, device=self.origin.device)

    def bounds(self) -> tuple[list[int], list[int], list[int]]:
        """Of each branch, over the rows of the batch: first row, lowest origin, highest origin."""
        return self.once(
            "bounds",
            lambda: tuple(torch.stack([self.first.amin(0), self.origin.amin(0), self.origin.amax(0)]).tolist()),
        )

    def parts(self, ahead: Sequence[int], window: int | None) -> "list[MaskTile]":
        """The branches in groups, each with the rows that it looks at and a dense mask on them."""
        return self.once(
            ("parts", len(ahead), window and (window, tuple(ahead))), lambda: list(self.make_parts(ahead, window))
        )

    def make_parts(self, ahead: Sequence[int], window: int | None):
        first, lowest, highest = self.bounds()
        at = None if window is None else self.query_rows(ahead)[..., None]  # [B, N, Q, 1]
        together = max(1, QUERIES // len(ahead))
        for start in range(0, len(first), together):
            branches = slice(start, start + together)
            begin = min(first[branches])
            if window is not None:
                begin = max(begin, min(lowest[branches]) + min(ahead) - window + 1)
            stop = max(1, *highest[branches])
            rows = slice(min(begin, stop - 1), stop)  # one row at least, if only to be hidden
            row = torch.arange(rows.start, rows.stop, device=self.origin.device)
            seen = visible(
                row,
                self.first[:, branches, None, None],
                self.origin[:, branches, None, None],
                None if at is None else at[:, branches],
                window,
            )
            yield MaskTile(branches, rows, ~seen)

    def blocks(self, ahead: Sequence[int], repeats: int, length: int, window: int | None):
        """The same rule as FlexAttention's block mask over [N * repeats * Q] queries, made for all branches and cut for those that are left."""
        queries = self.origin.shape[1] * repeats * len(ahead)
        if window is None and self.whole is not None:
            return self.once(
                ("cut", repeats, len(ahead), length),
                lambda: first_queries(self.whole.blocks(ahead, repeats, length, None), queries),
            )
        return self.once(
            ("blocks", repeats, len(ahead), length, window and (window, tuple(ahead))),
            lambda: self.make_blocks(ahead, repeats, length, window),
        )

    def make_blocks(self, ahead: Sequence[int], repeats: int, length: int, window: int | None):
        first, origin, at, slots = self.first, self.origin, self.query_rows(ahead), len(ahead)

        def seen(batch, head, query, row):
            branch = query // (repeats * slots)
            return visible(row, first[batch, branch], origin[batch, branch], at[batch, branch, query % slots], window)

        make = flex(origin.is_cuda).mask
        return make(seen, origin.shape[0], None, origin.shape[1] * repeats * slots, length, device=origin.device)


def first_queries(mask, queries: int):
    """A block mask of the first queries alone. BlockMask's own _adjust forgets in torch 2.11 how many they are within the last block."""
    rows = -(-queries // mask.BLOCK_SIZE[0])
    seen = [
        None if each is None else each[:, :, :rows]
        for each in (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    ]
    return mask.from_kv_blocks(
        *seen, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod, seq_lengths=(queries, mask.seq_lengths[1])
    )


@dataclass(frozen=True)
class MaskTile:
    """Branches that look at the context together."""

    branches: slice
    rows: slice
    hidden: Tensor  # [B, n, 1 or Q, R] rows that a query may not see


def loop_attention(
    queries: Tensor,
    context: KV,
    own: KV | None,
    context_mask: ContextMask,
    scale: float,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Softmax attention of [B, N, Q, H, E] queries; returns the same shape.

    A branch sees context rows [B, T, G, E] as its sight says, and its own rows [B, N, P, G, E], which stand at origin,
    origin + 1, ... and of which the queries are the last Q. A window counts the query itself; `causal` hides own rows behind
    the query. Without own rows the queries stand for the last context row. The context is shared: it is never repeated per
    branch, and no branch is compared with another's own rows.
    """
    batch, branches, slots, heads, size = queries.shape
    groups, count = context.keys.shape[2], 0 if own is None else own.keys.shape[2]
    ahead = [-1] * slots if own is None else list(range(count - slots, count))
    hidden = own_hidden(slots, count, window, causal, queries.device)
    if (batch, branches) == (1, 1):
        return single_branch(queries, context, own, context_mask, ahead, hidden, scale, window)
    # the heads of a group share their keys, so that they count as queries: [B, G, N, H/G * Q, E]
    grouped = queries.unflatten(3, (groups, heads // groups)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
    to_context = context_in_blocks if has_kernel(queries) else context_in_parts
    mixed, log_sum = to_context(
        grouped, context.keys.transpose(1, 2), context.values.transpose(1, 2), context_mask, ahead, scale, window
    )
    if own is not None:
        mixed = add_own(mixed, log_sum, grouped, own, hidden, scale)
    return mixed.unflatten(3, (heads // groups, slots)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4)


def add_own(mixed: Tensor, log_sum: Tensor, queries: Tensor, own: KV, hidden: Tensor | None, scale: float) -> Tensor:
    """What attention gives over the context, and over own rows beside it: one softmax by the log-sum-exp of both."""
    keys, values = (
        own.keys.permute(0, 3, 1, 4, 2),
        own.values.permute(0, 3, 1, 2, 4),
    )  # [B, G, N, E, P], [B, G, N, P, E]
    scores = (queries @ keys).to(log_sum.dtype) * scale  # [B, G, N, H/G * Q, P]
    if hidden is not None:
        scores = scores.masked_fill(hidden.repeat(scores.shape[3] // hidden.shape[0], 1), float("-inf"))
    total = torch.logaddexp(log_sum, scores.logsumexp(-1))[..., None]
    return (
        mixed * torch.exp(log_sum[..., None] - total).to(mixed.dtype)
        + torch.exp(scores - total).to(mixed.dtype) @ values
    )


def own_hidden(slots: int, count: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """Own rows that a query may not see, or None where it sees all. -> [Q, P] bool"""
    if not (causal and slots > 1) and (window is None or window >= count):
        return None
    behind = torch.arange(count - slots, count, device=device)[:, None] - torch.arange(
        count, device=device
    )  # how far a row lies back
    hidden = behind < 0 if causal else torch.zeros_like(behind, dtype=torch.bool)
    return hidden if window is None else hidden | (behind.abs() >= window)


HEADS = range(16, 513)
"""Sizes of a head for which FlexAttention has a kernel: Triton's products begin with 16 numbers, and beyond Gemma 4's 512 no tiles were looked for."""


def has_kernel(queries: Tensor) -> bool:
    """Whether FlexAttention takes queries [..., E] such as these: on a GPU, in at most fp32."""
    return queries.is_cuda and queries.element_size() <= 4 and queries.shape[-1] in HEADS


# Over the context: what attention gives [B, G, N, r, E], and the log of the sum of exponents [B, G, N, r] that it was divided by


def context_in_parts(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    context_mask: ContextMask,
    ahead: Sequence[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """With dense masks, group of branches by group."""
    return _ContextAttention.apply(queries, keys, values, context_mask.parts(ahead, window), scale)


def context_in_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    context_mask: ContextMask,
    ahead: Sequence[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """With FlexAttention, which leaves out blocks that nobody sees; compiled on a CUDA device."""
    from torch.nn.attention.flex_attention import AuxRequest

    mask = context_mask.blocks(ahead, queries.shape[3] // len(ahead), keys.shape[2], window)
    mixed, extra = flex(queries.is_cuda).attention(
        queries.flatten(2, 3),
        keys,
        values,
        block_mask=mask,
        scale=scale,
        return_aux=AuxRequest(lse=True),
        kernel_options=tiles(queries),
    )
    return mixed.unflatten(2, queries.shape[2:4]), extra.lse.unflatten(2, queries.shape[2:4])


def tiles(queries: Tensor) -> dict[str, int] | None:
    """Smaller tiles for heads whose tiles, as FlexAttention cuts them, would not fit into a GPU's shared memory; None where they do.

    In bf16, heads of 512 want 256 KB in the forward pass and heads of 256 112 KB in the backward pass; an H100 has 227 KB, an RTX 99 KB.
    """
    size = queries.shape[-1]
    if not queries.is_cuda or size <= 128:
        return None
    if size <= 256 and torch.cuda.get_device_properties(queries.device).shared_memory_per_block_optin >= 160 * 2**10:
        return None
    side = 32 if size * queries.element_size() <= 512 else 16
    return {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1, "bwd_num_stages": 1} | {
        f"bwd_BLOCK_{name}": side for name in ("M1", "N1", "M2", "N2")
    }


@dataclass(frozen=True)
class Flex:
    """FlexAttention's two functions."""

    attention: Any
    mask: Any


FORMS = 64
"""Compiled forms of one of these functions at most. Batches and stages of all sizes need about ten, twice as many with and without gradients."""


def flex(compiled: bool) -> Flex:
    """Compiled in full: what is left uncompiled, also behind the limit of forms, would hold all scores at once and tell nobody."""
    functions = flex_functions(compiled)
    # Each thread has a limit of its own, and what is computed again for a backward pass is computed in autograd's thread.
    if compiled and torch._dynamo.config.recompile_limit < FORMS:
        torch._dynamo.config.recompile_limit = FORMS  # of torch 2.11 to 2.13 only the last takes it with the function
    return functions


@cache
def flex_functions(compiled: bool) -> Flex:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return Flex(flex_attention, create_block_mask)
    return Flex(torch.compile(flex_attention, fullgraph=True), torch.compile(create_block_mask, fullgraph=True))


class _ContextAttention(torch.autograd.Function):
    """Scores live for one group of branches at a time and are recomputed in the backward pass: memory grows with queries alone."""

    @staticmethod
    def forward(ctx, queries, keys, values, parts, scale):
        mixed = torch.empty_like(queries)
        log_sum = queries.new_empty(queries.shape[:-1], dtype=torch.promote_types(queries.dtype, torch.float32))
        for part in parts:
            scores = scores_of(queries, keys, part, scale)  # [B, G, n r, R]
            largest = scores.amax(-1, keepdim=True).clamp(
                min=torch.finfo(scores.dtype).min
            )  # finite, also of a query that sees nothing
            total = scores.sub_(largest).exp_().sum(-1, keepdim=True)
            weights = scores.div_(total.clamp(min=torch.finfo(scores.dtype).tiny)).to(values.dtype)
            shape = queries[:, :, part.branches].shape
            mixed[:, :, part.branches] = (weights @ values[:, :, part.rows]).view(shape)
            log_sum[:, :, part.branches] = (largest + total.log()).view(shape[:-1])
        ctx.parts, ctx.scale = parts, scale
        ctx.save_for_backward(queries, keys, values, mixed, log_sum)
        return mixed, log_sum

    @staticmethod
    def backward(ctx, to_mixed, to_log_sum):
        queries, keys, values, mixed, log_sum = ctx.saved_tensors
        to_queries = torch.empty_like(queries)
        to_keys, to_values = (torch.zeros_like(rows, dtype=log_sum.dtype) for rows in (keys, values))
        for part in ctx.parts:
            shape = queries[:, :, part.branches].shape
            flat, upstream, result = (each[:, :, part.branches].flatten(2, 3) for each in (queries, to_mixed, mixed))
            finite = log_sum[:, :, part.branches].flatten(2, 3)[..., None].clamp(min=torch.finfo(log_sum.dtype).min)
            weights = scores_of(queries, keys, part, ctx.scale).sub_(finite).exp_()
            to_values[:, :, part.rows] += weights.to(values.dtype).transpose(-1, -2) @ upstream
            # of the softmax: what reaches a weight less what reaches all of them; the log-sum-exp's own gradient is the weights
            centre = (upstream.to(log_sum.dtype) * result).sum(-1) - to_log_sum[:, :, part.branches].flatten(2, 3)
            to_scores = (
                (upstream @ values[:, :, part.rows].transpose(-1, -2))
                .to(log_sum.dtype)
                .sub_(centre[..., None])
                .mul_(weights)
                .mul_(ctx.scale)
                .to(keys.dtype)
            )
            to_queries[:, :, part.branches] = (to_scores @ keys[:, :, part.rows]).view(shape)
            to_keys[:, :, part.rows] += to_scores.transpose(-1, -2) @ flat
        return to_queries, to_keys.to(keys.dtype), to_values.to(values.dtype), None, None


def scores_of(queries: Tensor, keys: Tensor, part: MaskTile, scale: float) -> Tensor:
    """Scaled scores of a group's queries in at least fp32, minus infinity where they may not look. [B, G, n r, R]"""
    flat = queries[:, :, part.branches].flatten(2, 3)
    scores = (
        (flat @ keys[:, :, part.rows].transpose(-1, -2))
        .to(torch.promote_types(queries.dtype, torch.float32))
        .mul_(scale)
    )
    slots = part.hidden.shape[2]
    scores.unflatten(2, (part.hidden.shape[1], -1, slots)).masked_fill_(part.hidden[:, None, :, None], float("-inf"))
    return scores


def single_branch(
    queries: Tensor,
    context: KV,
    own: KV | None,
    context_mask: ContextMask,
    ahead: Sequence[int],
    hidden: Tensor | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """Decoding's case: one branch, of whose context nothing behind the origin is looked at."""
    (first,), (origin,), _ = context_mask.bounds()
    if window is not None:
        first = max(first, origin + min(ahead) - window + 1)
    keys, values = (
        shared[:, first:origin] if mine is None else torch.cat([shared[:, first:origin], mine[:, 0]], dim=1)
        for shared, mine in ((context.keys, own and own.keys), (context.values, own and own.values))
    )
    mask = None
    if window is not None or hidden is not None:
        mask = torch.ones(len(ahead), keys.shape[1], dtype=torch.bool, device=queries.device)
        seen = max(origin - first, 0)
        rows = torch.arange(first, first + seen, device=queries.device)
        mask[:, :seen] = visible(
            rows, context_mask.first[0], context_mask.origin[0], context_mask.query_rows(ahead)[0, 0, :, None], window
        )
        if hidden is not None:
            mask[:, seen:] = ~hidden
    mixed = F.scaled_dot_product_attention(
        queries[:, 0].transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2)[:, None]


def append(past: tuple[KV, ...] | None, new: tuple[KV, ...], dim: int) -> tuple[KV, ...]:
    """Rows added behind those of the past, layer by layer."""
    if past is None:
        return new
    return tuple(
        KV(torch.cat([p.keys, n.keys], dim=dim), torch.cat([p.values, n.values], dim=dim))
        for p, n in zip(past, new, strict=True)
    )
