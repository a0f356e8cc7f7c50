"""Tests of statistics against numbers computed by hand, and of the report of a tiny run."""

import json
import math
import re

import pytest
import torch
from conftest import composed

from dloop_train.decoding import statistics
from dloop_train.decoding.replay import compare
from dloop_train.decoding.rules import GREEDY, Match
from dloop_train.phases import artifacts, report
from dloop_train.phases.replaying import next_stage_tokens
from dloop_train.runs import write_atomic, write_jsonl
from dloop_train.targets.sources import load_tokenizer

K = 2


def one(stages, accepted, scores=(), **seconds):
    return {
        "stages": stages,
        "drafted": stages * K,
        "accepted": accepted,
        "emitted": accepted + 1,
        "scores": list(scores),
        "seconds": seconds,
    }


def row(identity, rounds, *, seconds=1.0, tokens=None, category="chat"):
    emitted = sum(each["emitted"] for each in rounds)
    return {
        "id": identity,
        "category": category,
        "prompt_tokens": 3,
        "tokens": tokens or emitted,
        "seconds": seconds,
        "rounds": rounds,
        "same_text": True,
        "parting_gap": None,
    }


# Two responses: 1, 3, 5 tokens in three rounds; 7 tokens in one.
ROWS = [row("a", [one(1, 0), one(1, 2), one(2, 4)], seconds=0.9), row("b", [one(3, 6)], seconds=1.4)]
PLAIN = [row("a", [one(0, 0)] * 9, seconds=2.7), row("b", [one(0, 0)] * 7, seconds=3.5)]


def test_tau_is_a_mean_of_means_and_micro_pools():
    assert statistics.tau(ROWS) == pytest.approx((3 + 7) / 2)
    assert statistics.tau_micro(ROWS) == pytest.approx(16 / 4)
    assert statistics.tau(PLAIN) == 1


def test_speedup_is_a_ratio_of_means():
    # seconds per token: plain 0.3 and 0.5, drafted 0.1 and 0.2; a mean of ratios would be 2.75
    assert statistics.speedup(ROWS, PLAIN) == pytest.approx(0.4 / 0.15)
    assert statistics.speedup_micro(ROWS, PLAIN) == pytest.approx(6.2 / 2.3)


def test_bootstrap_of_equal_prompts_has_no_width_and_of_two_prompts_reaches_both():
    same = [row(name, [one(1, 1)]) for name in "abc"]
    known = statistics.tau_estimate(same, draws=50)
    assert (known.value, known.low, known.high) == (2, 2, 2)
    known = statistics.tau_estimate(ROWS, draws=500)  # 1/4 of the draws has only a (tau 3), 1/4 only b (tau 7)
    assert (known.value, known.low, known.high) == pytest.approx((5, 3, 7))


def test_bootstrap_is_seeded():
    many = [row(str(number), [one(1, number % 3)]) for number in range(20)]
    assert statistics.tau_estimate(many, draws=50, seed=1) == statistics.tau_estimate(many, draws=50, seed=1)
    assert statistics.tau_estimate(many, draws=50, seed=1) != statistics.tau_estimate(many, draws=50, seed=2)


def test_ratio_is_paired_by_prompt_in_any_order():
    slow = [row(str(number), [one(1, 1)], seconds=1.0 + number) for number in range(8)]
    fast = [row(str(number), [one(1, 1)], seconds=(1.0 + number) / 2) for number in reversed(range(8))]
    known = statistics.speedup_estimate(fast, slow, draws=200)  # prompts differ eightfold, the ratio is 2 on each
    assert (known.value, known.low, known.high) == pytest.approx((2, 2, 2))


def test_responses_of_one_prompt_are_drawn_together():
    rows = [row("a", [one(1, 0)]), row("a", [one(1, 2)])]
    known = statistics.tau_estimate(rows, draws=100)
    assert (known.value, known.low, known.high) == (2, 2, 2)


def test_different_prompts_are_refused():
    with pytest.raises(ValueError, match="1 are in one only, such as b"):
        statistics.speedup_estimate(ROWS, PLAIN[:1], draws=10)


def test_full_acceptance_by_stage():
    # (stages, accepted): (1,0) (1,2) (2,4) (2,1) (3,6) (3,5)
    rows = [row("a", [one(1, 0), one(1, 2), one(2, 4), one(2, 1), one(3, 6), one(3, 5)])]
    assert statistics.full_acceptance(rows, K) == [
        {"stage": 1, "rounds": 6, "full": pytest.approx(4 / 6), "full_given_previous": pytest.approx(4 / 6)},
        {"stage": 2, "rounds": 4, "full": pytest.approx(3 / 4), "full_given_previous": pytest.approx(3 / 3)},
        {"stage": 3, "rounds": 2, "full": pytest.approx(1 / 2), "full_given_previous": pytest.approx(1 / 2)},
    ]


def test_a_stage_that_no_round_reached_accepted_has_no_share():
    assert statistics.full_acceptance([row("a", [one(2, 1)])], K)[1] == {
        "stage": 2,
        "rounds": 1,
        "full": 0,
        "full_given_previous": None,
    }


def test_tokens_and_seconds_by_depth():
    rows = [
        row("a", [one(1, 0, draft_first=1.0, verify=2.0), one(2, 4, draft_first=1.0, draft_more=0.5, verify=2.5)]),
        row("b", [one(1, 2, draft_first=1.0, verify=2.0)]),
    ]
    assert statistics.by_depth(rows) == [
        {"stages": 1, "rounds": 2, "tokens": 4, "seconds": 6.0},
        {"stages": 2, "rounds": 1, "tokens": 5, "seconds": 4.0},
    ]


def test_tau_by_category():
    rows = [
        row("a", [one(1, 0)], category="math"),
        row("b", [one(1, 2)], category="math"),
        row("c", [one(1, 4)], category="code"),
    ]
    assert statistics.by_category(rows) == {"code": 5, "math": 2}


def test_auroc_counts_ties_half():
    assert statistics.auroc([2.0, 1.0], [1.0, 0.0]) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert statistics.auroc([1.0], []) is None


def test_calibration_of_scores():
    scored = [(0.9, 2), (0.9, 1), (0.7, 2), (0.3, 0), (1.0, 2)]  # probability of the block, accepted
    rows = [row("a", [one(1, accepted, [math.log(probability)]) for probability, accepted in scored])]
    known = statistics.calibration(rows, k=K, stage=1, threshold=math.log(0.8), bins=5)
    assert [(each["low"], each["high"], each["rounds"]) for each in known["bins"]] == [
        (0.2, 0.4, 1),
        (0.6, 0.8, 1),
        (0.8, 1.0, 3),
    ]
    assert [each["full"] for each in known["bins"]] == pytest.approx([0, 1, 2 / 3])
    assert known["bins"][2]["probability"] == pytest.approx(2.8 / 3)
    assert known["precision"] == pytest.approx(2 / 3)
    assert known["passed"] == pytest.approx(3 / 5)
    assert known["auroc"] == pytest.approx((1.5 + 1 + 2) / 6)  # 0.9, 0.7, 1.0 against 0.9, 0.3


def test_a_later_stage_is_tested_only_after_accepted_ones():
    rows = [row("a", [one(2, 4, [-0.1, -0.2]), one(2, 1, [-0.1, -0.3]), one(2, 3, [-0.1, -0.4])])]
    known = statistics.calibration(rows, k=K, stage=2, threshold=-0.5)
    assert (known["rounds"], known["precision"]) == (2, 0.5)


def test_shares_of_a_round():
    # the response's 9 s do not include its first draft (1 s); 2 s of them are in no part of a round
    rows = [
        row(
            "a",
            [
                one(1, 0, draft_first=1.0, gate=0.5, verify=3.0, commit=0.5),
                one(2, 4, draft_first=1.0, draft_more=0.5, gate=0.5, verify=0.5, commit=0.5),
            ],
            seconds=9.0,
        )
    ]
    assert statistics.time_shares(rows) == pytest.approx(
        {"seconds_per_round": 5.0, "draft_to_verify": 2.5 / 3.5, "gate": 0.1, "outside_forwards": 0.4}
    )


def test_break_even():
    costs = {
        "draft_more": 0.025,
        "gate": 0.005,
        "verify": {"1": 0.1, "3": 0.12, "7": 0.16},
    }  # verify(5) = 0.14 is interpolated
    rows = [row("a", [one(2, 4), one(2, 3), one(2, 1), one(1, 0)], seconds=1.2)]  # 12 tokens, 0.1 s each
    (known,) = statistics.break_even(rows, costs, K)
    assert known["cost_seconds"] == pytest.approx(0.05)
    assert known["extra_tokens"] == pytest.approx(1.5)
    assert known["needed"] == pytest.approx(0.05 / (1.5 * 0.1))
    assert known["observed"] == pytest.approx(2 / 3)


def test_table_is_aligned():
    assert report.table([{"name": "a", "tau": "1.00"}, {"name": "long", "tau": "10.00"}]).split("\n") == [
        "name    tau",
        "----  -----",
        "a      1.00",
        "long  10.00",
    ]


# The report of a tiny run


POINT = {"tau": 3.0, "tokens_per_second": 20.0}
REPLAYED = {
    "k": K,
    "S1": POINT,
    "oracle": {"tau": 5.0, "tokens_per_second": 30.0},
    "full_acceptance_by_stage": [0.5],
    "sweep": [{"threshold": -0.5, "stages": 1.5, **POINT}, {"threshold": -0.25, "stages": 1.2, **POINT}],
}
COSTS = {
    "draft_first": 0.01,
    "draft_more": 0.01,
    "gate": 0.001,
    "verify": {"1": 0.1, "5": 0.11},
    "overhead": 0.01,
    "plain": 0.1,
}
FIRST = {"draft_first": 0.01, "verify": 0.07}
MORE = {"draft_first": 0.01, "draft_more": 0.01, "gate": 0.005, "verify": 0.09, "commit": 0.01}
DECODED = [
    ("plain decoding", None, None, [one(0, 0, verify=0.1)] * 12, 1.2),
    ("untouched S=1", "untouched", None, [one(1, 2, [-0.1], draft_first=0.01, verify=0.1425)] * 4, 0.6),
    ("trained + gate (DLoop)", "trained", -0.5, [one(2, 4, [-0.1, -0.8], **MORE), one(1, 1, [-0.9], **FIRST)] * 2, 0.4),
]


@pytest.fixture
def tiny(tmp_path):
    """Config of a run whose evaluation and training files are written by hand."""
    made = composed(
        "+drafter=dflash", "+target=tiny_llama", f"root={tmp_path}", "++evaluate.bootstrap=99", "++wandb.mode=disabled"
    )
    folder = artifacts.run_folder(made)
    listed = []
    for number, (label, drafter, threshold, rounds, seconds) in enumerate(DECODED):
        listed.append(
            {
                "label": label,
                "drafter": drafter,
                "gated": threshold is not None,
                "threshold": threshold,
                "k": K,
                "rounds": f"rounds/{number}.jsonl",
                "replayed": f"replayed/{number}.jsonl",
                "gate_temperature": None if threshold is None else 1.0,
                **GREEDY.row(),
            }
        )
        rows = [
            row(name, rounds, seconds=seconds, tokens=12, category=category)
            for name, category in (("a", "chat"), ("b", "math"))
        ]
        write_jsonl(folder / f"evaluation/rounds/{number}.jsonl", rows)
        write_jsonl(folder / f"evaluation/replayed/{number}.jsonl", rows)
    write_atomic(folder / "evaluation/settings.json", json.dumps(listed))
    write_atomic(folder / "evaluation/replay.json", json.dumps({"untouched": REPLAYED, "trained": REPLAYED}))
    write_atomic(folder / "evaluation/costs.json", json.dumps({"untouched": COSTS, "trained": COSTS}))
    write_jsonl(
        folder / "metrics.jsonl",
        [{"step": step, "loss_first": 2.0, "loss_last": 3 - 0.1 * step, "lr": 1e-4} for step in range(5)],
    )
    write_jsonl(
        folder / "validation.jsonl",
        [
            {
                "step": step,
                "loss_first": 2.0,
                "loss_last": 3.0,
                **{
                    f"{name}_{walk}": 3.0 + step
                    for name in ("tau", "tokens_per_second")
                    for walk in ("s1", "gated", "oracle")
                },
            }
            for step in (0, 4)
        ],
    )
    write_atomic(
        folder / "drafter/config.json",
        json.dumps({"dloop": {"paper_threshold": -0.5, "provenance": {"step": 4, "checkpoint": "best"}}}),
    )
    return made


FIGURES = [
    "Speedup and tau",
    "Tokens and time by depth",
    "Threshold sweep",
    "Calibration of the gate&#x27;s score",
    "Training",
    "Tau by category",
]


def test_report_is_whole(tiny, capsys):
    report.run(tiny)
    folder = artifacts.run_folder(tiny)
    known = json.loads((folder / "report.json").read_text())
    gated = known["settings"][2]
    assert known["headline"] == gated["label"] == "trained + gate (DLoop)"
    assert (gated["speedup"]["value"], gated["over_reference"]["value"], gated["tau"]["value"]) == pytest.approx(
        (3.0, 1.5, 3.5)
    )
    assert gated["full_acceptance"][0]["full"] == pytest.approx(0.5)
    assert gated["clock"]["speedup"]["value"] == pytest.approx(3.0) and gated["clock"]["over_usual"] == pytest.approx(
        1.0
    )
    assert gated["replayed"]["over_reference"]["value"] == pytest.approx(1.5) and set(
        gated["replayed"]["over_reference_by_category"]
    ) == {"chat", "math"}
    assert gated["tau_by_category"] == pytest.approx({"chat": 3.5, "math": 3.5})
    html = (folder / "report.html").read_text()
    assert re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,iVBOR', html) == FIGURES
    assert "Left out" not in html and "left out" not in html
    assert "http" not in html  # the page loads nothing from the network
    said = capsys.readouterr().out
    assert (
        "3.00x [3.00, 3.00]" in said
        and "by replay on 2 prompts" in said
        and "busy" not in said
        and "was exported, and the rows" not in said
    )


def test_a_start_that_was_exported_is_told(tiny, capsys):
    folder = artifacts.run_folder(tiny)
    write_atomic(
        folder / "drafter/config.json",
        json.dumps({"dloop": {"paper_threshold": -0.5, "provenance": {"step": 0, "checkpoint": "best"}}}),
    )
    report.run(tiny)
    said = "no checkpoint of this training was predicted to be faster than the drafter that it started from"
    assert said in capsys.readouterr().out and said in (folder / "report.html").read_text()


def test_example_rounds_are_coloured_by_the_stage_that_drafted_them(tiny):
    folder = artifacts.run_folder(tiny)
    path = folder / "evaluation/rounds/2.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for each in rows:
        each["first_token"] = 65
        for number, drafted in enumerate(each["rounds"]):
            drafted["tokens"] = [66 + number] * drafted["emitted"]
    write_jsonl(path, rows)
    report.run(tiny)
    html = (folder / "report.html").read_text()
    letters = {number: load_tokenizer(tiny.target).decode([number]) for number in (65, 66, 67)}
    first, second = (f'<span style="background:{colour}">' for colour in report.STAGE_COLOURS[:2])
    bar = '<span class="end">|</span>'
    a, b, c = letters.values()
    whole = (
        f"{a}{bar}{first}{b}</span>{first}{b}</span>{second}{b}</span>{second}{b}</span>{b}{bar}"
        f"{first}{c}</span>{c}{bar}"
    )
    assert "Example rounds" in html and whole in html


def test_report_says_why_a_figure_is_left_out(tiny):
    folder = artifacts.run_folder(tiny)
    (folder / "validation.jsonl").unlink()
    report.run(tiny)
    said = (
        "validation.jsonl has none. A training validates where neither train.validate_prompts nor "
        "generate.greedy_prompts is 0 and the prompts have a validation split"
    )
    assert f"Validation points are left out: {said}" in (folder / "report.html").read_text()
    (folder / "metrics.jsonl").unlink()
    report.run(tiny)
    html = (folder / "report.html").read_text()
    assert "Left out: metrics.jsonl is absent" in html
    assert len(re.findall("<img", html)) == len(FIGURES) - 1


def test_report_of_sampled_texts_names_the_rule_and_compares_none(tiny, capsys):
    folder = artifacts.run_folder(tiny)
    path = folder / "evaluation/settings.json"
    write_atomic(
        path,
        json.dumps(
            [
                setting
                | Match(temperature=0.7, draft_temperature=0.0).row()
                | {"gate_temperature": 1.0 if setting["gated"] else None}
                for setting in json.loads(path.read_text())
            ]
        ),
    )
    for rows in folder.glob("evaluation/rounds/*.jsonl"):
        write_jsonl(
            rows,
            [json.loads(line) | {"same_text": None, "parting_gap": None} for line in rows.read_text().splitlines()],
        )
    report.run(tiny)
    known = json.loads((folder / "report.json").read_text())
    assert (known["run"]["rule"], known["run"]["temperature"], known["run"]["draft_temperature"]) == ("match", 0.7, 0.0)
    assert [one["same_text"] for one in known["settings"]] == [None] * 3 and known["settings"][2][
        "gate_temperature"
    ] == 1.0
    said = "rule match, temperature 0.7, draft temperature 0, gate temperature 1"
    assert f"texts are sampled ({said})" in capsys.readouterr().out and said in (folder / "report.html").read_text()


@pytest.mark.parametrize("missing", ["settings.json", "replay.json", "costs.json", "rounds/1.jsonl"])
def test_report_names_the_phase_to_run(tiny, missing):
    (artifacts.run_folder(tiny) / "evaluation" / missing).unlink()
    with pytest.raises(FileNotFoundError, match=r"phases=\[evaluate,report\]"):
        report.run(tiny)


def test_a_response_without_rounds_is_left_out_everywhere(tiny):
    folder = artifacts.run_folder(tiny)
    path = folder / "evaluation/rounds/1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_jsonl(path, [rows[0] | {"rounds": [], "tokens": 0}, rows[1]])
    report.run(tiny)
    known = json.loads((folder / "report.json").read_text())
    assert (known["run"]["prompts"], known["run"]["prompts_left_out"]) == (1, 1)
    assert [list(each["tau_by_category"]) for each in known["settings"]] == [["math"]] * 3


def test_tokens_of_the_next_stage_are_counted_where_the_stages_before_were_whole():
    """k = 2 on a text of ten tokens.

    Drafts with one correct token do not count for stage 2; with 2, 3 and 6 correct tokens stage 2 adds 0, 1 and 2.
    From position 6 on the text ends inside stage 2, and these positions are left out.
    """
    text = list(range(50, 60))
    right = [1, 2, 3, 6, 0, 0, 3, 2, 1, 0]
    drafts = torch.tensor([[text[t + 1 + n] if n < right[t] else 99 for n in range(6)] for t in range(10)])
    record = compare(drafts, torch.zeros(10, 3), text, 10, k=2, stages=3, max_new_tokens=10, stops=[2])
    assert record.accepted.tolist() == right
    assert next_stage_tokens([record]) == {"tokens": (0 + 1 + 2) / 3, "positions": 3}
    with pytest.raises(AssertionError):
        next_stage_tokens([record], stage=4)
