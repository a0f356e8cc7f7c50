"""Tests of the accounting: FLOPs and memory match real steps, expected counts the mean of many draws."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from math import comb

import pytest
import torch
from conftest import VARIANTS, make_drafter, shape_of, tiny_config
from teaching import counting_batch
from torch._subclasses import FakeTensor
from train_step import arguments, main, make_bench, measure, ways_of
from trainers import Samples, on_ranks, trainer
from watching import Watching

from dloop_train.config import DeepSpeedConfig
from dloop_train.data.batches import TextBatch
from dloop_train.targets.sources import load_target
from dloop_train.training import engine
from dloop_train.training.accounting import (
    Again,
    counts_of,
    expected_counts,
    forward_backward,
    mean_logit_passes,
    mean_stages,
    most_of,
    state_terms,
    states_of,
    step_cost,
)
from dloop_train.training.anchors import draw_origins
from dloop_train.training.unroll import Terms, Unroll

ONE_OF_EACH = ("dflash-sliding", "domino-shifted", "dspark-vanilla", "eagle3-reduced", "mtp", "mtp_assistant")


def counted(variant, target, terms, *, recompute=False):
    """FLOPs of a step as (forward, forward and backward), by the accounting and as measured in a real step."""
    drafter = make_drafter(variant, target)
    batch = counting_batch(target, drafter.shape.feature_spec, count=2)
    origins = draw_origins(batch, drafter.k, count=6, depth_exposure=terms.depth_exposure, seed=0, epoch=0)
    unroll = Unroll(drafter, terms, max_rows=7, recompute=recompute)
    totals = unroll.weights(batch, origins)
    work = forward_backward(drafter, counts_of(drafter, batch, origins, terms), Again(stages=recompute)).values()
    with Watching() as forward, torch.no_grad():
        unroll(batch, origins, totals, 0.0)
    with Watching() as both:
        unroll(batch, origins, totals, 0.0).loss.backward()
    return (sum(part.forward for part in work), sum(part.total for part in work)), (forward.flops, both.flops)


@pytest.mark.parametrize(
    "variant, terms",
    [
        pytest.param(
            variant,
            terms,
            marks=[] if variant in ONE_OF_EACH and terms == Terms(3) else pytest.mark.slow,
            id=f"{variant}-{terms}",
        )
        for variant in sorted(VARIANTS)
        for terms in (Terms(0), Terms(3), Terms(2, "all"))
    ],
)
def test_products_are_those_of_a_real_step(variant, terms, tiny_target):
    """The FLOPs are exactly equal, except for an assistant.

    The state that its last pass feeds back is not read, and the input of its first pass has no gradient.
    """
    accounted, seen = counted(variant, tiny_target, terms)
    assert accounted[0] == seen[0]
    assert accounted[1] == pytest.approx(seen[1], rel=0.015 if variant.startswith("mtp_assistant") else 0)


@pytest.mark.parametrize("variant", ["dflash-shifted", pytest.param("eagle3-deepspec", marks=pytest.mark.slow)])
def test_stages_computed_again_cost_their_forward(variant, tiny_target):
    """The FLOPs agree approximately, because recomputation of a stage stops at the last tensor that is needed."""
    accounted, seen = counted(variant, tiny_target, Terms(3), recompute=True)
    assert (
        accounted[1] == pytest.approx(seen[1], rel=0.03)
        and seen[1] > 1.1 * counted(variant, tiny_target, Terms(3))[1][1]
    )


@pytest.mark.parametrize(
    "family, precision",
    [
        pytest.param(family, precision, marks=[] if (family, precision) == ("eagle3", "float32") else pytest.mark.slow)
        for family in ("dflash", "domino", "dspark", "eagle3", "mtp", "mtp_assistant")
        for precision in ("float32", "bfloat16")
    ],
)
def test_memory_is_what_a_real_step_holds(family, precision):
    """At SmolLM2's size the accounted memory is within a quarter of the measured.

    This holds for the peak, and for what an unrolled step adds to the memory in use between two steps.
    """
    wide = ["drafter.width=8"] if family in ("dflash", "domino", "dspark") else ["drafter.tokens_per_stage=7"]
    wanted = arguments(
        [
            "--sequences",
            "1",
            "--length",
            "128",
            "--origins",
            "32",
            "--loss-rows",
            "64",
            "--precision",
            precision,
            "--set",
            *wide,
        ]
    )
    bench = make_bench(family, wanted)
    ways = [way for way in ways_of(bench)[0] if way.cost]
    measure(ways, 0, bench.batch.tokens.device, precision)
    for way in ways:
        assert 0.8 < way.cost.peak / way.peak < 1.25, way.name
    added = sum(
        term.held
        for term in way.cost.terms
        if term.name not in ("target features", "target's embedding and head", "weights", "optimiser")
    )
    assert 0.8 < added / (way.peak - bench.held()) < 1.25


def test_expected_counts_are_the_mean_of_many_draws(tiny_target):
    """The responses are so long that all origins have room for every stage."""
    drafter, terms = make_drafter("dflash-shifted", tiny_target), Terms(3)
    long = TextBatch(
        ("a", "b"),
        torch.zeros(2, 400, dtype=torch.long),
        torch.ones(2, 400, dtype=torch.bool),
        torch.zeros(2, 400, 1),
        torch.zeros(2, 400, 1),
    )
    drawn = [
        counts_of(drafter, long, draw_origins(long, drafter.k, count=12, depth_exposure=3, seed=0, epoch=epoch), terms)
        for epoch in range(200)
    ]
    expected = expected_counts(drafter, terms, sequences=2, length=400, origins=12)
    for field in ("branches", "rows", "looks"):
        mean = torch.tensor([getattr(one, field) for one in drawn]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(getattr(expected, field)), rtol=0.08, atol=0)


def test_origins_by_the_thousand_are_counted():
    """The expected largest of several binomial draws equals exact arithmetic; of one draw it is the mean."""

    def exactly(sequences, origins, third=Fraction(1, 3)):
        below, most = Fraction(0), Fraction(0)
        for count in range(origins):
            below += comb(origins, count) * third**count * (1 - third) ** (origins - count)
            most += 1 - below**sequences
        return float(most)

    assert [most_of(sequences, 40, 1 / 3) for sequences in (1, 4)] == pytest.approx(
        [exactly(1, 40), exactly(4, 40)], rel=1e-12
    )
    assert (
        most_of(1, 4096, 1 / 3) == pytest.approx(4096 / 3)
        and 4096 / 3 < most_of(4, 4096, 1 / 3) < 4096 / 3 + 3 * (4096 * 2 / 9) ** 0.5
    )
    assert (most_of(3, 4096, 0.0), most_of(3, 4096, 1.0)) == (0, 4096)


def test_passes_of_the_loss_placements():
    assert (
        mean_logit_passes(Terms(3, "last")) == 1
        and mean_logit_passes(Terms(3, "all")) == mean_stages(Terms(3, "all")) == 3
    )
    assert [(mean_stages(Terms(n)), mean_logit_passes(Terms(n))) for n in (0, 1, 3)] == [(1, 1), (2, 2), (3, 2)]


def test_zero_shares_out_what_its_stage_says():
    """Bytes per parameter while a graph exists: 2 of weight, 4 + 8 of master weight and moments, and 4 of gradient.

    Gradients count where DeepSpeed's optimiser has a buffer for them.
    """

    def held(stage, precision="bfloat16", offload=False):
        states = states_of(
            1000, 1000, precision=precision, deepspeed=DeepSpeedConfig(stage, offload), ranks=4, micro_batches=1
        )
        return states.weights + states.optimiser + states.gradients

    assert [held(stage) for stage in range(4)] == [14_000, 9_000, 6_000, 4_500]
    assert [held(stage, "float32") for stage in range(4)] == [12_000, 7_000, 7_000, 5_000]
    assert held(2, offload=True) == 3_000


def all_tensors():
    """All CPU tensors of this process. While the list is kept, their addresses are not used again."""
    gc.collect()
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor) and each.device.type == "cpu"
    ]


def storages(tensors):
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def states_held(root, cases):
    """For each case, peak bytes of a step on this rank: by the accounting, and as measured in its engine."""
    engine.BUCKET = 200_000  # a quarter of the drafter
    target, found = load_target(tiny_config(), dtype="float32", device="cpu"), []
    shape = shape_of("dflash-shifted", target)
    # Many weights and few rows, so that most of the memory is that of weights, gradients and optimiser.
    shape = replace(shape, layers=tuple(replace(layer, intermediate_size=4096) for layer in shape.layers))
    for number, (stage, precision, micro_batches) in enumerate(cases):
        source = Samples(target, shape.feature_spec)
        aside = all_tensors()
        training = trainer(
            root / str(number),
            stage,
            precision=precision,
            shape=shape,
            source=source,
            batch_size=2 * micro_batches,
            origins=1,
            depth_exposure=0,
            save_every=99,
        )
        for group in training.engine.basic_optimizer.param_groups:
            group["foreach"] = True  # as on an accelerator
        with ThreadPoolExecutor(1) as ahead:
            prepared = training.prepare(ahead.submit(training.load, 0))
            training.run_step(prepared, training.sum_totals(prepared))
            prepared = training.prepare(ahead.submit(training.load, 1))
        text, origins, agreed = prepared.texts[0], prepared.origins[0], training.sum_totals(prepared)
        aside += [
            *training.drafter.head.buffers(),
            *(training.twin.parameters() if training.twin else ()),
            *(tensor for batch in prepared.batches for tensor in (batch.features, batch.last_hidden)),
        ]
        known = storages(aside)
        between = [size for storage, size in storages(all_tensors()).items() if storage not in known]
        with Watching() as watched:
            training.run_step(prepared, agreed)
        drafter = make_drafter("dflash-shifted", target, shape=shape)
        counts = counts_of(drafter, replace(text, features=torch.zeros(*text.tokens.shape, 1)), origins, Terms(0))
        cost = step_cost(
            drafter,
            target.spec,
            counts,
            training.settings,
            DeepSpeedConfig(stage),
            ranks=2,
            micro_batches=micro_batches,
        )
        accounted = cost.peak - sum(term.held for term in cost.terms if term.name.startswith("target"))
        found.append((accounted, sum(between) + watched.peak))
    return found


ENGINES = [
    (stage, precision, micro_batches)
    for stage in range(4)
    for precision in ("float32", "bfloat16")
    for micro_batches in (1, 2)
]


@pytest.mark.parametrize(
    "cases", [[(1, "bfloat16", 2)], pytest.param(ENGINES, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_weights_gradients_and_optimiser_are_what_the_engine_holds(cases, tmp_path):
    """The accounted bytes are within a twelfth of the measured ones on every rank.

    Weights, gradients and optimiser are most of a step's memory here: the drafter is large and the batch small.
    """
    for ranks in on_ranks(2, states_held, tmp_path, cases):
        for case, (accounted, held) in zip(cases, ranks, strict=True):
            assert accounted == pytest.approx(held, rel=1 / 12), case


def test_one_rank_sends_nothing_and_a_later_stage_sends_more(tiny_target):
    drafter = make_drafter("dflash-shifted", tiny_target)
    sent = [
        sum(
            term.moved
            for term in state_terms(drafter, "bfloat16", DeepSpeedConfig(stage), ranks, 4, graph=0.0)
            if term.name != "optimiser"
        )
        for stage, ranks in ((0, 1), (1, 4), (2, 4), (3, 4))
    ]
    assert sent[0] == 0 < sent[1] < sent[2] < sent[3]


@pytest.mark.parametrize(
    "families", ["dspark,eagle3", pytest.param("dflash,domino,mtp,mtp_assistant", marks=pytest.mark.slow)]
)
def test_the_benchmark_runs_and_its_plain_reference_has_the_same_loss(families, capsys):
    main(
        [
            "--target",
            "tiny_llama",
            "--drafter",
            families,
            "--length",
            "40",
            "--sequences",
            "2",
            "--origins",
            "4",
            "--steps",
            "1",
            "--terms",
            "--pack",
            "--recompute",
        ]
    )
    printed = capsys.readouterr().out
    assert all(printed.count(f"  {way} N=3") == len(families.split(",")) for way in ("plain", "packed", "recompute"))
    assert "quotient" in printed and "attention to context" in printed
