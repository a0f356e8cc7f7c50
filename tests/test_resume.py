"""Laws of training on many ranks: stages agree, what is not finite changes nothing, a training that died goes on as if it had not."""

from dataclasses import dataclass

import pytest
import torch
from trainers import Died, nothing, on_ranks, optimiser_of, trainer, weights_of

from dloop_train.runs import read_jsonl

STAGES = (0, 1, 2, 3)


def rows_of(folder):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_jsonl(folder / "metrics.jsonl")]


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# What is not finite


def skipping(root, precision):
    """Sample 5 turns losses into NaN; what every step does to weights and optimiser."""
    found = {}
    for stage in STAGES:
        training = trainer(root / f"{precision}-{stage}", stage, poisoned=5, precision=precision)
        seen = []

        def look(step, drafter, training=training, seen=seen):
            seen.append([drafter.state_dict()[name].clone() for name in sorted(drafter.state_dict())] + optimiser_of(training))
            return nothing(step, drafter)
        training.train(look)
        changed = [any(not torch.equal(a, b) for a, b in zip(one, two, strict=True)) for one, two in zip(seen[1:], seen[2:], strict=False)]
        found[stage] = changed, training.standing, [training.plan.samples(step) for step in range(6)]
    return found


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(precision, tmp_path):
    """At every stage. One rank has the sample; both skip the step, and go on with the next one."""
    for found in on_ranks(2, skipping, tmp_path, precision):
        for stage, (changed, standing, samples) in found.items():
            bad = [5 in indices for indices in samples]
            assert sum(bad) == standing.skipped == 2 and not bad[0], stage
            assert changed == [not skipped for skipped in bad[1:]], stage
            rows = read_jsonl(tmp_path / f"{precision}-{stage}" / "skipped.jsonl")
            assert [row["step"] - 1 for row in rows] == [step for step in range(6) if bad[step]]
            assert all([micro["samples"] for micro in row["micro_batches"] if not micro["finite"]] == [["sample-5"]] for row in rows)


# Going on


@dataclass
class DieAt:
    """A validation that ends the training at a step; nested functions do not travel to other processes."""

    step: int

    def __call__(self, step, drafter):
        if step == self.step:
            raise Died
        return nothing(step, drafter)


def run(folder, stage, validate=nothing, **settings):
    """A training, to its end or to its death: its weights and what train() said."""
    training = trainer(folder, stage, **settings)
    try:
        over = training.train(validate)
    except Died:
        return None
    return weights_of(training), over, optimiser_of(training)


def going_on(root, kinds):
    """Whole, and in two parts: rank 0's weights and this rank's optimiser of both."""
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


@pytest.mark.parametrize("kinds", [("1", "3"), pytest.param(("0", "2", "0-bf16", "1-bf16", "2-bf16", "3-bf16"), marks=pytest.mark.slow),
                                   pytest.param(("1-offload", "2-offload", "3-offload", "2-offload-bf16", "3-offload-bf16"), marks=pytest.mark.slow)])
def test_a_training_that_died_goes_on_as_if_it_had_not(kinds, tmp_path):
    """Two ranks, the middle of an epoch: weights, optimiser and log to the last bit."""
    for found in on_ranks(2, going_on, tmp_path, kinds):
        for kind, ((weights, over, optimiser), (again, over_again, optimiser_again)) in found.items():
            assert over and over_again and equal(weights, again), kind
            assert all(torch.equal(a, b) for a, b in zip(optimiser, optimiser_again, strict=True)), kind
            assert rows_of(tmp_path / f"whole-{kind}") == rows_of(tmp_path / f"parts-{kind}") and len(rows_of(tmp_path / f"parts-{kind}")) == 6
            assert sorted(path.name for path in (tmp_path / f"parts-{kind}" / "checkpoints").glob("step-*")) == ["step-0000004", "step-0000006"]


def each(root, stages, validate, **settings):
    return {stage: run(root / str(stage), stage, validate, **settings) for stage in stages}


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_other_ranks_go_on_with_the_same_training(before, after, tmp_path):
    """ZeRO's own checkpoints through the universal form, stage 0's as they are: fp32 weights as without interruption."""
    whole = on_ranks(after, each, tmp_path / "whole", STAGES, nothing)[0]
    on_ranks(before, each, tmp_path / "parts", STAGES, DieAt(5))
    again = on_ranks(after, each, tmp_path / "parts", STAGES, nothing)[0]
    for stage in STAGES:
        for name, weight in whole[stage][0].items():
            torch.testing.assert_close(again[stage][0][name], weight, rtol=1e-5, atol=1e-7, msg=lambda text, stage=stage, name=name: f"stage {stage}, {name}: {text}")
        assert not list((tmp_path / "parts" / str(stage)).rglob("*.universal*"))
