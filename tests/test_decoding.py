"""Tests of decoding: lossless text, replay that equals live decoding, gates, oracle and costs."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import VARIANTS, make_drafter
from teaching import counting_prompts, taught_drafter

from dloop_train.config import CONF, build, option
from dloop_train.decoding.costs import Costs, measure_costs
from dloop_train.decoding.gates import Always, DLoop, Gate, Never, log_probability
from dloop_train.decoding.loop import Emission, clip, decode
from dloop_train.decoding.replay import compare, regroup, replay, walk_gate, walk_oracle
from dloop_train.phases.evaluate import parting_gap
from dloop_train.phases.replaying import full_acceptance, sweep, tau_of
from dloop_train.phases.validation import gate_scores
from dloop_train.targets.head import most_likely
from dloop_train.targets.responders import decode_plain
from dloop_train.types import Round

LENGTH = 24
GATES = [
    Never(),
    Always(max_stages=3),
    *(DLoop(threshold=g, max_stages=cap) for g, cap in ((-0.05, 4), (-0.5, 4))),
    DLoop(threshold=-0.5, max_stages=4, temperature=0.5),
    DLoop(threshold=-12.0),
    *(pytest.param(DLoop(threshold=g, max_stages=cap), marks=pytest.mark.slow) for g, cap in ((-0.5, 2), (-12.0, 4))),
]


@pytest.fixture(scope="module")
def taught(taught_target):
    return {variant: taught_drafter(variant, taught_target) for variant in VARIANTS}


@functools.cache
def plain(target, prompt: tuple[int, ...]) -> list[int]:
    return decode_plain(target, list(prompt), max_new_tokens=LENGTH)


def run(target, drafter, gate, prompt, length=LENGTH):
    emissions = list(decode(target, drafter, gate, prompt, max_new_tokens=length))
    return [token for e in emissions for token in e.tokens], [e.round for e in emissions if e.round is not None]


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_output_is_the_targets_own(gate, variant, taught, taught_target, tiny_target):
    for target, drafter in ((taught_target, taught[variant]), (tiny_target, make_drafter(variant, tiny_target))):
        for prompt in counting_prompts(2).tolist():
            text, rounds = run(target, drafter, gate, prompt)
            assert text == plain(target, tuple(prompt))
            assert 1 + sum(round.emitted for round in rounds) == len(text)


def test_drafts_are_accepted_and_loops_happen(taught, taught_target):
    """The tests above would prove little if no draft were ever accepted."""
    for variant, drafter in taught.items():
        rounds = [
            r
            for prompt in counting_prompts(6).tolist()
            for r in run(taught_target, drafter, DLoop(threshold=-12.0, max_stages=4), prompt)[1]
        ]
        assert max(r.stages for r in rounds) > 1, variant
        assert max(r.accepted for r in rounds) > drafter.k, variant


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_replay_is_live(gate, variant, taught, taught_target):
    """Simulated and decoded rounds are equal in stages, drafted, accepted and emitted tokens, and scores."""
    drafter = taught[variant]
    for prompt in counting_prompts(3).tolist():
        text, live = run(taught_target, drafter, gate, prompt)
        record = replay(
            taught_target,
            drafter,
            prompt,
            text,
            stages=min(2, gate.max_stages),
            deepest=gate.max_stages,
            floor=gate.floor([]),
            max_new_tokens=LENGTH,
            temperature=gate.temperature,
            branches=7,
        )
        walked = walk_gate(record, gate)
        assert [(r.stages, r.drafted, r.accepted, r.emitted) for r in walked] == [
            (r.stages, r.drafted, r.accepted, r.emitted) for r in live
        ]
        for a, b in zip(walked, live, strict=True):
            if gate.needs_scores:
                assert a.scores == pytest.approx(b.scores, abs=1e-4)


def test_replay_follows_a_branch_only_while_a_gate_may(variant, taught, taught_target):
    """Gates with a threshold at or above the floor give the same rounds as if all stages had been drafted everywhere.

    A gate that needs a stage that was not drafted is refused.
    """
    drafter, prompt = taught[variant], counting_prompts(1)[0].tolist()
    text, _ = run(taught_target, drafter, Never(), prompt)
    whole = replay(taught_target, drafter, prompt, text, stages=5, max_new_tokens=LENGTH)
    floor = whole.scores.flatten().median().item()
    record = replay(
        taught_target, drafter, prompt, text, stages=1, deepest=5, floor=floor, max_new_tokens=LENGTH, branches=7
    )
    left_out = record.scores == float("-inf")
    assert left_out.sum() > 0 and (~left_out[:, 1:]).any()
    torch.testing.assert_close(record.scores[~left_out], whole.scores[~left_out])
    for threshold in (floor, 0.5 * floor, -1e-3):
        gate = DLoop(threshold=threshold, max_stages=5)
        assert [(r.stages, r.accepted, r.emitted) for r in walk_gate(record, gate)] == [
            (r.stages, r.accepted, r.emitted) for r in walk_gate(whole, gate)
        ]
    first_alone = replay(taught_target, drafter, prompt, text, stages=1, deepest=1, max_new_tokens=LENGTH)
    with pytest.raises(AssertionError, match="fewer stages"):
        walk_gate(first_alone, Always(max_stages=5))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("variant", ["eagle3-reduced", "eagle3-fc_norm", "mtp"])
def test_a_chain_regrouped_is_the_chain_with_other_stages(variant, k, taught, taught_target, monkeypatch):
    """A replay with one token per stage contains what gates read after every k tokens, so it is enough for every k.

    This also holds after stop tokens.
    """
    drafter, prompt, deepest = taught[variant], counting_prompts(1)[0].tolist(), 7
    text, _ = run(taught_target, drafter, Never(), prompt)
    monkeypatch.setattr(taught_target, "spec", dataclasses.replace(taught_target.spec, stop_ids=(80, 81)))
    monkeypatch.setattr(drafter, "k", 1)
    single = replay(taught_target, drafter, prompt, text, stages=deepest, ahead=k, max_new_tokens=LENGTH)
    monkeypatch.setattr(drafter, "k", k)
    found, wanted = (
        regroup(single, k),
        replay(taught_target, drafter, prompt, text, stages=deepest // k, max_new_tokens=LENGTH),
    )
    torch.testing.assert_close(found.scores, wanted.scores)
    assert (found.k, found.stages, found.length, found.known) == (wanted.k, wanted.stages, wanted.length, wanted.known)
    assert (
        torch.equal(found.stopped, wanted.stopped)
        and (found.stopped <= found.stages).any()
        and (found.stopped > found.stages).any()
    )
    assert (
        torch.equal(*(each.clamp(max=deepest // k * k) for each in (found.accepted, wanted.accepted)))
        and wanted.accepted.max() >= k
    )
    for gate in (Never(), Always(max_stages=2), DLoop(threshold=-0.5, max_stages=deepest // k)):
        assert [(r.stages, r.accepted, r.emitted) for r in walk_gate(found, gate)] == [
            (r.stages, r.accepted, r.emitted) for r in walk_gate(wanted, gate)
        ]


def test_what_cannot_be_regrouped_is_refused(taught, taught_target):
    drafter, prompt = taught["eagle3-fc_norm"], counting_prompts(1)[0].tolist()
    text, _ = run(taught_target, drafter, Never(), prompt)
    with pytest.raises(ValueError, match="one token a stage"):
        regroup(replay(taught_target, drafter, prompt, text, stages=2, max_new_tokens=LENGTH), 2)
    drafter.k = 1
    try:
        with pytest.raises(ValueError, match="replay with ahead=2"):
            regroup(replay(taught_target, drafter, prompt, text, stages=2, max_new_tokens=LENGTH), 2)
        with pytest.raises(ValueError, match="from some"):
            regroup(
                replay(taught_target, drafter, prompt, text, stages=2, deepest=6, ahead=2, max_new_tokens=LENGTH), 2
            )
    finally:
        drafter.k = 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_most_likely_token_is_the_first_of_equals(dtype):
    # In bf16 many rows have ties.
    logits = torch.randn(50, 3, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(most_likely(logits), logits.argmax(-1))
    assert most_likely(torch.tensor([0.0, 2.0, 1.0, 2.0])).item() == 1


def test_log_probabilities_are_those_of_the_tempered_softmax():
    logits = torch.randn(3, 11, dtype=torch.float64)
    for temperature in (0.5, 1.0, 2.0):
        everything = torch.log_softmax(logits.float() / temperature, dim=-1)
        torch.testing.assert_close(log_probability(logits, logits.argmax(-1), temperature), everything.amax(-1))
        torch.testing.assert_close(
            log_probability(logits, torch.tensor([4, 0, 10]), temperature), everything[range(3), [4, 0, 10]]
        )


def test_stop_tokens_end_a_round_alike(taught, taught_target):
    """With frequent tokens as stop tokens, live decoding and replay have equal rounds, and the text ends there."""
    target = taught_target
    spec = target.spec
    target.spec = dataclasses.replace(spec, stop_ids=(80, 81))
    try:
        for drafter in taught.values():
            for prompt in counting_prompts(4).tolist():
                text, live = run(target, drafter, DLoop(threshold=-3.0, max_stages=4), prompt)
                assert text == decode_plain(target, prompt, max_new_tokens=LENGTH)
                walked = walk_gate(
                    replay(target, drafter, prompt, text, stages=4, max_new_tokens=LENGTH),
                    DLoop(threshold=-3.0, max_stages=4),
                )
                assert [(r.stages, r.accepted, r.emitted) for r in walked] == [
                    (r.stages, r.accepted, r.emitted) for r in live
                ]
    finally:
        target.spec = spec


def test_one_stage_is_no_loop(variant, taught, taught_target):
    """DLoop's gate with max_stages=1 gives the rounds of ordinary speculative decoding."""
    prompt = counting_prompts(1)[0].tolist()
    _, a = run(taught_target, taught[variant], DLoop(threshold=-1e-12, max_stages=1), prompt)
    _, b = run(taught_target, taught[variant], Never(), prompt)
    assert [(r.stages, r.accepted, r.emitted) for r in a] == [(r.stages, r.accepted, r.emitted) for r in b]


COSTS = Costs(draft_first=0.2, draft_more=0.3, gate=0.01, verify={1: 1.0, 5: 1.1, 9: 1.4}, overhead=0.05, plain=1.0)


@pytest.mark.parametrize("variant", ["dflash-shifted", "eagle3-reduced"])
def test_no_gate_is_faster_than_the_oracle(variant, taught, taught_target):
    """This holds for any cost of a round and any gate with the same cap.

    The oracle is the same if later stages were drafted only where a gate or the oracle may continue.
    """
    drafter = taught[variant]
    for prompt in counting_prompts(2).tolist():
        text, _ = run(taught_target, drafter, Never(), prompt)
        followed = replay(taught_target, drafter, prompt, text, stages=1, deepest=6, floor=-3.0, max_new_tokens=LENGTH)
        whole = replay(taught_target, drafter, prompt, text, stages=6, max_new_tokens=LENGTH)
        for seconds in (lambda one: COSTS.seconds(one, gated=False), lambda one: float(one.stages**2), lambda one: 1.0):
            fastest = [sum(map(seconds, walk_oracle(record, seconds, 6))) for record in (followed, whole)]
            assert fastest[0] == pytest.approx(fastest[1])
            for gate in (
                Never(),
                *(Always(max_stages=cap) for cap in (1, 2, 6)),
                *(DLoop(threshold=g, max_stages=6) for g in (-0.05, -0.5, -3.0)),
            ):
                assert sum(map(seconds, walk_gate(whole, gate))) >= fastest[0] - 1e-9
        # The oracle goes as deep as the gate's cap, not only to the stages that were drafted from every position.
        swept = [sweep([record], [-3.0], COSTS, drafter.k, 6) for record in (followed, whole)]
        assert (
            swept[0]["oracle"] == pytest.approx(swept[1]["oracle"])
            and swept[0]["oracle"]["tokens_per_second"] >= swept[0]["sweep"][0]["tokens_per_second"]
        )
        assert swept[0]["oracle"]["stages"] > 1


class Right:
    """A drafter that is never wrong: it drafts the tokens of a fixed text, k per stage."""

    k, text = 15, list(range(1000, 1200))

    @classmethod
    def record(cls, length, stages):
        tokens = torch.tensor([cls.text[t + 1 : t + 1 + cls.k * stages] for t in range(length)])
        return compare(
            tokens,
            torch.full((length, stages), -0.01),
            cls.text[: length + cls.k],
            length,
            k=cls.k,
            stages=stages,
            max_new_tokens=length,
            stops=[0],
        )


def test_a_drafter_that_is_never_wrong_is_seen_as_one():
    """The end of the text is not counted as a rejection, and the last round counts completely.

    The oracle goes as deep as the gate's cap.
    """
    record = Right.record(96, 4)
    assert full_acceptance([walk_gate(record, Always(max_stages=4))], Right.k, 4)[0] == 1.0
    assert tau_of([walk_gate(record, Never())]) == Right.k + 1
    found = gate_scores([record])
    assert found["gate_calibration"][-1] == 1.0
    swept = sweep([record], [-0.5], COSTS, Right.k, 4)
    assert (
        swept["oracle"]["tau"] >= swept["sweep"][0]["tau"] > 2 * Right.k
        and swept["oracle"]["tokens_per_second"] >= swept["sweep"][0]["tokens_per_second"]
    )


def test_gate_reads_the_newest_block():
    gate = DLoop(threshold=-0.5, max_stages=3)
    assert gate.more([-0.5]) and gate.more([-9.0, -0.1])
    assert not gate.more([-0.1, -0.51]) and not gate.more([-0.1, -0.1, -0.1])


def test_every_gate_yaml_builds():
    for path in (CONF / "gate").glob("*.yaml"):
        assert isinstance(build(option("gate", path.stem), Gate, "gate"), Gate)
    with pytest.raises(ValueError, match="cannot be positive"):
        DLoop(threshold=0.5)
    with pytest.raises(ValueError, match="gate.paper_threshold, which is not given"):
        DLoop()


def test_clip():
    assert clip([5, 2, 7], {2}, 9) == [5, 2]
    assert clip([5, 7, 2], {2}, 2) == [5, 7]


def test_costs_interpolate_and_add_up():
    costs = Costs(
        draft_first=1.0, draft_more=0.5, gate=0.125, verify={1: 2.0, 5: 4.0, 9: 8.0}, overhead=0.25, plain=2.0
    )
    assert costs.verification(3) == 3.0 and costs.verification(5) == 4.0 and costs.verification(11) == 10.0
    assert costs.seconds(Round(2, 8, 0, 1, ()), gated=False) == 1.0 + 0.5 + 8.0 + 0.25
    # The gate's time is charged for both stages.
    assert costs.seconds(Round(2, 8, 0, 1, ()), gated=True) == 1.0 + 0.5 + 8.0 + 0.25 + 2 * 0.125


def test_plain_decoding_through_the_same_path(tiny_target):
    prompt = counting_prompts(1)[0].tolist()
    text, rounds = run(tiny_target, None, Never(), prompt)
    assert text == decode_plain(tiny_target, prompt, max_new_tokens=LENGTH)
    assert all((r.stages, r.drafted, r.emitted) == (0, 0, 1) for r in rounds)


def test_empty_prompt_is_refused(tiny_target):
    with pytest.raises(ValueError, match="prompt is empty"):
        next(decode(tiny_target, None, Never(), [], max_new_tokens=4))


def test_commit_gathers_rows(tiny_target):
    """After a commit of a path with a gap, the KV cache has the earlier rows and exactly those of the path."""
    cache = tiny_target.new_cache()
    tiny_target.read(torch.arange(60, 68)[None], cache=cache)
    keys = cache.layers[0].keys.clone()
    tiny_target.commit(cache, 5, [0, 2])
    assert torch.equal(cache.layers[0].keys, keys[:, :, [0, 1, 2, 3, 4, 5, 7]])


def test_parting_gap_is_how_far_the_targets_logits_are_apart(tiny_target):
    prompt, plain = [60, 61, 62], decode_plain(tiny_target, [60, 61, 62], max_new_tokens=6)
    assert parting_gap(tiny_target, prompt, plain, list(plain)) is None
    other = [*plain[:3], (plain[3] + 1) % 250, *plain[4:]]
    logits = tiny_target.read(torch.tensor([prompt + plain[:3]]), logits=slice(-1, None)).logits[0, -1]
    rounding = torch.finfo(torch.float64).eps * float(logits[[plain[3], other[3]]].abs().max())
    assert parting_gap(tiny_target, prompt, plain, other) == pytest.approx(
        float(logits[plain[3]] - logits[other[3]]) / rounding
    )


def test_costs_forget_what_was_cold_and_let_the_depths_take_turns(monkeypatch):
    """The first turn, and the first round of every call, are slow here and must not enter the medians.

    All depths and plain decoding take turns, prompt by prompt.
    """
    calls = []

    def decoded(target, drafter, gate, prompt, *, max_new_tokens):
        depth = 0 if drafter is None else 1 if isinstance(gate, Never) else gate.max_stages
        calls.append((prompt, depth))
        cold = len(calls) <= 4
        yield Emission([0], None)
        for number in range(8):
            slow = cold or number == 0
            yield Emission(
                [0],
                Round(
                    depth,
                    depth * 2,
                    0,
                    1,
                    (),
                    {
                        "draft_first": 0.5,
                        "draft_more": 0.1 * (depth - 1),
                        "gate": 0.01 * depth,
                        "commit": 0.0,
                        "verify": 9.0 if slow else 1.0 + depth / 10,
                    },
                ),
            )

    monkeypatch.setattr("dloop_train.decoding.costs.decode", decoded)
    costs = measure_costs(None, SimpleNamespace(k=2), ["a", "b"], stages=3)
    assert (
        costs.verify == pytest.approx({1: 1.0, 3: 1.1, 5: 1.2, 7: 1.3})
        and costs.draft_more == pytest.approx(0.1)
        and costs.gate == pytest.approx(0.01)
        and costs.plain == pytest.approx(1.0)
    )
    assert calls == [(prompt, depth) for prompt in "abababa" for depth in (1, 2, 3, 0)]
