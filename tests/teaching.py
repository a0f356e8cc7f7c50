"""Trains tiny drafters briefly on texts of the taught target, with the project's own Unroll."""

import torch
from conftest import make_drafter

from dloop_train.data.batches import TextBatch
from dloop_train.training.anchors import draw_origins
from dloop_train.training.unroll import Terms, Unroll

COUNTING = 70  # the taught target counts in ids 70..95


def counting_prompts(count, length=6):
    generator = torch.Generator().manual_seed(5)
    start, jump = (
        torch.randint(0, 26, (count, 1), generator=generator),
        torch.randint(1, 3, (count, 1), generator=generator),
    )
    return COUNTING + (start + jump * torch.arange(length)) % 26


def counting_batch(target, feature_spec, count=12, length=32):
    tokens = counting_prompts(count, length)
    output = target.read(tokens, feature_spec=feature_spec)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :4] = False
    return TextBatch(tuple(map(str, range(count))), tokens, mask, output.features.clone(), output.last_hidden.clone())


def taught_drafter(variant, target):
    """A drafter in float64 of which the taught target accepts some drafts.

    An assistant needs more steps, because it attends only to the target's keys and values.
    """
    steps = 150 if variant.startswith("mtp_assistant") else 60
    drafter = make_drafter(variant, target)
    unroll, batch = Unroll(drafter, Terms(2), max_rows=1000), counting_batch(target, drafter.shape.feature_spec)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for step in range(steps):
        origins = draw_origins(batch, drafter.k, count=8, depth_exposure=2, seed=0, epoch=step)
        loss = unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return drafter.eval()
