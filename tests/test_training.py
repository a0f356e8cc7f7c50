"""Tests of training: labels, depths, compaction, chunked losses, accumulation over ranks, resuming."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Watch, composed, make_drafter
from teaching import counting_batch
from wandb_reader import read_identities

from dloop_train.config import TYPED, LogConfig, PairConfig, SamplingConfig, build
from dloop_train.data.batches import TextBatch, micro_batches, packed, plan_epoch
from dloop_train.drafters.chain import ChainDrafter
from dloop_train.drafters.domino import Domino
from dloop_train.drafters.dspark import DSpark
from dloop_train.drafters.losses import WIDE, hits, over_rows, row_losses
from dloop_train.phases.train import finished
from dloop_train.runs import read_jsonl, write_atomic
from dloop_train.targets.head import TargetHead
from dloop_train.training.anchors import Origins, draw_depths, draw_origins, labels_of, run_lengths, supervised
from dloop_train.training.engine import forget_rows_after
from dloop_train.training.metrics import MetricLog, chosen_mode
from dloop_train.training.schedule import learning_rate
from dloop_train.training.unroll import Terms, Unroll
from dloop_train.types import Context


def batch_of(mask, tokens=None):
    mask = torch.tensor([mask], dtype=torch.bool)
    tokens = torch.arange(100, 100 + mask.shape[1])[None] if tokens is None else tokens
    return TextBatch(
        ("a",), tokens, mask, torch.zeros(1, mask.shape[1], 3), torch.arange(mask.shape[1])[None, :, None].double()
    )


def test_labels_are_the_tokens_after_the_anchor():
    batch = batch_of([0, 0, 1, 1, 1, 1, 1, 1])
    labels = labels_of(batch, torch.tensor([[2]]), 2, 2)  # stage 2 of origin 2: anchor 4, labels 5 and 6
    assert labels.tokens.tolist() == [[[105, 106]]]
    assert labels.teacher[..., 0].tolist() == [
        [[4.0, 5.0]]
    ]  # the target's state one position earlier predicts the label
    assert labels.mask.tolist() == [[[1.0, 1.0]]]


def test_supervision_ends_with_the_response():
    """A gap in the loss mask, or the end of the text, ends the supervision of an origin and all its later tokens.

    The mask is a cumulative product that starts at position origin + 1.
    """
    batch = batch_of([0, 1, 1, 1, 0, 1, 1, 1])
    assert supervised(batch, torch.tensor([[1]]), 1, 2).tolist() == [[[1, 1]]]
    assert supervised(batch, torch.tensor([[1]]), 2, 2).tolist() == [[[0, 0]]]
    assert supervised(batch, torch.tensor([[6]]), 1, 3).tolist() == [[[1, 0, 0]]]


def test_of_equal_logits_only_argmaxs_choice_is_a_hit():
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [5.0, 3.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    assert hits(logits, torch.tensor([1, 2, 1, 0])).tolist() == [True, False, False, True]


def test_depths_are_uniform_and_feasible():
    runs = np.full(60_000, 1000)
    noise = np.random.default_rng(0)
    depths = draw_depths(runs, 4, 3, noise.random(60_000), noise.random(60_000))
    shares = np.bincount(depths, minlength=5)[2:] / 60_000
    assert np.allclose(shares, 1 / 3, atol=0.01) and depths.min() == 2 and depths.max() == 4
    short = draw_depths(np.array([1, 4, 5, 9, 13]), 4, 3, np.full(5, 0.99), np.full(5, 0.99))
    assert short.tolist() == [1, 1, 2, 3, 4]  # the deepest stage that still has a supervised label
    assert draw_depths(runs, 4, 0, noise.random(60_000), noise.random(60_000)).max() == 1


def test_origins_are_response_tokens_and_keyed_by_sample():
    batch = batch_of([0, 0, 0, 1, 1, 1, 1, 0])
    origins = draw_origins(batch, 2, count=99, depth_exposure=1, seed=0, epoch=0)
    assert sorted(origins.position[0].tolist()) == [3, 4, 5]  # 6 has no supervised token after it
    assert run_lengths(batch.loss_mask[0].numpy()).tolist() == [0, 0, 4, 3, 2, 1, 0, 0]
    two = TextBatch(
        ("b", "a"), *(torch.cat([t, t]) for t in (batch.tokens, batch.loss_mask, batch.features, batch.last_hidden))
    )
    together = draw_origins(two, 2, count=2, depth_exposure=3, seed=0, epoch=0)
    alone = draw_origins(batch, 2, count=2, depth_exposure=3, seed=0, epoch=0)
    assert torch.equal(together.position[1], alone.position[0]) and torch.equal(together.depth[1], alone.depth[0])


@pytest.fixture
def unrolled(variant, taught_target):
    def make(**settings):
        return Unroll(make_drafter(variant, taught_target), Terms(3), **{"max_rows": 1000} | settings)

    drafter = make().drafter
    batch, k = counting_batch(taught_target, drafter.shape.feature_spec, count=4), drafter.k
    return make, batch, draw_origins(batch, k, count=9, depth_exposure=3, seed=0, epoch=0)


def loss_and_gradients(unroll, batch, origins):
    loss = unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in unroll.named_parameters() if parameter.grad is not None}


def same(a, b):
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-10)
    assert a[1].keys() == b[1].keys() and len(a[1]) > 5
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=1e-9, atol=1e-10)


def test_compaction_changes_no_loss(unrolled):
    make, batch, origins = unrolled
    assert origins.alive(4) < origins.alive(2)
    same(loss_and_gradients(make(), batch, origins), loss_and_gradients(make(compact=False), batch, origins))


def test_chunked_loss_is_full_loss(unrolled):
    make, batch, origins = unrolled
    same(loss_and_gradients(make(max_rows=3), batch, origins), loss_and_gradients(make(max_rows=10**6), batch, origins))


def test_gradient_flows_through_own_states_unless_detached(unrolled):
    make, batch, origins = unrolled
    through, cut = loss_and_gradients(make(), batch, origins), loss_and_gradients(make(detach=True), batch, origins)
    torch.testing.assert_close(through[0], cut[0])
    assert any(not torch.allclose(through[1][name], cut[1][name]) for name in through[1])


def chances(logits):
    """Softmax of a list of numbers, without torch."""
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    total = sum(powers)
    return [power / total for power in powers]


def plain_slot_loss(drafter, slot, final, base, confidence, label, teacher, inside, progress, taught):
    """Loss of one slot by the recipe of the drafter's family, from logits in lists of numbers.

    `label` is an index of the draft vocabulary, or None if the token is outside it.
    `inside` is the target's probability of all tokens of the draft vocabulary together.
    `taught` is False if the target's most likely token is outside the draft vocabulary.
    """
    said, meant = chances(final), chances(teacher)
    if isinstance(drafter, ChainDrafter):
        return -(0.8**slot) * sum(q * math.log(p) for p, q in zip(said, meant, strict=True)) * taught
    hard = 0.0 if label is None else -math.log(said[label])
    if isinstance(drafter, Domino):
        share = 0.8 * max(0.0, 1 - progress / 0.5)
        return math.exp(-slot / 7) * ((1 - share) * hard - share * math.log(chances(base)[label]))
    if isinstance(drafter, DSpark):
        apart = sum(abs(p - q) for p, q in zip(said, meant, strict=True))
        loss = (0.1 * hard + 0.9 * apart) * (taught and label is not None)
        if confidence is not None:
            trust, wanted = (
                1 / (1 + math.exp(-confidence)),
                sum(min(p, inside * q) for p, q in zip(said, meant, strict=True)),
            )
            loss -= wanted * math.log(trust) + (1 - wanted) * math.log(1 - trust)
        return math.exp(-slot / 4) * loss
    return math.exp(-slot / 4) * hard  # DFlash


def test_loss_equals_a_plain_recomputation(variant, taught_target, progress=0.1):
    """The loss is 1/2 of the first stages' weighted mean + 1/2 of the last stages', over all branches and slots.

    Slot weights restart in every stage, a gap in the response ends supervision, and the target's logits are bounded by
    its softcap.
    """
    drafter = make_drafter(variant, taught_target)
    if isinstance(drafter, Domino):
        drafter.base_share, drafter.base_until = 0.8, 0.5
    if isinstance(drafter, ChainDrafter):
        drafter.head.softcap = 3.0
    batch, k = counting_batch(taught_target, drafter.shape.feature_spec, count=2), drafter.k
    batch.loss_mask[1, 19] = False
    origins = draw_origins(batch, k, count=4, depth_exposure=2, seed=0, epoch=0)
    unroll = Unroll(drafter, Terms(2), max_rows=1000)
    loss = unroll(batch, origins, unroll.weights(batch, origins), progress).loss
    totals, weights, cap = [0.0, 0.0], [0.0, 0.0], drafter.head.softcap
    kept = None if drafter.kept_ids() is None else drafter.kept_ids().tolist()
    decay = (
        0.8
        if isinstance(drafter, ChainDrafter)
        else math.exp(-1 / 7)
        if isinstance(drafter, Domino)
        else math.exp(-1 / 4)
    )
    for row in range(2):
        tokens = batch.tokens[row].tolist() + [0] * 3 * k
        for origin, depth in zip(origins.position[row].tolist(), origins.depth[row].tolist(), strict=True):
            state = drafter.begin(
                Context(batch.tokens[row : row + 1, : origin + 1], batch.features[row : row + 1, :origin]),
                torch.tensor([[origin]]),
            )
            for number in range(1, depth + 1):
                anchor = origin + (number - 1) * k
                labels = tokens[anchor + 1 : anchor + 1 + k]
                stage = drafter.stage(
                    state,
                    torch.tensor([[tokens[anchor]]]),
                    lambda step, _, labels=labels: torch.tensor([[labels[step]]]),
                )
                state = stage.state
                if 1 < number < depth:
                    continue
                spoken = torch.tensor([[tokens[anchor]]]), torch.tensor([[labels]])
                final, trust = drafter.rescore(stage, *spoken)[0, 0], drafter.confidence(stage, *spoken)
                base = drafter.logits(stage.hidden[0, 0, stage.predicts])
                for slot in range(k):
                    reached = anchor + 1 + slot
                    if reached > 31 or not all(batch.loss_mask[row, origin + 1 : reached + 1].tolist()):
                        break
                    teacher = batch.last_hidden[row, reached - 1] @ taught_target.lm_head.weight.T
                    teacher = teacher if cap is None else cap * torch.tanh(teacher / cap)
                    place, taught, inside = labels[slot], True, 1.0
                    if kept is not None:
                        # Labels outside the draft vocabulary, and rows whose most likely token of the target is
                        # outside, carry no loss (except the confidence head's) but count in the denominator.
                        place, taught = (
                            (kept.index(labels[slot]) if labels[slot] in kept else None),
                            int(teacher.argmax()) in kept,
                        )
                        inside = sum(torch.softmax(teacher, -1)[kept].tolist())
                        teacher = teacher[kept]
                    confidence = None if trust is None else trust[0, 0, slot].item()
                    loss_here = plain_slot_loss(
                        drafter,
                        slot,
                        final[slot].tolist(),
                        base[slot].tolist(),
                        confidence,
                        place,
                        teacher.tolist(),
                        inside,
                        progress,
                        taught,
                    )
                    totals[number > 1] += loss_here
                    weights[number > 1] += decay**slot
    assert weights[1] > 0
    assert loss.item() == pytest.approx(
        sum(total / weight for total, weight in zip(totals, weights, strict=True)) / 2, rel=1e-9
    )


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("variant", ["dspark-vanilla", "dspark-rnn"])
def test_the_confidence_loss_shapes_the_rest_unless_detached(variant, detach, taught_target):
    drafter = make_drafter(variant, taught_target)
    drafter.settings = replace(drafter.settings, ce_weight=0.0, l1_weight=0.0, detach_confidence=detach)
    batch = counting_batch(taught_target, drafter.shape.feature_spec, count=2)
    _, gradients = loss_and_gradients(
        Unroll(drafter, Terms(1), max_rows=1000),
        batch,
        draw_origins(batch, drafter.k, count=4, depth_exposure=1, seed=0, epoch=0),
    )
    moved = {name.removeprefix("drafter.") for name, gradient in gradients.items() if gradient.abs().max() > 0}
    head = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    backbone = {
        name for name, _ in drafter.named_parameters() if not name.startswith(("markov_head", "confidence_head"))
    }
    # No gradient flows through the loss's own target, the acceptance probability. Of the Markov head, therefore, only
    # the embedding that the confidence head reads gets a gradient.
    assert moved == head if detach else moved == head | backbone | {"markov_head.markov_w1.weight"}


def test_dominos_base_share_falls_with_progress_and_ends(taught_target):
    """The weight of the base loss is base_share * (1 - progress / base_until), and never below zero.

    The loss is linear in this weight: it interpolates between the final loss and the base loss.
    """
    batch = counting_batch(taught_target, make_drafter("domino-shifted", taught_target).shape.feature_spec, count=2)

    def loss(share, until, progress):
        drafter = make_drafter("domino-shifted", taught_target)
        drafter.base_share, drafter.base_until = share, until
        origins = draw_origins(batch, drafter.k, count=4, depth_exposure=0, seed=0, epoch=0)
        unroll = Unroll(drafter, Terms(0), max_rows=1000)
        return unroll(batch, origins, unroll.weights(batch, origins), progress).loss.item()

    final, base = loss(0.0, 1.0, 0.0), loss(1.0, 1.0, 0.0)
    assert abs(final - base) > 1e-3
    for share, until, progress, expected in (
        (1.0, 1.0, 0.25, 0.75),
        (1.0, 1.0, 1.0, 0.0),
        (0.8, 0.5, 0.0, 0.8),
        (0.8, 0.5, 0.25, 0.4),
        (0.8, 0.5, 0.9, 0.0),
    ):
        assert loss(share, until, progress) == pytest.approx((1 - expected) * final + expected * base, rel=1e-12)


def test_the_loss_in_bf16_is_that_of_fp64_but_for_rounding(unrolled):
    """Parameters are in bf16 and buffers in fp32, as under DeepSpeed."""
    make, batch, origins = unrolled
    exact, _ = loss_and_gradients(make(), batch, origins)
    unroll = make()
    unroll.drafter.float()
    for parameter in unroll.drafter.parameters():
        parameter.data = parameter.data.bfloat16()
    head = unroll.drafter.head
    unroll.drafter.attach_head(
        TargetHead(
            head.embed_weight.bfloat16(),
            head.lm_head_weight.bfloat16(),
            embed_scale=head.embed_scale,
            softcap=head.softcap,
        )
    )
    rounded, gradients = loss_and_gradients(unroll, batch.to(batch.tokens.device, torch.bfloat16), origins)
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert all(gradient.dtype == torch.bfloat16 and gradient.isfinite().all() for gradient in gradients.values())


def test_a_batch_without_origins_is_zero_and_finite(unrolled):
    make, batch, origins = unrolled
    empty = Origins(origins.position, origins.depth * 0)
    loss, gradients = loss_and_gradients(make(), batch, empty)
    assert loss.item() == 0 and all(g.isfinite().all() for g in gradients.values())


def test_chunks_with_their_gradients_equal_one_pass():
    """Gradients of rows and of a trained head, computed chunk by chunk in the forward pass, equal plain autograd's."""
    tokens = torch.arange(6)
    results = []
    for chunk in (None, 6, 2, 4):
        weight = torch.linspace(-2, 1, 35, dtype=torch.float64).sin().view(7, 5).requires_grad_()
        hidden = torch.linspace(-1, 1, 30, dtype=torch.float64).view(6, 5).requires_grad_()

        def function(hidden, tokens, weight=weight):
            losses = torch.nn.functional.cross_entropy(hidden @ weight.T, tokens, reduction="none")
            return losses.sum(), losses.detach().sum()[None]

        total, _ = (
            function(hidden, tokens)
            if chunk is None
            else over_rows(function, (hidden, tokens), chunk, head_weights=(weight,))
        )
        (3 * total).backward()
        results.append((total, hidden.grad, weight.grad))
    for result in results[1:]:
        for value, plain in zip(result, results[0], strict=True):
            torch.testing.assert_close(value, plain)


@pytest.mark.parametrize(
    "mixture",
    [{"hard": 1.0}, {"soft": 1.0}, {"hard": 0.1, "variation": 1.8}, {"hard": 0.3, "soft": 0.5, "variation": 0.2}],
    ids=str,
)
def test_row_losses_and_their_gradient_equal_autograds(mixture):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(5, 11, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    tokens, scale = torch.tensor([0, 10, 3, 3, 7]), torch.arange(1.0, 6.0, dtype=torch.float64)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses, apart = row_losses(ours, tokens, teacher, **mixture)
    said, meant = plain.softmax(-1), teacher.softmax(-1)
    distance = 0.5 * (said - meant).abs().sum(-1)
    expected = (
        mixture.get("hard", 0) * -said.log()[torch.arange(5), tokens]
        - mixture.get("soft", 0) * (meant * said.log()).sum(-1)
        + mixture.get("variation", 0) * distance
    )
    torch.testing.assert_close(losses, expected)
    if "variation" in mixture:
        torch.testing.assert_close(apart, distance.detach())
    (losses * scale).sum().backward()
    (expected * scale).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize(
    "variant",
    [
        "dflash-shifted",
        "domino-shifted",
        "dspark-gated",
        "dspark-gemma4",
        "eagle3-reduced",
        "eagle3-gemma4",
        "mtp_assistant",
    ],
)
def test_logits_live_a_chunk_at_a_time(variant, taught_target):
    """A tensor of logits has at most loss_rows rows, and at most WIDE such tensors exist at once.

    This holds in forward and backward, and none is kept between them.
    """
    drafter, rows = make_drafter(variant, taught_target), 7
    batch = counting_batch(taught_target, drafter.shape.feature_spec, count=4)
    origins = draw_origins(batch, drafter.k, count=9, depth_exposure=3, seed=0, epoch=0)
    unroll = Unroll(drafter, Terms(3), max_rows=rows)
    widths = {drafter.shape.vocab_size, getattr(drafter.shape, "draft_vocab_size", drafter.shape.vocab_size)}
    heights = {size for tensor in (*drafter.parameters(), drafter.head.lm_head_weight) for size in tensor.shape}
    assert rows not in heights and drafter.shape.vocab_size not in drafter.norm.weight.shape
    with Watch(widths, heights) as watch:
        loss = unroll(batch, origins, unroll.weights(batch, origins), 0.0).loss
        assert watch.alive() == 0 and watch.rows == rows
        loss.backward()
    assert watch.rows == rows and 0 < watch.peak <= WIDE * rows * max(widths)


def uneven(batch, lengths):
    """The batch cut to these lengths and padded with zeros, which no loss may depend on."""
    inside = torch.arange(batch.tokens.shape[1]) < torch.tensor(lengths)[:, None]
    kept = inside[..., None]
    return TextBatch(
        batch.ids,
        batch.tokens * inside,
        batch.loss_mask & inside,
        batch.features * kept,
        batch.last_hidden * kept,
        lengths,
    )


def test_packed_equals_padded_equals_one_by_one(variant, taught_target):
    drafter = make_drafter(variant, taught_target)
    batch = uneven(counting_batch(taught_target, drafter.shape.feature_spec, count=4), (32, 9, 21, 26))
    alone = [
        TextBatch(
            (name,),
            *(
                rows[number : number + 1, :length]
                for rows in (batch.tokens, batch.loss_mask, batch.features, batch.last_hidden)
            ),
        )
        for number, (name, length) in enumerate(zip(batch.ids, batch.lengths, strict=True))
    ]

    def result(*batches):
        """Loss and gradients of micro-batches with a common normalisation."""
        unroll = Unroll(make_drafter(variant, taught_target), Terms(3), max_rows=1000)
        origins = [draw_origins(each, drafter.k, count=7, depth_exposure=3, seed=0, epoch=0) for each in batches]
        totals = sum(unroll.weights(*each) for each in zip(batches, origins, strict=True))
        loss = sum(unroll(*each, totals, 0.0).loss for each in zip(batches, origins, strict=True))
        loss.backward()
        return loss, {
            name: parameter.grad for name, parameter in unroll.named_parameters() if parameter.grad is not None
        }

    packed_batch = packed(batch)
    assert (
        packed_batch.tokens.shape == (1, 88) and packed_batch.tokens[0, 41:62].tolist() == batch.tokens[2, :21].tolist()
    )
    padded, together, apart = result(batch), result(packed_batch), result(*alone)
    same(padded, apart)
    same(together, apart)


def test_recomputing_stages_changes_no_digit(unrolled):
    make, batch, origins = unrolled
    kept, recomputed = (
        loss_and_gradients(make(), batch, origins),
        loss_and_gradients(make(recompute=True), batch, origins),
    )
    assert torch.equal(kept[0], recomputed[0])
    assert kept[1].keys() == recomputed[1].keys() and all(
        torch.equal(gradient, recomputed[1][name]) for name, gradient in kept[1].items()
    )


@pytest.mark.parametrize("variant", ["dflash-fill_in", "eagle3-reduced"])
def test_recomputing_keeps_less_of_a_stage(variant, taught_target):
    drafter, kept = make_drafter(variant, taught_target), []
    batch = counting_batch(taught_target, drafter.shape.feature_spec, count=4)
    origins = draw_origins(batch, drafter.k, count=9, depth_exposure=3, seed=0, epoch=0)
    for recompute in (False, True):
        unroll, saved = Unroll(drafter, Terms(3), max_rows=1000, recompute=recompute), {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.update({tensor.data_ptr(): tensor.numel()}) or tensor,
            lambda tensor: tensor,
        ):
            unroll(batch, origins, unroll.weights(batch, origins), 0.0)
        kept.append(sum(saved.values()))
    assert kept[1] < kept[0] / 2


def test_learning_rate_in_closed_form():
    rates = [learning_rate(step, 100, 1e-3, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4) and rates[9] == 1e-3 and max(rates) == 1e-3
    assert all(a >= b for a, b in itertools.pairwise(rates[9:])) and 0 < rates[-1] < 2e-6
    assert learning_rate(0, 1, 1e-3, 0.04) == 1e-3


def test_epoch_plan_is_complete_and_seeded():
    lengths = list(range(37, 0, -1))
    plan = plan_epoch(lengths, 4, 0, 0)
    assert sorted(i for step in plan for i in step) == list(range(37)) and len(plan) == 10
    assert plan == plan_epoch(lengths, 4, 0, 0) != plan_epoch(lengths, 4, 0, 1)
    assert micro_batches([1, 2, 3], 2) == [[1, 2], [3]]


def train(root: Path, *overrides: str, drafter: str = "dflash") -> list[dict]:
    """Run the command on the tiny target as a user does, and return the rows of metrics.jsonl."""
    environment = os.environ | {"DLOOP_ROOT": str(root), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "dloop_train",
        f"+drafter={drafter}",
        "+target=tiny_llama",
        "launch.threads=1",
        "wandb.mode=disabled",
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "train.validate_prompts=1",
        *overrides,
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    name = next((o.removeprefix("name=") for o in overrides if o.startswith("name=")), "dflash-tiny_llama")
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in open(root / "runs" / name / "metrics.jsonl")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return root, train(root, "phases=[generate,cache,train]", "train.steps=6", "name=whole")


def numbers(rows):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.slow
def test_resume_equals_uninterrupted(uninterrupted):
    """A training that continues from step 3 logs the losses of an uninterrupted one, to the last digit."""
    root, whole = uninterrupted
    # Checkpoints are written after steps 3 and 6. last.json is set back to 3, as if the run had been killed in step 5.
    train(root, "phases=[train]", "train.steps=6", "name=parts", "train.save_every=3")
    checkpoints = root / "runs" / "parts" / "checkpoints"
    (checkpoints / "last.json").write_text(json.dumps({"tag": "step-0000003", "step": 3, "world_size": 1}))
    (checkpoints / "done.json").unlink()
    again = train(root, "phases=[train]", "train.steps=6", "name=parts", "train.save_every=3")
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6]
    assert numbers(again) == numbers(whole)


def test_two_ranks_equal_one(uninterrupted):
    """Two gloo ranks with one micro-batch each give the losses of one rank that accumulates two."""
    root, whole = uninterrupted
    two = train(root, "phases=[train]", "train.steps=6", "name=two", "launch.processes=2")
    for a, b in zip(numbers(two), numbers(whole), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, large", [("domino", "drafter.emb_dim=512"), ("mtp_assistant", "drafter.hidden_size=32")]
)
def test_zero3_shares_out_the_heads_that_chunks_of_logits_gather(drafter, large, uninterrupted):
    """ZeRO-3 with partitioned heads gives the losses of one rank.

    Domino's head is large enough to be partitioned. The chunks are so small that the two ranks have different numbers
    of them, which must not lead to a deadlock, since every chunk gathers the head. The assistant's embedding is frozen.
    """
    root, _ = uninterrupted
    same = (
        "phases=[cache,train]",
        "train.steps=3",
        "train.loss_rows=3",
        large,
        *(["drafter.train_embedding=false"] if drafter == "mtp_assistant" else []),
    )
    one = train(root, *same, "name=one-" + drafter, drafter=drafter)
    two = train(root, *same, "name=zero3-" + drafter, "launch.processes=2", "deepspeed=zero3", drafter=drafter)
    for a, b in zip(numbers(two), numbers(one), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_base_epochs_are_the_base_recipe_and_loop_aware_steps_follow(uninterrupted):
    """The first steps equal those of a base run, to the last digit.

    The later steps have a loss of the last stage and a learning-rate schedule of their own.
    """
    root, _ = uninterrupted
    both = train(root, "phases=[train]", "train.steps=3", "train.base_epochs=0.5", "train.base_lr=1e-3", "name=both")
    base = train(root, "phases=[train]", "train.steps=3", "train.depth_exposure=0", "train.lr=1e-3", "name=base")
    assert numbers(both[:3]) == numbers(base) and len(both) == 6
    assert ["weighted_loss_last" in row for row in both] == [False] * 3 + [True] * 3
    assert [row["lr"] for row in both[3:]] == pytest.approx([learning_rate(step, 3, 6e-5, 0.04) for step in range(3)])


def test_a_resumed_log_holds_each_step_once(tmp_path):
    """Rows after the checkpoint are deleted, except the best checkpoint's validation.

    A training that starts again from step 0 keeps no row.
    """

    def steps(start, *new, best=None):
        log = MetricLog(tmp_path, LogConfig(mode="disabled"), name="x", config={}, start=start, best=best)
        for step in new:
            log.validation(step, {"tau": 1.0})
        return [row["step"] for row in read_jsonl(tmp_path / "validation.jsonl")]

    assert steps(0, 0, 3, 6) == [0, 3, 6]
    assert steps(3, 6) == [0, 3, 6]
    assert steps(3, best=6) == [0, 3, 6] == steps(3, 6, best=6) and steps(3, 4, best=6) == [0, 3, 4, 6]
    assert steps(0, 0, best=6) == [0]


def test_a_row_that_a_full_disk_has_cut_is_forgotten(tmp_path):
    """The incomplete last row is dropped whether or not its step is run again."""
    for start in (2, 3):
        for name in ("metrics.jsonl", "skipped.jsonl"):
            (tmp_path / name).write_text(
                "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "loss": "half of'
            )
        MetricLog(tmp_path, LogConfig(mode="disabled"), name="x", config={}, start=start)
        forget_rows_after(tmp_path / "skipped.jsonl", start)
        for name in ("metrics.jsonl", "skipped.jsonl"):
            assert [row["step"] for row in read_jsonl(tmp_path / name)] == list(range(1, start + 1))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    MetricLog(tmp_path, LogConfig(mode="disabled"), name="x", config={}, start=2)
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


W_AND_B, OTHER = "machine api.wandb.ai login user password k\n", "machine github.com login me password k\n"


@pytest.mark.parametrize(
    "netrc, environment, mode, says",
    [
        (None, {}, "offline", "neither WANDB_API_KEY nor"),
        (OTHER, {}, "offline", "has a key for api.wandb.ai"),
        (OTHER + W_AND_B, {}, "online", "with the key in"),
        (W_AND_B, {"WANDB_BASE_URL": "https://wandb.lab:8080"}, "offline", "has a key for wandb.lab:8080"),
        ("default login me password k\n", {}, "offline", "has a key"),
        (
            "machine wandb.lab:8080 login user password k\n",
            {"WANDB_BASE_URL": "https://wandb.lab:8080"},
            "online",
            "online to wandb.lab:8080",
        ),
        ("machine\n", {}, "offline", "cannot be read"),
        (OTHER, {"WANDB_API_KEY": "k"}, "online", "with WANDB_API_KEY"),
        (W_AND_B, {"WANDB_MODE": "disabled"}, "disabled", ""),
    ],
)
def test_wandb_logs_online_where_there_is_a_key_for_its_host(
    netrc, environment, mode, says, tmp_path, monkeypatch, capsys
):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if netrc is not None:
        (tmp_path / "netrc").write_text(netrc)
    assert chosen_mode(LogConfig(), "train") == mode and says in capsys.readouterr().err
    assert chosen_mode(LogConfig(mode="offline"), "train") == "offline"


def test_a_training_that_goes_on_goes_on_in_its_wandb_run_and_a_new_one_in_its_own(tmp_path, monkeypatch):
    """A new training needs a W&B run of its own, because W&B drops steps below a run's last one."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    for folder, start in (("a", 0), ("a", 3), ("a", 0), ("b", 0)):
        MetricLog(tmp_path / folder, LogConfig(mode="offline"), name="x", config={}, start=start).close()
        time.sleep(1)  # W&B names an offline log by the second of its start, and two must not share a name
    first, resumed, *others = read_identities(tmp_path / "a") + read_identities(tmp_path / "b")
    assert first == resumed and len(others) == 2
    for ids_or_groups in list(zip(first, *others, strict=True))[:2]:
        assert len(set(ids_or_groups)) == 3


def test_a_training_that_began_anew_is_not_over_because_another_was(tmp_path):
    """Deleting last.json to start again leaves done.json of the earlier training behind."""
    config = composed("+drafter=eagle3", "+target=smollm2_135m", f"root={tmp_path}")
    checkpoints = tmp_path / "runs" / "test" / "checkpoints"
    write_atomic(checkpoints / "done.json", json.dumps({"step": 6, "worse": None}))
    assert not finished(config)
    for step in (2, 6):
        write_atomic(checkpoints / "last.json", json.dumps({"tag": f"step-{step:07d}", "step": step, "world_size": 1}))
        assert finished(config) == (step == 6)


def test_changed_settings_are_refused(uninterrupted):
    root, _ = uninterrupted
    with pytest.raises(AssertionError, match="made with other settings"):
        train(root, "phases=[train]", "train.steps=7", "name=whole")


BAD = {
    "train": {
        "steps": -1,
        "epochs": 0,
        "base_epochs": -1,
        "warmup": 5,
        "clip": -1,
        "max_length": 0,
        "lr": math.inf,
        "beta2": 1,
        "validate_share": 1,
        "max_skipped_share": 0,
        "seed": -1,
    },
    "launch": {"processes": -2, "threads": -1},
    "generate": {"batch_size": 0, "greedy_prompts": -1},
    "cache": {"shard_bytes": 0},
    "evaluate": {"prompts": 0, "thresholds": [math.nan]},
    "target": {"mask_token_id": -2, "stop_ids": [-1], "taps": {"block": [-1]}},
    "target.sampling": {"top_p": 0, "top_k": 0},
}


def test_numbers_that_make_no_sense_are_refused():
    """All values of BAD are refused with the field's name, and every numeric field refuses -2 or 2."""
    for section, values in BAD.items():
        for name, value in values.items():
            with pytest.raises(ValueError, match=f"{section}.*{name}.*got"):
                build({**DEFAULTS.get(section, {}), name: value}, KINDS[section])
    for section, kind in KINDS.items():
        for one in fields(kind):
            if one.type in NUMBERS:
                tried = [[value] if "list" in str(one.type) else value for value in (-2, 2)]
                assert any(refused(kind, {**DEFAULTS.get(section, {}), one.name: value}) for value in tried), (
                    f"{section}.{one.name}"
                )


KINDS = {**TYPED, "target.sampling": SamplingConfig, "pair": PairConfig}
DEFAULTS = {"target": {"name": "a", "source": "hub", "path": "a", "stop_ids": [1]}}
NUMBERS = (int, float, float | None, list[int], list[float])


def refused(kind, values) -> bool:
    try:
        kind(**values)
    except ValueError:
        return True
    return False


def test_config_errors_name_the_field():
    for override, message in (
        ("++train.stpes=3", "stpes"),
        ("++train.lr=abc", "abc"),
        ("++drafter.width=1", "width must be"),
        ("++train.batch_size=0", "must be positive"),
        ("++deepspeed.stage=4", "deepspeed.stage"),
        ("++drafter.alignment=sideways", "alignment is required"),
    ):
        with pytest.raises(ValueError, match=message):
            composed("+drafter=dflash", "+target=tiny_llama", override)
