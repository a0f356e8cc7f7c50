"""Losses: sums over rows, in chunks, so that the logits of all rows never exist at once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dloop_train.ranks import max_over_ranks
from dloop_train.targets.head import most_likely
from dloop_train.types import Labels, StageLoss


class _GradientInForward(torch.autograd.Function):
    """The sum of a row loss over chunks, with gradients computed in the forward pass while a chunk's logits exist.

    No tensor with V columns is kept for the backward pass, and nothing is recomputed.
    Differentiable with respect to the rows and the trained head weights; the latter's gradients are summed in at least
    fp32.
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
                # Views, since module hooks such as a FLOP counter's fail on leaves here.
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
    """Sum of losses and sum of metrics of function(*rows), in chunks of `chunk` rows.

    `head_weights` are the parameters that the function uses, trained or not.
    If ZeRO-3 has partitioned them, each chunk gathers them, so all ranks run the same number of chunks: those with
    fewer rows run empty chunks at the end.
    Partitioned weights are complete inside the function only, so each chunk is recomputed in the backward pass.
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
    """Whether ZeRO-3 has partitioned a weight over the ranks. DeepSpeed sets ds_id on such weights."""
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
    """Weighted sum of a row loss over the supervised slots only. `hidden` is [B, N, k, D].

    function(hidden [R, D], tokens [R], teacher [R, D], weights [R], slots [R], *rows of extra [B, N, k, ...])
    -> (loss sum, metrics [2 k + 1]: correct by slot, counted by slot, unweighted loss).
    """
    weights = labels.mask * slot_weights.to(labels.mask)  # [B, N, k]
    slots = torch.arange(hidden.shape[2], device=hidden.device).expand(labels.mask.shape)
    picked = labels.mask > 0
    if not picked.any():  # one row of weight zero, so that every rank uses all parameters and has all metrics
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
    """Metrics of rows as one vector, to be summed over chunks: correct by slot, counted by slot, loss. [2 k + 1]"""
    counts = torch.bincount(slots, minlength=k).float()
    return torch.cat(
        [
            torch.bincount(slots, weights=correct.float(), minlength=k).float(),
            counts,
            losses.detach().float().sum()[None],
        ]
    )


def hits(logits: Tensor, tokens: Tensor, known: Tensor | None = None) -> Tensor:
    """Whether each token is the argmax of its row. `known` marks tokens that have a column. [R, V] and [R] -> [R] bool

    On a CPU argmax takes several times longer than the maximum, so it is computed only for rows whose token has the
    largest logit.
    """
    rows = logits.detach()
    largest = rows.gather(1, tokens[:, None])[:, 0] == rows.amax(-1)
    largest = largest if known is None else largest & known
    hit = largest.clone()
    hit[largest] = most_likely(rows[largest]) == tokens[largest]  # argmax is one of several equal logits
    return hit


class _RowLosses(torch.autograd.Function):
    """hard x cross-entropy + soft x cross-entropy with the teacher + variation x total variation, for each row.

    The gradient is computed in the forward pass, in the memory of the probabilities.
    At most WIDE tensors of [R, V] exist at once, the logits and the teacher's included.
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
            # d total variation / d logits = student x (sign - sum of sign x student) / 2
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
        # In place, since backward runs once.
        return ctx.saved_tensors[0].mul_(upstream[:, None]).to(ctx.dtype), None, None, None, None, None


WIDE = 6
"""Largest number of [rows, V] tensors in at least fp32 that a row loss holds at once, forward or backward."""


def row_losses(
    logits: Tensor,
    tokens: Tensor,
    teacher: Tensor | None = None,
    *,
    hard: float = 0.0,
    soft: float = 0.0,
    variation: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of hard cross-entropy, soft cross-entropy and total variation, and total variation by itself.

    Soft cross-entropy and total variation compare with the teacher's distribution. Total variation is half the L1
    distance: the probability that rejection sampling rejects. The second result is zero if `variation` is zero.
    Logits [R, V], tokens [R], teacher [R, V] -> [R] twice, in at least fp32. Can be differentiated once.
    """
    return _RowLosses.apply(logits, tokens, teacher, hard, soft, variation)


def only(losses: Tensor, rows: Tensor | None) -> Tensor:
    """Losses [R] of these rows (bool [R], None: all). The losses of all others are zero and have no gradient."""
    return losses if rows is None else losses.masked_fill(~rows, 0.0)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot product of each row, without an elementwise product of size [R, V] in memory. [R, V] twice -> [R]"""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]
