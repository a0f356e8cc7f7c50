"""Tests of multi-rank training: ZeRO stages agree, non-finite steps are skipped, resume is exact."""

import contextlib
import itertools
import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import shape_of, tiny_config
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import LENGTHS, Died, Samples, nothing, on_ranks, optimiser_of, trainer, weights_of

from dloop_train.config import TrainConfig
from dloop_train.data.batches import micro_batches
from dloop_train.phases.train import require_division
from dloop_train.ranks import peak_memory
from dloop_train.runs import read_jsonl
from dloop_train.targets.sources import load_target
from dloop_train.training import engine
from dloop_train.training.engine import TIMED, StepTotals, Throughput, Trainer, TrainState, Validation, too_many_skipped
from dloop_train.training.plan import Plan
from dloop_train.training.saves import Best, Checkpoints, best_of, checkpoint_bytes, last_of

STAGES = (0, 1, 2, 3)


def rows_of(folder):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_jsonl(folder / "metrics.jsonl")]


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def all_of(root, cases):
    return [function(root / str(number), *arguments) for number, (function, *arguments) in enumerate(cases)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs function(folder, *arguments) on two ranks; gives its folder and the value returned on each rank.

    The quick cases run in one start of the processes.
    """
    held = {}

    def found(*case):
        if case not in held:
            root, cases = tmp_path_factory.mktemp("ranks"), QUICK if case in QUICK else (case,)
            ranks = on_ranks(2, all_of, root, cases)
            held.update(
                {
                    one: (root / str(number), [returned[number] for returned in ranks])
                    for number, one in enumerate(cases)
                }
            )
        return held[case]

    return found


# Steps that are not finite


def skipping(root, precision, stages):
    """Train with a sample 5 that makes losses NaN. By stage: which steps changed a tensor, the state, the samples."""
    found = {}
    for stage in stages:
        training = trainer(root / str(stage), stage, poisoned=5, precision=precision)
        seen = []

        def look(step, drafter, training=training, seen=seen):
            seen.append(
                [drafter.state_dict()[name].clone() for name in sorted(drafter.state_dict())] + optimiser_of(training)
            )
            return nothing(step, drafter)

        training.train(look)
        changed = [
            any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))
            for one, two in itertools.pairwise(seen[1:])
        ]
        found[stage] = changed, training.train_state, [training.plan.samples(step) for step in range(6)]
    return found


@pytest.mark.parametrize(
    "precision, stages",
    [
        ("float32", (0, 3)),
        pytest.param("float32", (1, 2), marks=pytest.mark.slow),
        pytest.param("bfloat16", STAGES, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(precision, stages, start):
    """At every ZeRO stage: one rank has the sample, both ranks skip the step and continue with the next one."""
    folder, ranks = start(skipping, precision, stages)
    for found in ranks:
        for stage, (changed, train_state, samples) in found.items():
            bad = [5 in indices for indices in samples]
            assert sum(bad) == train_state.skipped == 2 and not bad[0], stage
            assert changed == [not skipped for skipped in bad[1:]], stage
            rows = read_jsonl(folder / str(stage) / "skipped.jsonl")
            assert [row["step"] - 1 for row in rows] == [step for step in range(6) if bad[step]]
            assert [row["step"] - 1 for row in read_jsonl(folder / str(stage) / "metrics.jsonl")] == [
                step for step in range(6) if not bad[step]
            ]
            assert all(
                [micro["samples"] for micro in row["micro_batches"] if not micro["finite"]] == [["sample-5"]]
                for row in rows
            )


def too_often(root):
    try:
        trainer(root, 1, poisoned=5, max_skipped=0).train()
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_too_many_skipped_steps_stop_the_run_and_keep_the_checkpoint(tmp_path):
    for said in on_ranks(2, too_often, tmp_path):
        assert "train.max_skipped allows 0" in said and str(tmp_path / "skipped.jsonl") in said
    bad = read_jsonl(tmp_path / "skipped.jsonl")[-1]["step"]
    assert last_of(tmp_path / "checkpoints").step == (bad - 1) // 2 * 2 > 0


def skipped_until(bad, steps=1000, **settings):
    """Step and message with which a training stops if the steps with `bad(step)` are skipped; None if it does not."""
    train_state = TrainState()
    for step in range(1, steps + 1):
        train_state = TrainState(
            step, train_state.skipped + bad(step), train_state.skipped_in_a_row + 1 if bad(step) else 0
        )
        if bad(step) and (said := too_many_skipped(train_state, TrainConfig(**settings))):
            return step, said
    return None


def test_how_many_steps_may_be_skipped():
    """train.max_skipped limits steps in a row; train.max_skipped_share limits all steps, above max_skipped of them."""
    assert (
        skipped_until(lambda step: step > 100)[0] == 111
        and skipped_until(lambda step: step > 100, max_skipped=3)[0] == 104
    )
    step, said = skipped_until(lambda step: step % 2 == 0)
    assert step == 22 and said.startswith("11 of 22 steps") and "train.max_skipped_share=0.1" in said
    assert (
        skipped_until(lambda step: step % 11 == 0) is None
        and skipped_until(lambda step: step % 2 == 0, max_skipped_share=0.5) is None
    )


# ZeRO stages and ranks


def many_stages(root, kinds, settings):
    """By kind: rows of the log, weights, and the number of elements passed to collectives for gradients."""
    found = {}
    for kind in kinds:
        counted = []
        with counting_numbers(counted):
            weights = run(root / kind, **kind_of(kind), **settings)[0]
        found[kind] = rows_of(root / kind), weights, sum(counted)
    return found


@contextlib.contextmanager
def counting_numbers(counted):
    """Append the number of elements of each reduction over ranks to `counted`; 0 for the small sums of the log."""
    names = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
    kept = {name: getattr(torch.distributed, name) for name in names if hasattr(torch.distributed, name)}

    def counting(function, number):
        def call(*arguments, **named):
            tensors = [value for value in (*arguments, *named.values()) if torch.is_tensor(value)]
            counted.append(
                max(tensor.numel() for tensor in tensors) if max(tensor.numel() for tensor in tensors) > 100 else 0
            )
            return function(*arguments, **named)

        return call

    try:
        for name, function in kept.items():
            setattr(torch.distributed, name, counting(function, name))
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.distributed, name, function)


@pytest.mark.slow
def test_stages_ranks_and_micro_batches_agree(tmp_path):
    """In fp32 the loss curve and weights are equal at every ZeRO stage, on 1, 2 and 3 ranks, with 1 or 4 micro-batches.

    On three ranks, four micro-batches are not divisible, and some ranks run an empty one.
    """
    kinds = ("0", "1", "2", "3")
    runs = {}
    for ranks, micro in ((1, 4), (1, 1), (2, 1), (3, 1)):
        runs |= {
            (ranks, micro, kind): found
            for kind, found in on_ranks(
                ranks, many_stages, tmp_path / f"{ranks}-{micro}", kinds, {"micro_batch_size": micro}
            )[0].items()
        }
    reference_rows, reference, _ = runs[1, 4, "0"]
    for name, (rows, weights, _) in runs.items():
        for one, two in zip(rows, reference_rows, strict=True):
            assert one == pytest.approx(two, rel=1e-5), name
        for key, weight in weights.items():
            torch.testing.assert_close(
                weight,
                reference[key],
                rtol=1e-4,
                atol=1e-6,
                msg=lambda text, name=name, key=key: f"{name}, {key}: {text}",
            )


@pytest.mark.slow
def test_stages_agree_within_the_noise_of_bf16(tmp_path):
    kinds = ("0-bf16", "1-bf16", "2-bf16", "3-bf16", "1")
    runs = on_ranks(2, many_stages, tmp_path, kinds, {})[0]
    for kind in kinds:
        for (_, loss, norm), (_, wanted, wanted_norm) in zip(runs[kind][0], runs["1"][0], strict=True):
            assert loss == pytest.approx(wanted, rel=2e-3) and norm == pytest.approx(wanted_norm, rel=0.05), kind


@pytest.mark.slow
def test_gradients_are_reduced_once_a_step_where_zero_allows(tmp_path):
    """ZeRO stages 0 and 1 reduce as many elements with two micro-batches per rank as with one.

    Stage 2 divides gradients over ranks, and therefore reduces them for every micro-batch.
    """
    kinds, numbers = ("0", "1", "0-bf16", "1-bf16", "2"), {}
    for micro in (2, 1):  # four sequences on two ranks: one micro-batch per rank, or two
        numbers[micro] = {
            kind: found[2]
            for kind, found in on_ranks(2, many_stages, tmp_path / str(micro), kinds, {"micro_batch_size": micro})[
                0
            ].items()
        }
    assert all(numbers[1][kind] == numbers[2][kind] > 0 for kind in ("0", "1", "0-bf16", "1-bf16")), numbers
    assert numbers[1]["2"] == 2 * numbers[2]["2"]


def bucket_sizes(root, kinds):
    """The same trainings with ZeRO's usual bucket size and with one that is smaller than most parameters."""
    usual, found = engine.BUCKET, {}
    for kind, size in itertools.product(kinds, (usual, 500)):
        engine.BUCKET = size
        found[kind, size == usual] = run(root / f"{kind}-{size}", **kind_of(kind))[0], rows_of(root / f"{kind}-{size}")
    engine.BUCKET = usual
    return found


@pytest.mark.slow
def test_the_size_of_the_bucket_changes_no_number(tmp_path):
    kinds = ("1", "2", "3", "1-bf16", "2-bf16", "3-bf16")
    found = on_ranks(2, bucket_sizes, tmp_path, kinds)[0]
    for kind in kinds:
        (weights, rows), (weights_small, rows_small) = found[kind, True], found[kind, False]
        assert equal(weights, weights_small) and [row[:2] for row in rows] == [row[:2] for row in rows_small], kind


# Memory on the device, and waiting between ranks


class Counting(Samples):
    """A source of new tensors; `alive` is the number of earlier ones still in memory at each request."""

    def __init__(self, target):
        super().__init__(target, shape_of("dflash-shifted", target).feature_spec)
        self.handed_out, self.alive = [], []

    def ready(self, batch, device, dtype):
        self.alive.append(sum(not storage.expired() for storage in self.handed_out))
        made = replace(batch, features=batch.features.clone(), last_hidden=batch.last_hidden.clone())
        self.handed_out += [
            StorageWeakRef(made.features.untyped_storage()),
            StorageWeakRef(made.last_hidden.untyped_storage()),
        ]
        return made


def one_at_a_time(root, stages):
    """Four micro-batches per step and rank; how many earlier features are in memory when the next are requested."""
    found = {}
    for stage, pack in itertools.product(stages, (False, True)):
        source = Counting(load_target(tiny_config(), dtype="float32", device="cpu"))
        trainer(root / f"{stage}-{pack}", stage, source=source, batch_size=8, pack=pack, steps=3).train()
        found[stage, pack] = source.alive
    return found


@pytest.mark.parametrize("stages", [(1,), pytest.param((0, 2, 3), marks=pytest.mark.slow)])
def test_features_of_one_micro_batch_lie_on_the_device_at_a_time(stages, start):
    """This includes the first micro-batch of the next step."""
    _, ranks = start(one_at_a_time, stages)
    for found in ranks:
        assert all(alive == [0] * 12 for alive in found.values()), found


class Collectives(TorchDispatchMode):
    """Counts collective operations."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += function.namespace == "c10d"
        return function(*arguments, **(keywords or {}))


def waiting_for_each_other(root):
    """Number of collective operations in each forward pass at ZeRO stages 1 and 3, and the log rows.

    The loss is computed in chunks of three rows, and ranks have different numbers of chunks. Domino's head is
    large enough for ZeRO-3 to divide it over the ranks.
    """
    shape, found = (
        replace(shape_of("domino-shifted", load_target(tiny_config(), dtype="float32", device="cpu")), emb_dim=512),
        {},
    )
    for stage in (1, 3):
        training, seen = (
            trainer(root / str(stage), stage, variant="domino-shifted", shape=shape, loss_rows=3, steps=2),
            [],
        )
        unroll = training.engine.module
        forward = unroll.forward

        def counted(*arguments, forward=forward, seen=seen):
            with Collectives() as collectives:
                result = forward(*arguments)
            seen.append(collectives.count)
            return result

        unroll.forward = counted
        training.train()
        found[stage] = seen, rows_of(root / str(stage))
    return found


def test_ranks_wait_for_each_other_in_a_forward_only_where_weights_are_divided(start):
    """With divided weights (ZeRO-3) no rank waits for ever either, though ranks have different numbers of chunks."""
    _, ranks = start(waiting_for_each_other)
    for found in ranks:
        (seen, rows), (divided, rows_divided) = found[1], found[3]
        assert len(seen) == 4 and not any(seen) and all(divided), found
        for one, two in zip(rows, rows_divided, strict=True):
            assert one == pytest.approx(two, rel=1e-4)


# Resume


@dataclass
class DieAt:
    """A validation that raises Died at a step. It is a class because nested functions cannot be pickled."""

    step: int

    def __call__(self, step, drafter):
        if step == self.step:
            raise Died
        return nothing(step, drafter)


def run(folder, stage, validate=nothing, **settings):
    """Run a training. Returns weights, train()'s return value and the optimiser's tensors, or None if it died."""
    training = trainer(folder, stage, **settings)
    try:
        over = training.train(validate)
    except Died:
        return None
    return weights_of(training), over, optimiser_of(training)


def going_on(root, kinds):
    """By kind: the results of run() for an uninterrupted training and for one that died at step 5 and was resumed."""
    found = {}
    for kind in kinds:
        whole = run(root / f"whole-{kind}", **kind_of(kind))
        parts = root / f"parts-{kind}"
        assert run(parts, validate=DieAt(5), **kind_of(kind)) is None
        found[kind] = whole, run(parts, **kind_of(kind))
    return found


def kind_of(kind):
    stage, *more = kind.split("-")
    return {"stage": int(stage), "offload": "offload" in more, "precision": "bfloat16" if "bf16" in more else "float32"}


@pytest.mark.parametrize(
    "kinds",
    [
        ("1",),
        pytest.param(("0", "2", "3", "0-bf16", "1-bf16", "2-bf16", "3-bf16"), marks=pytest.mark.slow),
        pytest.param(
            ("1-offload", "2-offload", "3-offload", "2-offload-bf16", "3-offload-bf16"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_training_that_died_goes_on_as_if_it_had_not(kinds, start):
    """On two ranks, in the middle of an epoch: weights, optimiser and log are equal to the last bit."""
    folder, ranks = start(going_on, kinds)
    for found in ranks:
        for kind, ((weights, over, optimiser), (again, over_again, optimiser_again)) in found.items():
            assert over and over_again and equal(weights, again), kind
            assert all(torch.equal(a, b) for a, b in zip(optimiser, optimiser_again, strict=True)), kind
            assert (
                rows_of(folder / f"whole-{kind}") == rows_of(folder / f"parts-{kind}")
                and len(rows_of(folder / f"parts-{kind}")) == 6
            )
            assert sorted(path.name for path in (folder / f"parts-{kind}" / "checkpoints").glob("step-*")) == [
                "step-0000004",
                "step-0000006",
            ]


def each(root, stages, validate, precision):
    return {stage: run(root / str(stage), stage, validate, precision=precision) for stage in stages}


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after, precision, close",
    [(2, 1, "float32", (1e-5, 1e-7)), (1, 2, "float32", (1e-5, 1e-7)), (2, 1, "bfloat16", (1e-2, 1e-3))],
)
def test_other_ranks_go_on_with_the_same_training(before, after, precision, close, tmp_path):
    """A resume on another number of ranks gives the weights of an uninterrupted training, up to rounding.

    ZeRO's checkpoints are converted to the universal form; those of stage 0 are read directly.
    """
    whole = on_ranks(after, each, tmp_path / "whole", STAGES, nothing, precision)[0]
    on_ranks(before, each, tmp_path / "parts", STAGES, DieAt(5), precision)
    again = on_ranks(after, each, tmp_path / "parts", STAGES, nothing, precision)[0]
    for stage in STAGES:
        for name, weight in whole[stage][0].items():
            torch.testing.assert_close(
                again[stage][0][name],
                weight,
                rtol=close[0],
                atol=close[1],
                msg=lambda text, stage=stage, name=name: f"stage {stage}, {name}: {text}",
            )
        assert not list((tmp_path / "parts" / str(stage)).rglob("*.universal*"))


# Stopping, validating, keeping the best


class Scores:
    """Validations with given scores that request a stop at step `stop_at`; `seen` has the whole weights by step."""

    def __init__(self, scores, stop_at=None, folder=None):
        self.scores, self.stop_at, self.folder, self.seen = list(scores), stop_at, folder, {}

    def __call__(self, step, drafter):
        self.seen[step] = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
        if step == self.stop_at:
            (self.folder / "stop").touch()
        return Validation({"score": self.scores[step]}, self.scores[step])


def validating(root, stages):
    return {stage: best_then_worse(root / str(stage), stage) for stage in stages}


def best_then_worse(folder, stage):
    """A training with the best score at step 2, in two parts.

    A stop is requested at step 3 and takes effect after step 4; the resumed training ends at step 5 by patience.
    """
    scores, settings = (1.0, 2.0, 3.0, 2.9, 2.8, 2.7, 9.0), {"patience": 3, "save_every": 100}
    first = Scores(scores, stop_at=3, folder=folder)
    stopped = run(folder, stage, first, **settings)[1]
    steps = last_of(folder / "checkpoints").step
    second = Scores(scores)
    weights, over, _ = run(folder, stage, second, **settings)
    return stopped, steps, over, first.seen, second.seen, weights


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2), marks=pytest.mark.slow)])
def test_a_stop_saves_and_patience_ends_a_training(stages, start):
    """The best weights are saved undivided at every ZeRO stage; the count of worse validations survives the stop."""
    folder, ranks = start(validating, stages)
    for rank, found in enumerate(ranks):
        for stage, (stopped, steps, over, before, after, weights) in found.items():
            assert (stopped, steps, over) == (False, 4, True), stage
            assert (list(before), list(after)) == ([0, 1, 2, 3, 4], [5]), stage
            assert equal(after[5], ranks[0][stage][4][5]) and (rank or equal(after[5], weights)), stage
            checkpoints = folder / str(stage) / "checkpoints"
            assert equal(load_file(checkpoints / "best" / "weights.safetensors"), before[2]), stage
            assert json.loads((checkpoints / "best" / "best.json").read_text()) == {"step": 2, "score": 3.0}
            assert not (folder / str(stage) / "stop").exists() and last_of(checkpoints).step == 5


class DieAfter(Scores):
    """Scores of a training that dies in the validation of step `stop_at`."""

    def __call__(self, step, drafter):
        if step == self.stop_at:
            raise Died
        return super().__call__(step, drafter)


def thrown_back(root):
    """A training with the best score at step 3 that dies in the validation of step 4, and an uninterrupted one.

    At its death only the checkpoint of step 2 exists, which is older than the best weights.
    """
    scores, settings = (1.0, 2.0, 2.5, 3.0, 2.9, 2.8, 2.7), {"patience": 2}
    assert run(root / "parts", 0, DieAfter(scores, stop_at=4), **settings) is None
    after_kill = last_of(root / "parts" / "checkpoints").step, best_of(root / "parts" / "checkpoints").step
    found = {}
    for name in ("parts", "whole"):
        weights, over, _ = run(root / name, 0, Scores(scores), **settings)
        found[name] = (
            weights,
            over,
            last_of(root / name / "checkpoints").step,
            best_of(root / name / "checkpoints"),
            read_jsonl(root / name / "validation.jsonl"),
        )
    return after_kill, found


def test_a_training_that_is_thrown_back_behind_its_best_weights_keeps_what_was_said_of_them(start):
    _, ranks = start(thrown_back)
    after_kill, found = ranks[0]
    (weights, *parts), (whole_weights, *whole) = found["parts"], found["whole"]
    assert after_kill == (2, 3) and equal(weights, whole_weights) and parts == whole
    _, last, _, rows = parts
    assert last == 5 and [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]


class Slow(Scores):
    """Validations that report a duration of 0.2 s, about four steps."""

    def __call__(self, step, drafter):
        return replace(super().__call__(step, drafter), seconds=0.2)


def by_share(root):
    """A training whose validations may take half of the time, stopped after its second validation and resumed."""
    settings = {"validate_every": 0, "validate_share": 0.5, "steps": 60, "save_every": 100, "batch_size": 2}
    training, first = trainer(root, 0, **settings), Slow([1.0] * 61)

    def stopping(step, drafter):
        if step:
            (root / "stop").touch()
        return first(step, drafter)

    training.train(stopping)
    again, second = trainer(root, 0, **settings), Slow([1.0] * 61)
    again.train(second)
    return [one.train_state.validate_every for one in (training, again)], training.step, [*first.seen, *second.seen]


def test_validations_keep_to_their_share_of_the_time_at_steps_that_a_resumed_training_keeps(start):
    """The interval is chosen once, for all ranks, after the first steps have been timed; a resume keeps it."""
    (every, same), stopped, steps = start(by_share)[1][0]
    assert start(by_share)[1][1][0] == [every, same] == [every] * 2 and every >= 1 and stopped >= TIMED
    assert steps == [0, *(step for step in range(TIMED, 60) if step % every == 0), 60]


def test_rows_say_what_a_step_did_and_cost(start):
    """Rates are summed over both ranks: times the seconds per step they give the step's tokens and origins."""
    folder, _ = start(going_on, ("1",))
    plan = Plan(tuple(LENGTHS), TrainConfig(batch_size=4))
    for row in read_jsonl(folder / "whole-1" / "metrics.jsonl"):
        samples = plan.samples(row["step"] - 1)
        assert row["tokens_per_second"] * row["seconds_per_step"] == pytest.approx(
            sum(LENGTHS[sample] for sample in samples)
        )
        assert row["origins_per_second"] * row["seconds_per_step"] == pytest.approx(3 * len(samples))
        assert 0 <= row["wait_share"] < 1 and 0.05 < row["memory_gb"] < 50


def test_rates_are_those_of_the_steps_since_the_last_row():
    window = Throughput(time.perf_counter() - 10)
    for wait in (0.5, 1.5):
        window.add(StepTotals(torch.ones(2), tokens=100.0, origins=40.0, stop=False), wait)
    row = window.row()
    assert {name: row[name] for name in row if name != "memory_gb"} == pytest.approx(
        {"tokens_per_second": 20, "origins_per_second": 8, "seconds_per_step": 5, "wait_share": 0.2}, rel=0.01
    )
    assert row["memory_gb"] == pytest.approx(peak_memory() / 1e9, rel=0.01)


def test_a_training_that_only_lost_says_so(tmp_path, capsys):
    for best, says in ((Best(0, 90.0), "no checkpoint is predicted to be faster"), (Best(4, 110.0), ""), (None, "")):
        done = SimpleNamespace(
            run_folder=tmp_path,
            best=best,
            train_state=TrainState(6),
            out_of_patience=False,
            step=6,
            plan=SimpleNamespace(steps=6),
        )
        assert Trainer.end(done)
        said = capsys.readouterr().err
        assert says in said if says else not said
    assert not says


def test_another_stage_is_refused_by_name(tmp_path):
    """DeepSpeed cannot read checkpoints of another ZeRO stage or offload setting.

    A folder from before these settings were recorded (None) is accepted.
    """
    two, offloaded = {"stage": 2, "offload": False}, {"stage": 2, "offload": True}
    for found, wanted in ((two, {"stage": 3, "offload": False}), (two, offloaded), (offloaded, two)):
        with pytest.raises(
            ValueError,
            match=f"was trained with deepspeed=zero2 deepspeed.offload={str(found['offload']).lower()}, "
            f"this run has deepspeed=zero{wanted['stage']}",
        ):
            require_division(found, wanted, tmp_path)
    require_division(two, dict(two), tmp_path)
    require_division(None, two, tmp_path)


QUICK = (
    (thrown_back,),
    (skipping, "float32", (0, 3)),
    (going_on, ("1",)),
    (validating, (3,)),
    (by_share,),
    (one_at_a_time, (1,)),
    (waiting_for_each_other,),
)


# Division of a step over ranks


def test_every_rank_gets_its_share_and_a_step_is_the_same_on_any_number_of_them():
    plan = Plan(tuple(LENGTHS), TrainConfig(batch_size=4, micro_batch_size=1))
    for step, ranks in itertools.product(range(plan.steps_per_epoch), (1, 2, 3, 4, 5, 7)):
        shares = plan.shares(step, ranks)
        assert len(shares) == ranks and all(len(share) == plan.micro_batches(ranks) for share in shares)
        assert sorted(index for share in shares for micro in share for index in micro) == sorted(plan.samples(step))
    assert sorted(index for step in range(plan.steps_per_epoch) for index in plan.samples(step)) == list(
        range(len(LENGTHS))
    )


def idle_share(shares, lengths):
    """Share of the ranks' time spent waiting for the slowest in every micro-batch, and the largest excess of tokens."""
    tokens = np.array([[sum(lengths[index] for index in micro) for micro in share] for share in shares])
    return 1 - tokens.sum() / (len(shares) * tokens.max(0).sum()), tokens.sum(1).max() / tokens.sum(1).mean() - 1


def test_ranks_have_as_many_tokens():
    """8 ranks wait less than with micro-batches dealt out in turn, and have nearly equal numbers of tokens.

    The lengths are typical of chats: log-normal, cut at 4096.
    """
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.6, 0.9, 20_000), 4096).astype(int).tolist()
    plan = Plan(tuple(lengths), TrainConfig(batch_size=128, micro_batch_size=2))
    found = {"dealt": [], "shared": []}
    for step in range(plan.steps_per_epoch):
        micros = micro_batches(plan.samples(step), 2)
        found["dealt"].append(
            idle_share([[*micros[rank::8], *[[]] * (8 - len(micros[rank::8]))][:8] for rank in range(8)], lengths)
        )
        found["shared"].append(idle_share(plan.shares(step, 8), lengths))
    (dealt_idle, dealt_apart), (idle, apart) = (np.mean(found[name], axis=0) for name in ("dealt", "shared"))
    assert idle <= dealt_idle and apart < dealt_apart / 4 and apart < 0.002, (dealt_idle, dealt_apart, idle, apart)


# Errors while saving


class Writes:
    """An engine that writes a file as DeepSpeed's does, or raises an error that has nothing to do with files."""

    def __init__(self, size=0, error=None):
        self.size, self.error = size, error

    def save_checkpoint(self, folder, *, tag, **_):
        if self.error:
            raise self.error
        (Path(folder) / tag).mkdir(exist_ok=True)
        torch.save({"a": torch.zeros(self.size)}, Path(folder) / tag / "state.pt")


@contextlib.contextmanager
def files_of_at_most(size):
    """Limit the size of any file that this process writes, so that each writer fails in its own way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("engine, width", [(Writes(100_000), 2), (Writes(100), 200)], ids=["torch", "safetensors"])
def test_a_file_that_cannot_be_written_is_told_as_such(engine, width, tmp_path):
    with (
        files_of_at_most(50_000),
        pytest.raises(OSError, match=r"(?s)the checkpoint of step 4 could not be written to .*; make room") as told,
    ):
        Checkpoints(tmp_path, 2).save(engine, torch.nn.Linear(width, width), 4, {})
    assert isinstance(told.value.__cause__, RuntimeError if width == 2 else SafetensorError)
    assert last_of(tmp_path) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ],
)
def test_what_is_no_file_s_fault_is_not_told_as_one(error, tmp_path, monkeypatch):
    """Errors from DeepSpeed's save, from our barrier and gathering, and from gathering the best weights."""

    def fail(*_):
        raise error

    saves, drafter = Checkpoints(tmp_path, 2), torch.nn.Linear(2, 2)
    with pytest.raises(type(error)) as found:
        saves.save(Writes(error=error), drafter, 4, {})
    assert found.value is error
    for name in ("barrier", "whole_weights"):
        with monkeypatch.context() as patched, pytest.raises(type(error)) as found:
            patched.setattr(f"dloop_train.training.saves.{name}", fail)
            saves.save(Writes(), drafter, 4, {})
        assert found.value is error
    monkeypatch.setattr("dloop_train.training.saves.whole_weights", fail)
    with pytest.raises(type(error)) as found:
        saves.mark_best(drafter, Best(4, 1.0))
    assert found.value is error


# A full disk


def saving(folder, more):
    """Save at step 2, then leave `more` bytes above the estimated size of the checkpoint of step 4 free; then rerun."""
    folder.mkdir()
    filler, training = folder / "filler", trainer(folder, 1, save_every=2, keep=1)

    def fill(step, drafter):
        if step == 3:
            room = os.statvfs(folder)
            filler.write_bytes(bytes(room.f_bavail * room.f_frsize - checkpoint_bytes(training.drafter) - more))
        return nothing(step, drafter)

    try:
        training.train(fill)
    except OSError as error:
        said = str(error)
    filler.unlink()
    weights, over, _ = run(folder, 1, save_every=2, keep=1)
    return said, over, weights


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB; the test is skipped if this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("more, says", [(-20_000, "a checkpoint needs"), (6_000, "could not be written")])
def test_a_full_disk_keeps_the_last_checkpoint_and_the_rerun_goes_on(more, says, small_disk, tmp_path):
    """The lack of space is noticed before the save or during it."""
    said, over, weights = on_ranks(1, saving, small_disk / "run", more)[0]
    assert says in said and "make room" in said.lower() and over
    assert equal(weights, on_ranks(1, run, tmp_path / "whole", 1)[0][0])
