"""Costs: seconds of a draft, of a verification by length and of the rest, and the speed they predict for simulated rounds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import cycle, islice
from statistics import median

from dloop_train.config import check
from dloop_train.decoding.gates import DLoop, Never
from dloop_train.decoding.loop import Clock, decode
from dloop_train.decoding.rules import GREEDY, Rule
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
        return {"draft_first": self.draft_first, "draft_more": (round.stages - 1) * self.draft_more, "gate": gated * round.stages * self.gate,
                "verify": self.verification(round.drafted + 1), "commit": self.overhead}

    def seconds(self, round: Round, *, gated: bool) -> float:
        return sum(self.parts(round, gated=gated).values())

    def tokens_per_second(self, rounds: Sequence[Round], *, gated: bool) -> float:
        return sum(round.emitted for round in rounds) / max(sum(self.seconds(round, gated=gated) for round in rounds), 1e-12)

    def row(self) -> dict:
        return asdict(self)

    @staticmethod
    def of(row: dict) -> "Costs":
        """Back from a row, also one that was JSON."""
        names = {field.name for field in fields(Costs)}
        check(row.keys() == names, f"a cost table has {sorted(names)}, this one {sorted(row)}: another version measured it; delete its costs.json and run again")
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
TURNS, ROUNDS = 3, 5
"""Of a measurement: how often every depth has its turn, and how many rounds it has then. The first round of each is not counted."""


def measure_costs(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, stages: int) -> Costs:
    """Median seconds of each part, measured on real rounds. All depths take turns, prompt by prompt, so that the machine's moods
    meet them alike; the first turn finds everything cold and is not counted."""
    ways = [(drafter, Never() if depth == 1 else DLoop(threshold=-1e9, max_stages=depth)) for depth in range(1, stages + 1)] + [(None, Never())]
    found: list[list[Round]] = [[] for _ in ways]
    for turn, prompt in zip(range(TURNS + 1), cycle(prompts), strict=False):
        for (drafting, gate), rounds in zip(ways, found, strict=True):
            emissions = decode(target, drafting, gate, prompt, max_new_tokens=1 + stages * drafter.k * (ROUNDS + 1))
            taken = [emission.round for emission in islice(emissions, 1, ROUNDS + 2)][1:]  # behind the prefill's token and the first round
            rounds += taken if turn else []
    *drafted, plain = found
    rounds = [round for way in drafted for round in way]

    def part(name: str, chosen: Sequence[Round]) -> float:
        return median([round.seconds.get(name, 0.0) for round in chosen] or [0.0])

    verify = {1 + depth * drafter.k: part("verify", [r for r in rounds if r.stages == depth]) for depth in range(1, stages + 1) if any(r.stages == depth for r in rounds)}
    verify[1] = part("verify", plain)
    deep = [r.seconds["draft_more"] / (r.stages - 1) for r in rounds if r.stages > 1]
    gates = [r.seconds["gate"] / r.stages for r in rounds if r.stages > 1]
    if (stages > 1 and not deep) or len(verify) <= stages:
        raise ValueError("costs could not be measured: the answers are too short for a round of every depth; take prompts with longer answers, or more of them "
                         "(train.validate_prompts, evaluate.prompts). A training alone does without: train.validate_prompts=0 gate.threshold=-0.5")
    return Costs(draft_first=part("draft_first", rounds), draft_more=median(deep or [0.0]), gate=median(gates or [0.0]), verify=verify,
                 overhead=part("commit", rounds), plain=sum(part(name, plain) for name in ("verify", "commit")))


def warm_up(target: Target, drafter: Drafter | None, prompt: Sequence[int], rule: Rule = GREEDY) -> float:
    """A few rounds that nobody counts; returns their seconds."""
    clock = Clock(target.device)
    gate = Never() if drafter is None else DLoop(threshold=-1e9, max_stages=2)
    for _ in decode(target, drafter, gate, prompt, max_new_tokens=8 if drafter is None else 1 + 4 * drafter.k, rule=rule):
        pass
    return clock.now() - clock.last
