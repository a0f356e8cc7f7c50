"""Loop attention: queries of N branches attend to one shared context and to the branch's own rows."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop_train.types import KV

QUERIES = 512
"""Queries per head that share one dense mask. They attend to all rows that any of their branches sees."""


def visible(row: Tensor, first: Tensor, origin: Tensor, at: Tensor | None, window: int | None) -> Tensor:
    """Whether a query at row `at` sees a context row: in the same document, strictly before the origin, in the window.

    All context masks, dense and block-sparse, use this function.
    """
    seen = (row >= first) & (row < origin)
    return seen if window is None else seen & (at - row < window)


class ContextMask:
    """Attention mask of branches [B, N] over the context.

    A branch sees the rows from `first`, where its document begins, to `origin` - 1.
    Masks are built once for all layers, and for all stages if no window moves with the queries.
    """

    def __init__(self, origin: Tensor, first: Tensor, whole: "ContextMask | None" = None):
        self.origin, self.first, self.whole = origin, first, whole
        self.made: dict[Hashable, Any] = {}

    def select_branches(self, branches: int | Tensor) -> "ContextMask":
        """The mask of the first `branches` branches, or of the branches with these indices.

        For a number, block masks are cut from those of all branches instead of being built again.
        """
        if isinstance(branches, int):
            return ContextMask(self.origin[:, :branches], self.first[:, :branches], self.whole or self)
        return ContextMask(self.origin[:, branches], self.first[:, branches])

    def once(self, key: Hashable, make) -> Any:
        """The cached value of `key`, computed by make() at the first call."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def query_rows(self, ahead: Sequence[int]) -> Tensor:
        """Rows of queries that are `ahead` rows after the origin (-1: the row before it). [B, N, Q]"""
        return self.origin[..., None] + torch.tensor(ahead, device=self.origin.device)

    def bounds(self) -> tuple[list[int], list[int], list[int]]:
        """First row, lowest origin and highest origin of each branch, over the sequences of the batch. Each [N].

        Cached because tolist() waits for the GPU.
        """
        return self.once(
            "bounds",
            lambda: tuple(torch.stack([self.first.amin(0), self.origin.amin(0), self.origin.amax(0)]).tolist()),
        )

    def parts(self, ahead: Sequence[int], window: int | None) -> "list[MaskTile]":
        """The branches in groups, each with the context rows that it attends to and a dense mask over them."""
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
            rows = slice(min(begin, stop - 1), stop)  # at least one row, since amax over none fails
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
        """This mask as a block mask of FlexAttention, over [N * repeats * Q] queries.

        Without a window it is built for all branches and cut to those that remain.
        """
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
    """A block mask of the first queries only.

    In torch 2.11 BlockMask._adjust loses the exact number of queries in the last block, so it is not used.
    """
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
    """Branches that attend to the context with one dense mask."""

    branches: slice
    rows: slice
    hidden: Tensor  # [B, n, 1 or Q, R] true where a query must not see a row


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
    """Softmax attention of queries [B, N, Q, H, E]. Returns the same shape.

    A branch sees the context rows [B, T, G, E] that `context_mask` allows, and its own rows [B, N, P, G, E].
    Own rows are at rows origin, origin + 1, ... of the sequence; the last Q of them belong to the queries.
    Without own rows the queries are at the row before the origin.
    A window counts the query itself. `causal` hides own rows after the query.
    The context is shared: it is not repeated per branch. No scores are computed with own rows of another branch.
    """
    batch, branches, slots, heads, _size = queries.shape
    groups, count = context.keys.shape[2], 0 if own is None else own.keys.shape[2]
    ahead = [-1] * slots if own is None else list(range(count - slots, count))
    hidden = own_hidden(slots, count, window, causal, queries.device)
    if (batch, branches) == (1, 1):
        return single_branch(queries, context, own, context_mask, ahead, hidden, scale, window)
    # The heads of a group share their keys, so they are folded into the query axis: [B, G, N, H/G * Q, E]
    grouped = queries.unflatten(3, (groups, heads // groups)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
    to_context = context_in_blocks if has_kernel(queries) else context_in_parts
    mixed, log_sum = to_context(
        grouped, context.keys.transpose(1, 2), context.values.transpose(1, 2), context_mask, ahead, scale, window
    )
    if own is not None:
        mixed = add_own(mixed, log_sum, grouped, own, hidden, scale)
    return mixed.unflatten(3, (heads // groups, slots)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4)


def add_own(mixed: Tensor, log_sum: Tensor, queries: Tensor, own: KV, hidden: Tensor | None, scale: float) -> Tensor:
    """Add own rows to attention over the context: the log-sum-exps of both give one softmax. [B, G, N, H/G * Q, E]"""
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
    """Own rows that a query must not see, or None if it sees all. -> [Q, P] bool"""
    if not (causal and slots > 1) and (window is None or window >= count):
        return None
    # [Q, P] how many rows an own row is before the query
    behind = torch.arange(count - slots, count, device=device)[:, None] - torch.arange(count, device=device)
    hidden = behind < 0 if causal else torch.zeros_like(behind, dtype=torch.bool)
    # abs: without `causal` the window also limits rows after the query
    return hidden if window is None else hidden | (behind.abs() >= window)


HEADS = range(16, 513)
"""Head sizes for which FlexAttention has a kernel.

Triton's matrix products need sizes of at least 16. Above 512, the size in Gemma 4, no tiles were tried.
"""


def has_kernel(queries: Tensor) -> bool:
    """Whether FlexAttention has a kernel for these queries [..., E]: on a GPU, in at most fp32, E in HEADS."""
    return queries.is_cuda and queries.element_size() <= 4 and queries.shape[-1] in HEADS


# Attention over the context: returns its output [B, G, N, r, E] and the log-sum-exp of its scores [B, G, N, r]


def context_in_parts(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    context_mask: ContextMask,
    ahead: Sequence[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """With dense masks, one group of branches at a time."""
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
    """With FlexAttention, which skips blocks that no query sees. Compiled on a CUDA device."""
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
    """Kernel options with smaller tiles, if the default tiles exceed the GPU's shared memory; otherwise None.

    In bf16, heads of 512 need 256 KB in the forward pass, and heads of 256 need 112 KB in the backward pass.
    An H100 has 227 KB, an RTX 99 KB.
    """
    size = queries.shape[-1]
    if not queries.is_cuda or size <= 128:
        return None
    properties: Any = torch.cuda.get_device_properties(queries.device)  # torch's stubs lack the field
    if size <= 256 and properties.shared_memory_per_block_optin >= 160 * 2**10:
        return None
    side = 32 if size * queries.element_size() <= 512 else 16
    return {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1, "bwd_num_stages": 1} | {
        f"bwd_BLOCK_{name}": side for name in ("M1", "N1", "M2", "N2")
    }


@dataclass(frozen=True)
class Flex:
    """FlexAttention's two functions, flex_attention and create_block_mask."""

    attention: Any
    mask: Any


FORMS = 64
"""Largest number of compiled variants of one of these functions.

Batches and stages of all sizes need about ten; with and without gradients twice as many.
"""


def flex(compiled: bool) -> Flex:
    """FlexAttention's functions, compiled with fullgraph=True if `compiled`.

    torch must not fall back to uncompiled code, not even past the recompile limit: that code holds all scores at once,
    and there would be no warning.
    """
    functions = flex_functions(compiled)
    # Set at every call: the limit is per thread, and recomputation for a backward pass runs in autograd's thread.
    if compiled and torch._dynamo.config.recompile_limit < FORMS:
        # Of torch 2.11 to 2.13 only 2.13 accepts the limit as an argument of torch.compile.
        torch._dynamo.config.recompile_limit = FORMS
    return functions


@cache
def flex_functions(compiled: bool) -> Flex:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return Flex(flex_attention, create_block_mask)
    return Flex(torch.compile(flex_attention, fullgraph=True), torch.compile(create_block_mask, fullgraph=True))


class _ContextAttention(torch.autograd.Function):
    """Attention over the context with dense masks.

    Scores exist for one group of branches at a time and are recomputed in the backward pass.
    Memory therefore grows with the number of queries only.
    """

    @staticmethod
    def forward(ctx, queries, keys, values, parts, scale):
        mixed = torch.empty_like(queries)
        log_sum = queries.new_empty(queries.shape[:-1], dtype=torch.promote_types(queries.dtype, torch.float32))
        for part in parts:
            scores = scores_of(queries, keys, part, scale)  # [B, G, n r, R]
            # The clamps keep a query that sees no row, with scores of -inf only, free of NaN.
            largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
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
            # Softmax: the gradient of each weight minus the weighted mean of all. Log-sum-exp: gradient is the weights.
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
    """Scaled scores of a group's queries in at least fp32, minus infinity at hidden rows. [B, G, n r, R]"""
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
    """Attention of a single branch, as in decoding. Returns [1, 1, Q, H, E].

    The context is sliced to the rows before the origin, so only a window or `causal` needs a mask.
    """
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
    """Rows appended to past ones along `dim`, layer by layer."""
    if past is None:
        return new
    return tuple(
        KV(torch.cat([p.keys, n.keys], dim=dim), torch.cat([p.values, n.values], dim=dim))
        for p, n in zip(past, new, strict=True)
    )
