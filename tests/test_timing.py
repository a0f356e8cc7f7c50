"""Tests of usual times: other work on the machine must not change the reported speeds.

Prompts that it disturbed are found, decoded again and reported.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import composed, make_drafter, settings_of

from dloop_train.checkpoints.files import save_drafter
from dloop_train.data.responses import Response
from dloop_train.decoding import statistics
from dloop_train.decoding.gates import Never
from dloop_train.decoding.timing import DISTURBED, SPREAD, Timing, disturbed, mixture, steadied, weighted_quantiles
from dloop_train.phases.evaluate import PLAIN, Evaluation, Setting
from dloop_train.phases.report import busyness
from dloop_train.runs import read_jsonl, write_jsonl
from dloop_train.targets.responders import decode_plain
from dloop_train.targets.sources import load_target

PARTS = {"draft_first": 0.004, "draft_more": 0.003, "gate": 0.0002, "commit": 0.001}
VERIFY = {1: 0.020, 3: 0.021, 5: 0.023, 7: 0.025}


def one(stages, accepted, slow=1.0, rng=None):
    """A round with k = 2: the usual time of each part times `slow`, with up to 2 % noise if `rng` is given."""
    noise = 1 if rng is None else rng.uniform(0.98, 1.02)
    amounts = {"draft_first": min(stages, 1), "draft_more": max(stages - 1, 0), "gate": stages, "commit": 1}
    seconds = {part: PARTS[part] * amount * slow * noise for part, amount in amounts.items() if amount}
    return {
        "stages": stages,
        "drafted": 2 * stages,
        "accepted": accepted,
        "emitted": accepted + 1,
        "scores": [],
        "seconds": seconds | {"verify": VERIFY[2 * stages + 1] * slow * noise},
    }


def response(name, rounds):
    total = sum(sum(each["seconds"].values()) for each in rounds) - rounds[0]["seconds"].get("draft_first", 0.0)
    return {
        "id": name,
        "category": "chat",
        "tokens": sum(each["emitted"] for each in rounds),
        "seconds": total,
        "rounds": rounds,
    }


def run_of(stages, *, slow=(), prompts=16, seed=0, factor=12.0):
    """Rows of one setting. During the prompts in `slow` everything takes `factor` times as long."""
    rng = np.random.default_rng(seed)
    depths = [stages] if stages < 2 else [1, 1, 2, 1, 3, 1, 2]
    return [
        response(
            str(number),
            [
                one(
                    depths[at % len(depths)],
                    min(at % 3, 2 * depths[at % len(depths)]),
                    factor if number in slow else 1.0,
                    rng,
                )
                for at in range(30)
            ],
        )
        for number in range(prompts)
    ]


def test_a_disturbed_prompt_moves_the_clock_and_not_the_usual_speedup():
    plain, quiet = run_of(0, slow=(0,)), run_of(2)
    clean = statistics.usual_speedup_estimate(quiet, run_of(0), draws=200)
    assert statistics.speedup(quiet, run_of(0)) == pytest.approx(clean.value, rel=0.01)
    known = statistics.usual_speedup_estimate(quiet, plain, draws=200)
    assert known.value == pytest.approx(clean.value, rel=0.01) and known.low < clean.value < known.high
    assert known.high - known.low < 1.5 * (clean.high - clean.low)
    assert statistics.speedup(quiet, plain) > 1.5 * clean.value  # the speedup by the clock is wrong
    assert Timing.of(plain).busy() > 1.5 and Timing.of(quiet).busy() == pytest.approx(1, abs=0.01)
    assert disturbed([plain, quiet]) == [0] and disturbed([quiet]) == []


def test_a_pace_that_changes_halfway_shows_in_the_spread():
    """If half of the prompts took 1.5 times as long, clock and usual times can agree, but the quartiles differ."""
    steady, changed = Timing.of(run_of(2)), Timing.of(run_of(2, slow=range(8), factor=1.5))
    assert steady.spread() < 0.05 and changed.spread() == pytest.approx(0.5, abs=0.05)
    assert changed.spread() > SPREAD > steady.spread()


def test_rows_with_usual_times_add_up():
    rows = run_of(2, slow=(3,))
    for row, clock, seconds in zip(steadied(rows), rows, Timing.of(rows).seconds(), strict=True):
        assert row["clock"] == clock["seconds"] and row["seconds"] == pytest.approx(seconds)
        assert row["seconds"] == pytest.approx(
            sum(sum(each["seconds"].values()) for each in row["rounds"]) - row["rounds"][0]["seconds"]["draft_first"]
        )
        for each in row["rounds"]:
            assert each["seconds"]["verify"] == pytest.approx(VERIFY[each["drafted"] + 1], rel=0.03)


def test_a_rare_verification_lies_on_the_line_through_frequent_ones():
    assert (
        mixture(5, [3, 7]) == {3: 0.5, 7: 0.5}
        and mixture(9, [3, 5]) == {3: -2.0, 5: 3.0}
        and mixture(4, [3]) == {3: 1.0}
    )
    rows = run_of(2)
    rows[0]["rounds"].append(one(3, 2, slow=40.0))  # slow, but verifications of its length are frequent in other rounds
    rows[1]["rounds"].append(
        one(1, 1)
        | {
            "stages": 4,
            "drafted": 8,
            "seconds": {"draft_first": 0.004, "draft_more": 0.009, "gate": 0.0008, "verify": 9.0, "commit": 0.001},
        }
    )
    assert steadied(rows)[1]["rounds"][-1]["seconds"]["verify"] == pytest.approx(0.027, rel=0.03)


def test_weighted_quantiles_are_those_of_repeated_values():
    rng = np.random.default_rng(0)
    values, counts = rng.random(9), np.array([1, 2, 0, 1, 3, 1, 2, 1, 1.0])
    times = rng.integers(0, 4, size=(20, 9))
    found = weighted_quantiles(np.where(counts > 0, values, np.nan), counts, times)
    for draw, median in zip(times, found, strict=True):
        repeated = np.sort(np.repeat(values, (draw * counts).astype(int)))
        assert median == repeated[(len(repeated) - 1) // 2]
    quarter = weighted_quantiles(np.arange(1, 9.0), np.ones(8), np.ones((1, 8), dtype=int), 0.25)
    assert quarter.tolist() == [2.0]


class Busy:
    """A target whose passes take 30 ms longer while `slow` is set."""

    def __init__(self, target):
        self.target, self.slow, self.read_quickly = target, False, target.read

    def read(self, *arguments, **more):
        if self.slow:
            time.sleep(0.03)
        return self.read_quickly(*arguments, **more)


def test_a_prompt_that_was_decoded_beside_other_work_is_decoded_again(tmp_path, capsys, monkeypatch):
    """One of six prompts is disturbed on purpose, in plain decoding only.

    It is decoded again, and the faster time stays. A second start of the evaluation does not decode it a third time.
    """
    target = load_target(composed("+drafter=dflash", "+target=tiny_llama").target, dtype="float32", device="cpu")
    save_drafter(
        make_drafter("dflash-shifted", target),
        tmp_path / "drafter",
        section=settings_of("dflash-shifted").section(),
        target=target.spec,
    )
    config = composed(
        "+drafter=dflash",
        "+target=tiny_llama",
        f"root={tmp_path}",
        f"++drafter.init={tmp_path / 'drafter'}",
        "++evaluate.dtype=float32",
        "++drafter.width=4",
        "++drafter.taps=[0,1,3]",
    )
    prompts = [list(range(60 + number, 70 + number)) for number in range(6)]
    responses = [
        Response(f"p{number}", "all", ids, decode_plain(target, ids, max_new_tokens=24), False, "")
        for number, ids in enumerate(prompts)
    ]
    evaluation = Evaluation(config, tmp_path / "evaluation", {"untouched": tmp_path / "drafter"}, responses)
    busy, decode_prompt = Busy(evaluation.target), evaluation.decode_prompt
    monkeypatch.setattr(evaluation.target, "read", busy.read)
    seen = []

    def decoded(settings, response):
        seen.append(response.id)
        busy.slow = response.id == "p1" and seen.count("p1") == 1
        plain = decode_prompt(settings[:1], response)
        busy.slow = False
        return decode_prompt(settings, response) | plain

    monkeypatch.setattr(evaluation, "decode_prompt", decoded)
    settings = [Setting(PLAIN, None, Never()), Setting("untouched S=1", "untouched", Never())]
    evaluation.decode_live(settings, responses)
    assert seen.count("p1") == 2 and "p1" in seen[6:] and "the machine was busy during" in capsys.readouterr().err
    rows = read_jsonl(tmp_path / "evaluation" / "rounds" / "plain-decoding.jsonl")
    assert rows[1]["again"] and max(Timing.of([replaced]).clock[0] for replaced in rows) < 24 * 0.03
    write_jsonl(
        tmp_path / "evaluation" / "rounds" / "plain-decoding.jsonl",
        [row | {"seconds": row["seconds"] * (100 if row["id"] == "p1" else 1)} for row in rows],
    )
    # A second start: p1 was decoded twice before, so it is not decoded again even if its stored time is long.
    evaluation.decode_live(settings, responses)
    assert seen.count("p1") == 2


def test_the_table_says_that_the_machine_was_busy():
    def setting(over, again, spread=0.01):
        return {"label": "plain decoding", "clock": {"over_usual": over, "decoded_again": again, "spread": spread}}

    quiet = {"settings": [setting(1.01, 0)], "run": {"prompts": 16}}
    assert busyness(quiet) == ""
    said = busyness({"settings": [setting(1.02, 0), setting(1.31, 2)], "run": {"prompts": 16}})
    assert "1.31 times" in said and "2 of 16 prompts were decoded twice" in said
    unsteady = busyness({"settings": [setting(1.01, 0, 0.31)], "run": {"prompts": 16}})
    assert (
        "a round of one kind took 31% longer" in unsteady and "1.01 times" not in unsteady and "twice" not in unsteady
    )
    assert DISTURBED > 1 and replace(Setting("a b", None, Never()), label="A, b!").slug == "a-b"
