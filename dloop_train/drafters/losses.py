"""Losses: sums over rows of logits that are never all held at once. Each family mixes its own from these."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dloop_train.ranks import max_over_ranks
from dloop_train.targets.head import most_likely
from dloop_train.types import Labels, StageLoss


class _GradientInForward(torch.autograd.Function):
    """Sums of a row loss over chunks, whose gradients are taken while the logits of a chunk exist: nothing of V columns survives, nothing is recomputed.

    Differentiable are the rows and the trained weights of the head; the latter's gradient is added up in at least fp32.
    """

    @staticmethod
    def forward(ctx, function, chunk, chunks, num_rows, *tensors):
        rows, weights = tensors[:num_rows], tensors[num_rows:]
        wanted = ctx.needs_input_grad[4 : 4 + num_rows]
        learned = [
            weight for weight, needed in zip(weights, ctx.needs_input_grad[4 + num_rows :], strict=True) if needed
        ]
        sums = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in learned]
        total, metrics, pieces = None, None, []
        for start in range(0, chunks * chunk, chunk):
            part = [
                row[start : start + chunk].detach().requires_grad_(needed)
                for row, needed in zip(rows, wanted, strict=True)
            ]
            with torch.enable_grad():
                # as views: hooks on modules, such as a FLOP counter's, cannot take leaves here
                loss, measured = function(*(row.view_as(row) for row in part))
            asked = [row for row, needed in zip(part, wanted, strict=True) if needed]
            gradients = torch.autograd.grad(loss, [*asked, *learned], allow_unused=True, materialize_grads=True)
            pieces.append(gradients[: len(asked)])
            for added, gradient in zip(sums, gradients[len(asked) :], strict=True):
                added += gradient
            total = loss.detach() if total is None else total + loss.detach()
            metrics = measured if metrics is None else metrics + measured
        ctx.save_for_backward(
            *(torch.cat(parts) for parts in zip(*pieces, strict=True)),
            *(added.to(weight.dtype) for added, weight in zip(sums, learned, strict=True)),
        )
        ctx.mark_non_differentiable(metrics)
        return total, metrics

    @staticmethod
    def backward(ctx, upstream, _):
        scaled = iter([(gradient * upstream).to(gradient.dtype) for gradient in ctx.saved_tensors])
        return None, None, None, None, *(next(scaled) if needed else None for needed in ctx.needs_input_grad[4:])


def over_rows(
    function: Callable, rows: tuple[Tensor, ...], chunk: int, *, head_weights: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor]:
    """(sum of losses, sum of metrics) of function(*rows) in chunks of rows; `head_weights` are the parameters that the function reads, trained or not.

    Where ZeRO-3 has divided the head's weights each chunk gathers them, so that all ranks run as many, empty ones at the end.
    There the weights are whole inside the function alone: trained ones are recomputed chunk by chunk in the backward pass.
    """
    chunks = max(-(-len(rows[0]) // chunk), 1)
    if any(divided(weight) for weight in head_weights):
        chunks = max_over_ranks(chunks)
    trained = [tensor for tensor in (*rows, *head_weights) if tensor.requires_grad]
    if torch.is_grad_enabled() and trained and not any(divided(tensor) for tensor in trained):
        return _GradientInForward.apply(function, chunk, chunks, len(rows), *rows, *head_weights)
    total, metrics = None, None
    for start in range(0, chunks * chunk, chunk):
        part = [tensor[start : start + chunk] for tensor in rows]
        loss, measured = (
            checkpoint(function, *part, use_reentrant=False) if torch.is_grad_enabled() else function(*part)
        )
        total = loss if total is None else total + loss
        metrics = measured if metrics is None else metrics + measured
    return total, metrics


def divided(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has divided a weight over the ranks, which DeepSpeed notes on it."""
    return hasattr(tensor, "ds_id")


def stage_loss(
    function: Callable,
    hidden: Tensor,
    labels: Labels,
    slot_weights: Tensor,
    *,
    max_rows: int,
    head_weights: tuple[Tensor, ...] = (),
    extra: tuple[Tensor, ...] = (),
) -> StageLoss:
    """A weighted sum over the supervised slots alone; `hidden` is [B, N, k, D].

    function(hidden [R, D], tokens [R], teacher [R, D], weights [R], slots [R], *rows of extra [B, N, k, ...]) -> (loss sum,
    [2 k + 1] metrics: correct by slot, counted by slot, plain loss).
    """
    weights = labels.mask * slot_weights.to(labels.mask)  # [B, N, k]
    slots = torch.arange(hidden.shape[2], device=hidden.device).expand(labels.mask.shape)
    picked = labels.mask > 0
    if not picked.any():  # one row of weight zero: every rank runs every parameter and reports every metric
        picked[0, 0, 0] = True
    rows = (hidden, labels.tokens, labels.teacher, weights, slots, *extra)
    total, metrics = over_rows(function, tuple(each[picked] for each in rows), max_rows, head_weights=head_weights)
    k = hidden.shape[2]
    if not (labels.mask > 0).any():
        metrics = metrics * 0
    return StageLoss(
        total,
        weights.sum(),
        {"accuracy": (metrics[:k], metrics[k : 2 * k]), "loss": (metrics[2 * k], metrics[k : 2 * k].sum())},
    )


def by_slot(correct: Tensor, slots: Tensor, k: int, losses: Tensor) -> Tensor:
    """Metrics of rows as one vector that adds up over chunks. [2 k + 1]"""
    counts = torch.bincount(slots, minlength=k).float()
    return torch.cat(
        [
            torch.bincount(slots, weights=correct.float(), minlength=k).float(),
            counts,
            losses.detach().float().sum()[None],
        ]
    )


def hits(logits: Tensor, tokens: Tensor, known: Tensor | None = None) -> Tensor:
    """Whether each token is the one that argmax picks; `known` says which tokens have a column. [R, V] and [R] -> [R] bool

    A CPU takes several times longer for argmax than for the maximum, so that only rows that may be hits pay for it.
    """
    rows = logits.detach()
    largest = rows.gather(1, tokens[:, None])[:, 0] == rows.amax(-1)
    largest = largest if known is None else largest & known
    hit = largest.clone()
    hit[largest] = most_likely(rows[largest]) == tokens[largest]  # of equal logits only one is picked
    return hit


class _RowLosses(torch.autograd.Function):
    """hard x cross-entropy + soft x cross-entropy against the teacher + variation x total variation, in one pass over the rows.

    The gradient is made in the forward, in place of the probabilities: with the logits and the teacher's, at most WIDE
    tensors of [R, V] are alive.
    """

    @staticmethod
    def forward(ctx, logits, tokens, teacher, hard, soft, variation):
        precise = torch.promote_types(logits.dtype, torch.float32)
        student = torch.log_softmax(logits, dim=-1, dtype=precise)
        teacher_probability = None if teacher is None else torch.softmax(teacher, dim=-1, dtype=precise)
        losses, distance = student.new_zeros(len(student)), student.new_zeros(len(student))
        if hard:
            losses -= hard * student.gather(1, tokens[:, None])[:, 0]
        if soft:
            losses -= soft * dot(student, teacher_probability)
        student.exp_()
        if variation:
            sign = (student - teacher_probability).sign_()
            ours = dot(sign, student)
            distance = (ours - dot(sign, teacher_probability)) / 2
            losses += variation * distance
            gradient = sign.sub_(ours[:, None]).mul_(variation / 2).add_(hard + soft).mul_(student)
        else:
            gradient = student.mul_(hard + soft)
        if soft:
            gradient.sub_(teacher_probability, alpha=soft)
        if hard:
            gradient.scatter_add_(1, tokens[:, None], gradient.new_full((len(gradient), 1), -hard))
        ctx.dtype = logits.dtype
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(distance)
        return losses, distance

    @staticmethod
    def backward(ctx, upstream, _):
        # in place: it is asked for once
        return ctx.saved_tensors[0].mul_(upstream[:, None]).to(ctx.dtype), None, None, None, None, None


WIDE = 6
"""Tensors of [rows, V] in at least fp32 that a row loss holds at once, forward or backward: at most."""


def row_losses(
    logits: Tensor,
    tokens: Tensor,
    teacher: Tensor | None = None,
    *,
    hard: float = 0.0,
    soft: float = 0.0,
    variation: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """A mixture of hard cross-entropy, soft cross-entropy against the teacher's distribution and total variation; and the latter by itself.

    Total variation is half the L1 distance of the two distributions: how often rejection sampling would refuse. [R, V], [R],
    [R, V] -> [R] twice, in at least fp32; to be differentiated once.
    """
    return _RowLosses.apply(logits, tokens, teacher, hard, soft, variation)


def only(losses: Tensor, rows: Tensor | None) -> Tensor:
    """Losses [R] of these rows (bool [R], None: all); the others' are zero, with no gradient."""
    return losses if rows is None else losses.masked_fill(~rows, 0.0)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row, without a product of their size. [R, V] twice -> [R]"""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]
