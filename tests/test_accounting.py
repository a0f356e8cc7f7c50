"""Laws of the accounting: its products are those of a real step, its memory what a real step holds, its expectations the mean of many draws."""

import pytest
import torch
from conftest import make_drafter
from teaching import counting_batch
from torch.utils.flop_counter import FlopCounterMode

from dloop_train.training.accounting import counts_of, forward_backward
from dloop_train.training.anchors import draw_origins
from dloop_train.training.unroll import Terms, Unroll


@pytest.mark.parametrize("terms", [Terms(0), Terms(3), Terms(2, "all")], ids=str)
def test_products_are_those_of_a_real_step(variant, terms, tiny_target):
    """To the last FLOP; an assistant's last pass feeds back what nobody reads, and its first is fed what has no gradient."""
    drafter = make_drafter(variant, tiny_target)
    batch = counting_batch(tiny_target, drafter.shape.reads, count=3)
    origins = draw_origins(batch, drafter.k, count=9, depth_exposure=terms.depth_exposure, seed=0, epoch=0)
    unroll = Unroll(drafter, terms, max_rows=7)
    work = forward_backward(drafter, counts_of(batch, origins, terms, drafter.k))
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        unroll(batch, origins, unroll.weights(batch, origins), 0.0)
    with FlopCounterMode(display=False) as both:
        unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss.backward()
    assert sum(part.forward for part in work.values()) == forward.get_total_flops()
    assert sum(part.total for part in work.values()) == pytest.approx(both.get_total_flops(), rel=0.01 if variant.startswith("mtp_assistant") else 0)
