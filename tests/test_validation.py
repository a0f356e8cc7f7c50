"""Tests of validation: equal on any number of ranks, and its choice of checkpoint and threshold."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import composed, make_drafter, tiny_config
from conftest import settings_of as drafter_settings
from safetensors.torch import load_file
from trainers import on_ranks, trainer

from dloop_train.checkpoints.files import save_drafter
from dloop_train.data.responses import Response
from dloop_train.decoding.costs import Costs, increasing
from dloop_train.decoding.gates import Always, DLoop, Never
from dloop_train.decoding.replay import Replay
from dloop_train.phases import artifacts, evaluate, validation
from dloop_train.phases.evaluate import settings_of
from dloop_train.phases.export import gate_of
from dloop_train.phases.replaying import candidates, fastest, simulated, sweep
from dloop_train.phases.train import DONE, finished
from dloop_train.phases.validation import BINS, VALIDATED_BY, Validator, chosen_threshold, gate_scores, predictions
from dloop_train.runs import read_jsonl, write_atomic, write_jsonl
from dloop_train.targets.responders import decode_plain
from dloop_train.targets.sources import load_target
from dloop_train.training.engine import Validation
from dloop_train.training.metrics import flat
from dloop_train.training.saves import POINTER, weights_of

COSTS = Costs(
    draft_first=0.01, draft_more=0.004, gate=0.0, verify={1: 0.1, 4: 0.11, 7: 0.12}, overhead=0.002, plain=0.1
)
RUN = (
    "+drafter=dflash",
    "+target=tiny_llama",
    "++drafter.width=4",
    "++train.precision=float32",
    "++train.depth_exposure=2",
    "++train.origins=3",
)


def record(scores, accepted, k=2):
    """A replay of len(accepted) positions; no round ends early."""
    count = len(accepted)
    return Replay(
        k, len(scores[0]), count, count + k, 99, torch.tensor(scores), torch.tensor(accepted), torch.full((count,), 99)
    )


def prepared(root):
    """Write a run's validation responses and a fixed cost table, so that nothing depends on measured times."""
    config = composed(*RUN, f"root={root}")
    target = load_target(config.target, dtype="float32", device="cpu")
    prompts = [list(range(60 + 7 * number, 72 + 7 * number)) for number in range(3)]
    rows = [
        Response(f"prompt-{number}", "all", ids, decode_plain(target, ids, max_new_tokens=12), False, "").row()
        for number, ids in enumerate(prompts)
    ]
    write_jsonl(artifacts.greedy(config).begin() / "validation.jsonl", rows)
    artifacts.greedy(config).finish()
    write_atomic(artifacts.run_folder(config) / "costs.json", json.dumps(COSTS.row()))
    return config


def validated(root):
    config = composed(*RUN, f"root={root}")
    drafter = make_drafter(
        "dflash-shifted", load_target(tiny_config(), dtype="float32", device="cpu"), dtype=torch.float32
    )
    found = Validator(config)(4, drafter)
    return found.score, {name: value for name, value in found.row.items() if name != "seconds"}


def test_ranks_share_the_responses_and_agree(tmp_path):
    """Three responses on two ranks, so that one rank has none in the second turn."""
    prepared(tmp_path)
    ((score, row),) = on_ranks(1, validated, str(tmp_path))
    for shared in on_ranks(2, validated, str(tmp_path)):
        assert shared[0] == score and flat("row", shared[1]) == pytest.approx(flat("row", row), rel=1e-6)
    assert row["loss_first"] > 0 and row["loss_last"] > 0 and len(row["accuracy_first"]) == 4
    assert sum(row["gate_score_histogram"]) == 36 and row["threshold"] in candidates(
        DLoop(paper_threshold=-0.5), [-0.25, -0.5, -0.75, -1.0]
    )


def test_the_score_is_that_of_the_fastest_threshold():
    """The fastest threshold is chosen; of equally fast ones the paper's if it is among them, otherwise the highest.

    A gate that drafts more stages is faster if whole blocks are accepted.
    """
    sure = record([[-0.3, -0.3]] * 9, [4] * 9)
    row, score = predictions([sure], DLoop(paper_threshold=-0.5, max_stages=2), [-0.25, -0.75, -1.0], COSTS, k=2)
    by_hand = sweep([sure], [-0.25, -0.5, -0.75, -1.0], COSTS, 2, 2)["sweep"]
    assert score == max(point["tokens_per_second"] for point in by_hand) > by_hand[0]["tokens_per_second"]
    assert (
        row["threshold"] == -0.5
        and row["tokens_per_second_gated"] == score
        and row["by_threshold"]["-0.25"]["stages"] == 1
    )
    assert (
        fastest([{"threshold": g, "tokens_per_second": 1.0} for g in (-1.0, -0.25, -0.75)], preferred=-0.5)["threshold"]
        == -0.25
    )
    assert sweep([sure], [-1.0], COSTS, 2, 1)["sweep"][0]["stages"] == 1  # a cap below the number of drafted stages
    vain = record([[-0.3, -0.3]] * 9, [0] * 9)
    assert predictions([vain], DLoop(paper_threshold=-0.5, max_stages=2), [-0.25], COSTS, k=2)[0]["threshold"] == -0.25


def test_a_threshold_is_chosen_for_the_gate_that_will_run():
    """Four of six high-scoring stages are accepted.

    A gate that continues to the sixth stage wastes two, one capped at four stages wastes none.
    """
    sure = record([[-0.6] * 6] * 40, [8] * 40)
    chosen = {
        cap: predictions([sure], DLoop(paper_threshold=-0.5, max_stages=cap), [-0.75], COSTS, k=2)[0]["threshold"]
        for cap in (4, 6)
    }
    dear = replace(COSTS, draft_more=0.5)
    assert (
        chosen[4] == -0.75
        and predictions([sure], DLoop(paper_threshold=-0.5, max_stages=6), [-0.75], dear, k=2)[0]["threshold"] == -0.5
    )
    assert predictions([sure], DLoop(threshold=-0.75, max_stages=6), [], COSTS, k=2)[0]["stages_gated"] > 4.5


@pytest.mark.parametrize(
    "gate, stages",
    [(Never(), 1), (Always(max_stages=2), 2), (DLoop(threshold=-0.1), 1), (DLoop(threshold=-0.4, max_stages=2), 2)],
    ids=str,
)
def test_a_given_gate_is_simulated_as_it_is(gate, stages):
    row, score = predictions([record([[-0.3, -0.3]] * 9, [4] * 9)], gate, [-0.25], COSTS, k=2)
    assert (
        row["stages_gated"] == stages and row["threshold"] == gate.threshold and score == row["tokens_per_second_gated"]
    )


def test_scores_are_counted_with_the_fate_of_their_blocks():
    found = gate_scores([record([[0.0, 0.0], [-0.01, 0.0], [-9.0, 0.0]], [2, 1, 0])])
    assert found["gate_score_histogram"] == [1, *[0] * (BINS - 2), 2] and found["gate_calibration"] == [
        0,
        *[None] * (BINS - 2),
        0.5,
    ]


SCORES = {0: 1.0, 2: 3.0, 4: 5.0, 6: 4.0}


def trained_and_exported(root, start):
    one, before = trainer(root / "run", 0, steps=6, validate_every=2, keep=9), {}

    def scored(step, drafter):
        before.setdefault("weights", {name: tensor.clone() for name, tensor in drafter.state_dict().items()})
        return Validation({}, (SCORES | {0: start})[step])

    one.train(scored)
    checkpoints = root / "run" / "checkpoints"
    best = load_file(weights_of(checkpoints, "best")[0])
    untouched = all(torch.equal(best[name], tensor) for name, tensor in before["weights"].items())
    return {checkpoint: weights_of(checkpoints, checkpoint)[1] for checkpoint in ("best", "last", "2")}, untouched


@pytest.mark.parametrize("start, best", [(1.0, 4), (9.0, 0)])
def test_the_best_checkpoint_is_that_of_the_highest_score_the_start_included(tmp_path, start, best, capfd):
    (found,) = on_ranks(1, trained_and_exported, tmp_path, start)
    assert found == ({"best": best, "last": 6, "2": 2}, best == 0)
    assert ("exported as it was" in capfd.readouterr().err) == (best == 0)
    with pytest.raises(ValueError, match="train.keep"):
        weights_of(tmp_path / "run" / "checkpoints", "3")


def test_an_export_names_the_threshold_of_its_step(tmp_path):
    config = composed(*RUN, f"root={tmp_path}")
    folder = artifacts.run_folder(config)
    write_jsonl(
        folder / "validation.jsonl", [{"step": 0, "threshold": -1.0}, {"step": 4, "threshold": -0.25}, {"step": 6}]
    )
    assert [chosen_threshold(folder, step) for step in (0, 4, 6)] == [-1.0, -0.25, None]
    assert gate_of(config, 4).threshold == -0.25 and gate_of(config, 4).paper_threshold == -0.5
    with pytest.raises(ValueError, match="has none at step 6"):
        gate_of(config, 6)
    fixed = composed(*RUN, f"root={tmp_path}", "++gate.threshold=-0.6")
    assert gate_of(fixed, 6).threshold == -0.6


@pytest.mark.parametrize(
    "change, says",
    [
        ("++gate.max_stages=2", "gate:"),
        ("++gate.threshold=-0.6", "gate:"),
        ("++evaluate.thresholds=[-2.0]", "evaluate.thresholds: found"),
        ("++train.validate_prompts=2", "train.validate_prompts: found 16, wanted 2"),
    ],
)
def test_what_checkpoints_are_compared_by_stays_as_it_is(change, says, tmp_path):
    """A training or a choice of threshold refuses validations made with another gate or other prompts."""
    folder = artifacts.run_folder(composed(*RUN, f"root={tmp_path}"))
    write_atomic(folder / VALIDATED_BY, json.dumps(validation.settings_of(composed(*RUN, f"root={tmp_path}"))))
    validation.require_same_validation(composed(*RUN, f"root={tmp_path}"))
    with pytest.raises(ValueError, match=says):
        validation.require_same_validation(composed(*RUN, f"root={tmp_path}", change))


@pytest.mark.parametrize(
    "worse, patience, over", [(None, 0, True), (None, 3, True), (3, 3, True), (3, 0, False), (3, 5, False)]
)
def test_a_training_that_patience_ended_goes_on_with_more_of_it(worse, patience, over, tmp_path):
    config = composed(*RUN, f"root={tmp_path}", f"++train.patience={patience}")
    checkpoints = artifacts.run_folder(config) / "checkpoints"
    write_atomic(checkpoints / POINTER, json.dumps({"tag": "step-0000005", "step": 5, "world_size": 1}))
    write_atomic(checkpoints / DONE, json.dumps({"step": 5, "worse": worse}))
    assert finished(config) is over


def test_each_drafter_is_decoded_at_its_own_threshold_and_the_papers_stands_beside(tmp_path):
    config = composed(*RUN, f"root={tmp_path}", "++drafter.init=released")
    write_jsonl(artifacts.run_folder(config) / "validation.jsonl", [{"step": 0, "threshold": -1.0}])
    for name, threshold in (("trained", -0.25), ("other", -0.75)):
        write_atomic(tmp_path / name / "config.json", json.dumps({"dloop": {"threshold": threshold}}))
    folders = {"untouched": tmp_path / "released", "trained": tmp_path / "trained", "other": tmp_path / "other"}
    gates = {label: evaluate.gate_for(config, label, folder) for label, folder in folders.items()}
    settings = {setting.label: setting.gate.threshold for setting in settings_of(config, gates, 3)}
    assert settings == {
        "plain decoding": None,
        "best single stage, k = 3": None,
        "untouched S=1": None,
        "untouched + gate": -1.0,
        "trained S=1": None,
        "trained + gate (DLoop)": -0.25,
        "other S=1": None,
        "other + gate": -0.75,
        "trained + gate -0.5": -0.5,
    }
    short = replace(config, evaluate=replace(config.evaluate, rows="short"))
    assert [setting.label for setting in settings_of(short, gates, 3)] == [
        "plain decoding",
        "best single stage, k = 3",
        "untouched + gate",
        "trained + gate (DLoop)",
        "other + gate",
    ]
    assert [setting.label for setting in settings_of(short, gates, 0)][:3] == [
        "plain decoding",
        "untouched S=1",
        "untouched + gate",
    ]
    fixed = replace(config, gate=DLoop(threshold=-0.5))
    gates = {label: evaluate.gate_for(fixed, label, folder) for label, folder in folders.items()}
    assert {setting.gate.threshold for setting in settings_of(fixed, gates, 0) if isinstance(setting.gate, DLoop)} == {
        -0.5
    }


def test_extra_drafters_get_the_threshold_that_validation_finds_fastest_and_any_threshold_can_be_replayed(
    tmp_path, monkeypatch
):
    """The threshold of an extra drafter is chosen again, since its export chose it under another cost table.

    A threshold below all swept ones drafts deeper than the sweep.
    """
    target = load_target(composed("+drafter=dflash", "+target=tiny_llama").target, dtype="float32", device="cpu")
    for name, threshold in (("trained", -60.0), ("other", -0.5)):
        save_drafter(
            make_drafter("dflash-shifted", target),
            tmp_path / name,
            section=drafter_settings("dflash-shifted").section() | {"threshold": threshold},
            target=target.spec,
        )
    config = composed(
        "+drafter=dflash",
        "+target=tiny_llama",
        f"root={tmp_path}",
        "++evaluate.dtype=float32",
        "++drafter.init=scratch",
        "++drafter.width=4",
        "++drafter.taps=[0,1,3]",
        "++evaluate.replay_stages=2",
        "++evaluate.thresholds=[-0.5,-30.0]",
        "++gate.threshold=replay",
        f"++evaluate.extra={{other: {tmp_path / 'other'}}}",
    )
    prompts = [list(range(60 + number, 70 + number)) for number in range(3)]
    responses = [
        Response(f"p{number}", "all", ids, decode_plain(target, ids, max_new_tokens=12), False, "")
        for number, ids in enumerate(prompts)
    ]
    monkeypatch.setattr(evaluate, "validation_responses", lambda config: responses)
    evaluation = evaluate.Evaluation(
        config, tmp_path / "evaluation", {"other": tmp_path / "other", "trained": tmp_path / "trained"}, responses
    )
    gates, drafter = evaluation.gates(), evaluation.drafter("other")
    speeds = {
        g: simulated(
            evaluation.records(drafter, responses, config.gate, 2),
            config.gate.with_threshold(g),
            evaluation.costs(drafter),
        )["tokens_per_second"]
        for g in (-0.5, -30.0)
    }
    assert gates["trained"].threshold == -60.0 and gates["other"].threshold == max(speeds, key=lambda g: (speeds[g], g))
    evaluation.replay(settings_of(config, gates, 0))
    deep = read_jsonl(tmp_path / "evaluation" / "replayed" / "trained-gate-dloop-.jsonl".replace("-.", "."))
    assert max(one["stages"] for row in deep for one in row["rounds"]) > 2


def test_without_validation_responses_a_threshold_must_be_given(tmp_path):
    config = prepared(tmp_path)
    with pytest.raises(ValueError, match="set gate.threshold=-0.5"):
        Validator(replace(config, train=replace(config.train, validate_prompts=0)))
    silent = Validator(replace(config, gate=Never(), train=replace(config.train, validate_prompts=0)))
    assert silent(0, None) == Validation({})


def test_more_tokens_take_no_less_time_to_verify():
    """The result equals the best non-decreasing fit, found here by trying every way to pool neighbours."""
    assert increasing({1: (1.0, 3), 3: (2.0, 1), 4: (2.0, 2)}) == {1: 1.0, 3: 2.0, 4: 2.0}
    assert increasing({1: (58.0, 5), 4: (67.0, 15), 5: (59.0, 5)}) == {1: 58.0, 4: 65.0, 5: 65.0}
    rng = np.random.default_rng(0)
    for _ in range(50):
        values, counts = rng.normal(size=6), rng.integers(1, 5, size=6)
        found = np.array(
            list(increasing({place: (float(values[place]), int(counts[place])) for place in range(6)}).values())
        )
        assert (np.diff(found) >= 0).all()
        best = np.inf
        for cuts in range(2**5):
            pools = np.cumsum([0, *(cuts >> place & 1 for place in range(5))])
            fit = np.array([np.average(values[pools == pool], weights=counts[pools == pool]) for pool in pools])
            if (np.diff(fit) >= 0).all():
                best = min(best, float((counts * (fit - values) ** 2).sum()))
        assert float((counts * (found - values) ** 2).sum()) == pytest.approx(best)
