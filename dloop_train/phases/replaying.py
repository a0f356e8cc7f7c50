"""Replay of a set of responses: the numbers by which thresholds and checkpoints are chosen."""

from collections.abc import Sequence
from functools import partial

from dloop_train.data.responses import Response
from dloop_train.decoding.costs import Costs
from dloop_train.decoding.gates import DLoop, Gate, Never
from dloop_train.decoding.replay import Replay, continuation, replay, walk_gate, walk_oracle
from dloop_train.drafters.base import Drafter
from dloop_train.targets.target import Target
from dloop_train.types import Round

Beyond = dict[str, list[int]]
"""The target's tokens after the end of each response, by response id: decoded once, for all drafters."""


def replayable(responses: Sequence[Response]) -> list[Response]:
    """The responses that have a token to draft after the prefill's token."""
    return [response for response in responses if len(response.response_ids) > 1]


def replay_all(
    target: Target,
    drafter: Drafter,
    responses: Sequence[Response],
    gate: Gate,
    thresholds: Sequence[float],
    beyond: Beyond,
    *,
    stages: int,
    max_new_tokens: int,
) -> list[Replay]:
    """Replay the responses, at a depth from which the gate can be simulated at any of the thresholds.

    `stages` stages are drafted from every position, but at most as many as the gate allows. Later stages are drafted
    if the gate may draft them at the lowest threshold. Missing entries of `beyond` are added.
    """
    records = []
    for r in replayable(responses):
        if len(beyond.get(r.id, ())) < drafter.k:
            beyond[r.id] = continuation(target, r.prompt_ids, r.response_ids, drafter.k)
        records.append(
            replay(
                target,
                drafter,
                r.prompt_ids,
                r.response_ids,
                stages=min(stages, gate.max_stages),
                deepest=gate.max_stages,
                floor=gate.floor(thresholds),
                max_new_tokens=max_new_tokens,
                temperature=gate.temperature,
                beyond=beyond[r.id],
            )
        )
    return records


def tau_of(walks: Sequence[Sequence[Round]]) -> float:
    """Mean over responses of the mean emitted tokens per verification, bonus included."""
    means = [sum(round.accepted + 1 for round in walk) / len(walk) for walk in walks if walk]
    return sum(means) / max(len(means), 1)


def full_acceptance(walks: Sequence[Sequence[Round]], k: int, stages: int) -> list[float]:
    """For each stage s: of the rounds that drafted it, the share with all s k tokens accepted; 0 if none drafted it."""
    rates = []
    for stage in range(1, stages + 1):
        reached = [round for walk in walks for round in walk if round.stages >= stage]
        rates.append(sum(round.accepted >= stage * k for round in reached) / len(reached) if reached else 0.0)
    return rates


def next_stage_tokens(records: Sequence[Replay], stage: int = 2) -> dict:
    """Mean accepted tokens of one stage over the positions where all earlier stages were accepted completely.

    Also returns the number of these positions. Positions from which the known text does not reach the end of the stage
    are left out, whatever was drafted there.
    """
    assert all(stage <= record.stages for record in records), "replay drafted fewer stages than are asked about"
    before = stage - 1
    tokens = [
        min(accepted - before * r.k, r.k)
        for r in records
        for t, accepted in enumerate(r.accepted.tolist())
        if accepted >= before * r.k and t + stage * r.k < r.known
    ]
    return {"tokens": sum(tokens) / max(len(tokens), 1), "positions": len(tokens)}


def candidates(gate: Gate, thresholds: Sequence[float]) -> list[float]:
    """The thresholds that a gate may get, in descending order; none for gates without one."""
    if gate.by_replay:
        return sorted({gate.paper_threshold, *thresholds}, reverse=True)
    return [gate.threshold] if isinstance(gate, DLoop) else []


def fastest(sweep: Sequence[dict], preferred: float) -> dict:
    """The point of a sweep with the most predicted tokens per second.

    On a tie the one with the preferred threshold is taken, then the one with the highest.
    """
    return max(
        sweep, key=lambda point: (point["tokens_per_second"], point["threshold"] == preferred, point["threshold"])
    )


def predicted(walks: Sequence[Sequence[Round]], costs: Costs, *, gated: bool) -> dict:
    """Tau, predicted tokens per second and stages per round of simulated rounds.

    `gated`: whether the time of a gate that reads scores is included.
    """
    rounds = [round for walk in walks for round in walk]
    return {
        "tau": tau_of(walks),
        "tokens_per_second": costs.tokens_per_second(rounds, gated=gated),
        "stages": sum(r.stages for r in rounds) / max(len(rounds), 1),
    }


def simulated(records: Sequence[Replay], gate: Gate, costs: Costs) -> dict:
    """The numbers of `predicted` for a gate."""
    return predicted([walk_gate(record, gate) for record in records], costs, gated=gate.needs_scores)


def sweep(records: Sequence[Replay], thresholds: Sequence[float], costs: Costs, k: int, max_stages: int) -> dict:
    """The numbers of `predicted` for S = 1, every threshold and the oracle, with at most max_stages stages.

    No gate is faster than the oracle. Full acceptance is for the stages that were drafted from every position.
    """
    stages = records[0].stages if records else 1
    # No score is below this threshold, so the gate ends no round before its last stage.
    always = [walk_gate(record, DLoop(threshold=-1e9, max_stages=stages)) for record in records]
    return {
        "k": k,
        "S1": simulated(records, Never(), costs),
        "oracle": predicted(
            [walk_oracle(record, partial(costs.seconds, gated=False), max_stages) for record in records],
            costs,
            gated=False,
        ),
        "sweep": [
            {"threshold": threshold, **simulated(records, DLoop(threshold=threshold, max_stages=max_stages), costs)}
            for threshold in thresholds
        ],
        "full_acceptance_by_stage": full_acceptance(always, k, stages),
    }
