"""Costs: measured seconds of each part of a round, and the speed they predict for simulated rounds."""

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
    """Seconds of each part of a round at batch 1."""

    draft_first: float
    draft_more: float
    gate: float
    """Scoring one stage and deciding on it. Charged for every stage, the first included."""
    verify: dict[int, float]
    """Verification, by its number of tokens, the anchor included."""
    overhead: float
    """The rest of a round."""
    plain: float
    """One token of plain decoding."""

    def verification(self, tokens: int) -> float:
        return verification_seconds(self.verify, tokens)

    def parts(self, round: Round, *, gated: bool) -> dict[str, float]:
        """Seconds of a round by part, named as in decoding. `gated`: whether the gate reads scores and costs time."""
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
        """The inverse of `row`, also for a row read from JSON."""
        names = {field.name for field in fields(Costs)}
        check(
            row.keys() == names,
            f"a cost table has {sorted(names)}, this one {sorted(row)}: another version measured it; "
            f"delete its costs.json and run again",
        )
        return Costs(**(row | {"verify": {int(tokens): seconds for tokens, seconds in row["verify"].items()}}))


def verification_seconds(measured: dict[int, float], tokens: int) -> float:
    """Seconds to verify `tokens` tokens.

    Interpolated linearly between measured lengths. Outside them, extrapolated with the slope of the nearest two.
    """
    known = sorted(measured)
    if len(known) == 1:
        return measured[known[0]]
    high = next((place for place in range(1, len(known)) if known[place] >= tokens), len(known) - 1)
    low, high = known[high - 1], known[high]
    return measured[low] + (measured[high] - measured[low]) * (tokens - low) / (high - low)


MEASURED_DEPTH = 3
"""Largest number of stages of a measured round. Costs of deeper rounds are extrapolated."""
TURNS, ROUNDS = 6, 5
"""Counted turns of every depth in a measurement, and counted rounds per turn.

One more turn, and one more round per turn, run first and are not counted.
"""


def measure_costs(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, stages: int) -> Costs:
    """Cost table of one drafter, from rounds of 1 to `stages` stages."""
    return measure_all(target, [(drafter, stages)], prompts)[0]


def measure_all(
    target: Target, drafters: Sequence[tuple[Drafter, int]], prompts: Sequence[Sequence[int]]
) -> list[Costs]:
    """Cost tables of several drafters, each measured on real rounds of 1 to its given number of stages.

    All depths of all drafters and plain decoding take turns, prompt by prompt, so that the tables are comparable.
    The first turn warms up and is not counted. A machine that slows down for a while slows plain decoding too, so each
    turn's seconds are scaled by plain decoding's seconds in that turn. The time of a verification depends only on its
    number of tokens. All tables therefore share it, and it never decreases with the number of tokens (`increasing`).
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
            # Skips the prefill's emission, which has no round, and the first round.
            taken[number] += [emission.round for emission in islice(emissions, 1, ROUNDS + 2)][1:]
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
"""Key of plain decoding, where drafters have their index as the key."""


def part_of(rounds: Sequence[Round], name: str) -> float:
    return median([one.seconds.get(name, 0.0) for one in rounds] or [0.0])


def verifications(rounds: Sequence[Round]) -> dict[int, float]:
    """Median verification seconds by the number of tokens, made non-decreasing."""
    counts = Counter(one.drafted + 1 for one in rounds)
    return increasing(
        {
            tokens: (part_of([one for one in rounds if one.drafted + 1 == tokens], "verify"), counts[tokens])
            for tokens in sorted(counts)
        }
    )


def increasing(measured: dict[int, tuple[float, int]]) -> dict[int, float]:
    """Isotonic regression: the non-decreasing least-squares fit, by pooling adjacent violators.

    `measured` maps ascending places to (value, count), and counts are the weights. A verification could be padded to
    a longer one, so a shorter one that measured slower is noise of the machine.
    """
    pools: list[tuple[float, int, list[int]]] = []
    for place, (value, count) in measured.items():
        pools.append((value, count, [place]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, before, first), (high, after, second) = pools[-2:]
            pools[-2:] = [((low * before + high * after) / (before + after), before + after, first + second)]
    return {place: value for value, _, places in pools for place in places}


def costs_of(rounds: Sequence[Round], k: int, stages: int, verify: dict[int, float], plain: float) -> Costs:
    """Cost table of one drafter from its own rounds and the `verify` and `plain` times that all drafters share.

    Raises ValueError if there is no round of some depth up to `stages`.
    """
    deep = [one.seconds["draft_more"] / (one.stages - 1) for one in rounds if one.stages > 1]
    gates = [one.seconds["gate"] / one.stages for one in rounds if one.stages > 1]
    if not all(any(one.stages == depth for one in rounds) for depth in range(1, stages + 1)):
        raise ValueError(
            "costs could not be measured: the answers are too short for a round of every depth; "
            "take prompts with longer answers, or more of them "
            "(train.validate_prompts, evaluate.prompts). "
            "A training alone does without: train.validate_prompts=0 gate.threshold=-0.5"
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
    """Run a few uncounted rounds, and return their total seconds."""
    clock = Clock(target.device)
    gate = Never() if drafter is None else DLoop(threshold=-1e9, max_stages=2)
    for _ in decode(
        target, drafter, gate, prompt, max_new_tokens=8 if drafter is None else 1 + 4 * drafter.k, rule=rule
    ):
        pass
    return clock.now() - clock.last
