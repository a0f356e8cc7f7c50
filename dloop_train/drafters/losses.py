"""Losses: sums over rows of logits that are never all held at once. Each family mixes its own from these."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dloop_train.ranks import most_over_ranks
from dloop_train.types import Labels, StageLoss


class _GradientInForward(torch.autograd.Function):
    """Sum of a row loss whose only differentiable input is `hidden`: each chunk's gradient is taken while its logits exist."""

    @staticmethod
    def forward(ctx, function, hidden, chunk, chunks, *others):
        total, metrics, gradients = None, None, []
        for start in range(0, chunks * chunk, chunk):
            part = hidden[start:start + chunk].detach().requires_grad_()
            with torch.enable_grad():
                loss, measured = function(part, *(other[start:start + chunk] for other in others))
                gradients.append(torch.autograd.grad(loss, part)[0])
            total = loss.detach() if total is None else total + loss.detach()
            metrics = measured if metrics is None else metrics + measured
        ctx.save_for_backward(torch.cat(gradients))
        ctx.mark_non_differentiable(metrics)
        return total, metrics

    @staticmethod
    def backward(ctx, upstream, _):
        return None, (ctx.saved_tensors[0].to(upstream.dtype) * upstream).to(ctx.saved_tensors[0].dtype), *[None] * (len(ctx.needs_input_grad) - 2)


def over_rows(function: Callable, hidden: Tensor, others: tuple[Tensor, ...], chunk: int, *, frozen: bool) -> tuple[Tensor, Tensor]:
    """(sum of losses, sum of metrics) of function(hidden rows, *other rows) in chunks of rows.

    `frozen` says that the function has no trainable parameter of its own: then nothing is recomputed in the backward pass.
    Otherwise each chunk is checkpointed. All ranks run as many chunks, empty ones at the end: under ZeRO-3 each of them may gather weights.
    """
    chunks = most_over_ranks(max(-(-len(hidden) // chunk), 1))
    if frozen and torch.is_grad_enabled() and hidden.requires_grad:
        return _GradientInForward.apply(function, hidden, chunk, chunks, *others)
    total, metrics = None, None
    for start in range(0, chunks * chunk, chunk):
        rows = [tensor[start:start + chunk] for tensor in (hidden, *others)]
        loss, measured = checkpoint(function, *rows, use_reentrant=False) if torch.is_grad_enabled() else function(*rows)
        total = loss if total is None else total + loss
        metrics = measured if metrics is None else metrics + measured
    return total, metrics


def stage_loss(function: Callable, hidden: Tensor, labels: Labels, slot_weights: Tensor, *, max_rows: int, frozen: bool,
               extra: tuple[Tensor, ...] = ()) -> StageLoss:
    """A weighted sum over the supervised slots alone; `hidden` is [B, N, k, D].

    function(hidden [R, D], tokens [R], teacher [R, D], weights [R], slots [R], *rows of extra [B, N, k, ...]) -> (loss sum,
    [2 k + 1] metrics: correct by slot, counted by slot, plain loss).
    """
    weights = labels.mask * slot_weights.to(labels.mask)  # [B, N, k]
    slots = torch.arange(hidden.shape[2], device=hidden.device).expand(labels.mask.shape)
    picked = labels.mask > 0
    if not picked.any():  # one row of weight zero: every rank runs every parameter and reports every metric
        picked[0, 0, 0] = True
    rows = (labels.tokens[picked], labels.teacher[picked], weights[picked], slots[picked], *(more[picked] for more in extra))
    total, metrics = over_rows(function, hidden[picked], rows, max_rows, frozen=frozen)
    k = hidden.shape[2]
    if not (labels.mask > 0).any():
        metrics = metrics * 0
    return StageLoss(total, weights.sum(), {"accuracy": (metrics[:k], metrics[k:2 * k]), "loss": (metrics[2 * k], metrics[k:2 * k].sum())})


def by_slot(correct: Tensor, slots: Tensor, k: int, losses: Tensor) -> Tensor:
    """Metrics of rows as one vector that adds up over chunks. [2 k + 1]"""
    counts = torch.bincount(slots, minlength=k).float()
    return torch.cat([torch.bincount(slots, weights=correct.float(), minlength=k).float(), counts, losses.detach().float().sum()[None]])


def hits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Whether each token is the one that argmax picks. [R, V] and [R] -> [R] bool

    A CPU takes several times longer for argmax than for the maximum, so that only rows that may be hits pay for it.
    """
    rows = logits.detach()
    largest = rows.gather(1, tokens[:, None])[:, 0] == rows.amax(-1)
    hit = largest.clone()
    hit[largest] = rows[largest].argmax(-1) == tokens[largest]  # of equal logits only one is picked
    return hit


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Hard-label cross-entropy in at least fp32. [R, V] and [R] -> [R]"""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens, reduction="none")


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy against the teacher's distribution (EAGLE-3's loss). Two [R, V] logits -> [R]"""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return -(torch.softmax(teacher.to(precise), dim=-1) * F.log_softmax(logits.to(precise), dim=-1)).sum(-1)


def total_variation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Half the L1 distance of the two distributions: how often rejection sampling would refuse. Two [R, V] logits -> [R]"""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return 0.5 * (torch.softmax(logits.to(precise), dim=-1) - torch.softmax(teacher.to(precise), dim=-1)).abs().sum(-1)
