"""Costs: seconds of a draft, of a verification by length and of the rest, and the speed they predict for simulated rounds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle, islice
from statistics import median

from dloop_train.config import check
from dloop_train.decoding.gates import DLoop, Never
from dloop_train.decoding.loop import Clock, decode
from dloop_train.decoding.rules import GREEDY, AcceptanceRule
from dloop_train.drafters.base import Drafter
from dloop_train.targets.target import Target
from dloop_train.types import Round


@dataclass(frozen=True)
class Costs:
    """Seconds at batch 1."""

    draft_first: float
    draft_more: float
    gate: float
    """One stage's score and the decision on it; a gate pays it after every stage, the first included."""
    verify: dict[int, float]
    """By the number of tokens verified, the anchor included."""
    overhead: float
    """Everything else of a round."""
    plain: float
    """One token of plain decoding."""

    def verification(self, tokens: int) -> float:
        return verification_seconds(self.verify, tokens)

    def parts(self, round: Round, *, gated: bool) -> dict[str, float]:
        """Seconds of a round by part, as decoding reports them, with or without a gate that looks at scores."""
        return {
            "draft_first": self.draft_first,
            "draft_more": (round.stages - 1) * self.draft_more,
            "gate": gated * round.stages * self.gate,
            "verify": self.verification(round.drafted + 1),
            "commit": self.overhead,
        }

    def seconds(self, round: Round, *, gated: bool) -> float:
        return sum(self.parts(round, gated=gated).values())

    def tokens_per_second(self, rounds: Sequence[Round], *, gated: bool) -> float:
        return sum(round.emitted for round in rounds) / max(
            sum(self.seconds(round, gated=gated) for round in rounds), 1e-12
        )

    def row(self) -> dict:
        return asdict(self)

    @staticmethod
    def of(row: dict) -> "Costs":
        """Back from a row, also one that was JSON."""
        names = {field.name for field in fields(Costs)}
        check(
            row.keys() == names,
            f"a cost table has {sorted(names)}, this one {sorted(row)}: another version measured it; delete its costs.json and run again",
        )
        return Costs(**(row | {"verify": {int(tokens): seconds for tokens, seconds in row["verify"].items()}}))


def verification_seconds(measured: dict[int, float], tokens: int) -> float:
    """Seconds of verifying so many tokens: interpolated between the measured lengths, extended by the outermost slopes."""
    known = sorted(measured)
    if len(known) == 1:
        return measured[known[0]]
    high = next((place for place in range(1, len(known)) if known[place] >= tokens), len(known) - 1)
    low, high = known[high - 1], known[high]
    return measured[low] + (measured[high] - measured[low]) * (tokens - low) / (high - low)


MEASURED_DEPTH = 3
"""Stages up to which costs are measured; what is deeper is extended from them."""
TURNS, ROUNDS = 6, 5
"""Of a measurement: how often every depth has its turn, and how many rounds it has then. The first round of each is not counted."""


def measure_costs(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, stages: int) -> Costs:
    """Median seconds of each part of one drafter's rounds, up to so many stages."""
    return measure_all(target, [(drafter, stages)], prompts)[0]


def measure_all(
    target: Target, drafters: Sequence[tuple[Drafter, int]], prompts: Sequence[Sequence[int]]
) -> list[Costs]:
    """Cost tables of several drafters, each with the stages it is measured up to, on real rounds that compare with one another.

    All depths of all drafters and plain decoding take turns, prompt by prompt; the first turn finds everything cold and is not counted. A
    machine that slows down for a while slows plain decoding too: each turn's seconds are scaled by what plain decoding took in it.
    What a verification takes goes by its tokens alone, so that all tables share it, and more tokens take no less time (`increasing`).
    """
    ways = [
        (number, drafter, Never() if depth == 1 else DLoop(threshold=-1e9, max_stages=depth))
        for number, (drafter, stages) in enumerate(drafters)
        for depth in range(1, stages + 1)
    ] + [(PLAIN, None, Never())]
    found: dict[int, list[Round]] = {number: [] for number in (*range(len(drafters)), PLAIN)}
    turns: list[dict[int, list[Round]]] = []
    for turn, prompt in zip(range(TURNS + 1), cycle(prompts), strict=False):
        taken: dict[int, list[Round]] = {number: [] for number in found}
        for number, drafter, gate in ways:
            k, stages = (
                (drafter.k, drafters[number][1])
                if drafter is not None
                else (max(one.k for one, _ in drafters), max(most for _, most in drafters))
            )
            emissions = decode(target, drafter, gate, prompt, max_new_tokens=1 + stages * k * (ROUNDS + 1))
            taken[number] += [emission.round for emission in islice(emissions, 1, ROUNDS + 2)][
                1:
            ]  # behind the prefill's token and the first round
        turns += [taken] if turn else []
    usual = part_of([one for taken in turns for one in taken[PLAIN]], "verify")
    for taken in turns:
        pace = usual / (part_of(taken[PLAIN], "verify") or usual or 1.0)
        for number, rounds in taken.items():
            found[number] += [
                replace(one, seconds={part: seconds * pace for part, seconds in one.seconds.items()}) for one in rounds
            ]
    verify = verifications([one for rounds in found.values() for one in rounds])
    plain = sum(part_of(found[PLAIN], name) for name in ("verify", "commit"))
    return [
        costs_of(found[number], drafter.k, stages, verify, plain) for number, (drafter, stages) in enumerate(drafters)
    ]


PLAIN = -1
"""Stands for plain decoding among the numbers of drafters."""


def part_of(rounds: Sequence[Round], name: str) -> float:
    return median([one.seconds.get(name, 0.0) for one in rounds] or [0.0])


def verifications(rounds: Sequence[Round]) -> dict[int, float]:
    """Seconds by the number of tokens verified: medians, pooled until they increase."""
    counts = Counter(one.drafted + 1 for one in rounds)
    return increasing(
        {
            tokens: (part_of([one for one in rounds if one.drafted + 1 == tokens], "verify"), counts[tokens])
            for tokens in sorted(counts)
        }
    )


def increasing(measured: dict[int, tuple[float, int]]) -> dict[int, float]:
    """Least-squares fit that never falls, of values with counts at ascending places (isotonic regression by pooling adjacent violators).

    A verification could be padded to a longer one, so that where a shorter one came out slower, the machine's noise is what was measured.
    """
    pools: list[tuple[float, int, list[int]]] = []
    for place, (value, count) in measured.items():
        pools.append((value, count, [place]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, before, first), (high, after, second) = pools[-2:]
            pools[-2:] = [((low * before + high * after) / (before + after), before + after, first + second)]
    return {place: value for value, _, places in pools for place in places}


def costs_of(rounds: Sequence[Round], k: int, stages: int, verify: dict[int, float], plain: float) -> Costs:
    """One drafter's table from its own rounds, and what all drafters share."""
    deep = [one.seconds["draft_more"] / (one.stages - 1) for one in rounds if one.stages > 1]
    gates = [one.seconds["gate"] / one.stages for one in rounds if one.stages > 1]
    if not all(any(one.stages == depth for one in rounds) for depth in range(1, stages + 1)):
        raise ValueError(
            "costs could not be measured: the answers are too short for a round of every depth; take prompts with longer answers, or more of them "
            "(train.validate_prompts, evaluate.prompts). A training alone does without: train.validate_prompts=0 gate.threshold=-0.5"
        )
    return Costs(
        draft_first=part_of(rounds, "draft_first"),
        draft_more=median(deep or [0.0]),
        gate=median(gates or [0.0]),
        verify=verify,
        overhead=part_of(rounds, "commit"),
        plain=plain,
    )


def warm_up(target: Target, drafter: Drafter | None, prompt: Sequence[int], rule: AcceptanceRule = GREEDY) -> float:
    """A few rounds that nobody counts; returns their seconds."""
    clock = Clock(target.device)
    gate = Never() if drafter is None else DLoop(threshold=-1e9, max_stages=2)
    for _ in decode(
        target, drafter, gate, prompt, max_new_tokens=8 if drafter is None else 1 + 4 * drafter.k, rule=rule
    ):
        pass
    return clock.now() - clock.last
