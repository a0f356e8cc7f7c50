"""Costs: seconds of a draft, of a verification by length and of the rest, and the speed they predict for simulated rounds."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from dloop_train.decoding.gates import Always, Never
from dloop_train.decoding.loop import decode
from dloop_train.drafters.base import Drafter
from dloop_train.targets.target import Target
from dloop_train.types import Round


@dataclass(frozen=True)
class Costs:
    """Seconds at batch 1."""

    draft_first: float
    draft_more: float
    verify: dict[int, float]
    """By the number of tokens verified, the anchor included."""
    overhead: float
    """Everything else of a round."""
    plain: float
    """One token of plain decoding."""

    def verification(self, tokens: int) -> float:
        """Interpolated between the measured lengths, extended by the last slope."""
        known = sorted(self.verify)
        low = max([n for n in known if n <= tokens][:-1] or [known[0]]) if tokens > known[-1] else max([n for n in known if n <= tokens] or [known[0]])
        high = known[-1] if tokens > known[-1] else min(n for n in known if n >= tokens)
        if high == low:
            return self.verify[low]
        return self.verify[low] + (self.verify[high] - self.verify[low]) * (tokens - low) / (high - low)

    def seconds(self, round: Round) -> float:
        return self.draft_first + (round.stages - 1) * self.draft_more + self.verification(round.drafted + 1) + self.overhead

    def tokens_per_second(self, rounds: Sequence[Round]) -> float:
        return sum(round.emitted for round in rounds) / max(sum(self.seconds(round) for round in rounds), 1e-12)

    def row(self) -> dict:
        return asdict(self)


def measure_costs(target: Target, drafter: Drafter, prompt: Sequence[int], *, stages: int, repeats: int = 7) -> Costs:
    """Median seconds of each part, measured on real rounds from one prompt."""
    length = 1 + stages * drafter.k * repeats
    rounds: list[Round] = []
    for depth in range(1, stages + 1):
        gate = Always(max_stages=depth)
        rounds += [emission.round for emission, _ in zip(decode(target, drafter, gate, prompt, max_new_tokens=length), range(repeats + 2), strict=False)][2:]
    plain = [emission.round for emission, _ in zip(decode(target, None, Never(), prompt, max_new_tokens=length), range(repeats + 2), strict=False)][2:]

    def part(name: str, chosen: Sequence[Round]) -> float:
        return median([round.seconds.get(name, 0.0) for round in chosen] or [0.0])

    verify = {1 + depth * drafter.k: part("verify", [r for r in rounds if r.stages == depth]) for depth in range(1, stages + 1) if any(r.stages == depth for r in rounds)}
    verify[1] = part("verify", plain)
    deep = [r.seconds["draft_more"] / (r.stages - 1) for r in rounds if r.stages > 1]
    return Costs(draft_first=part("draft_first", rounds), draft_more=median(deep or [0.0]), verify=verify,
                 overhead=part("commit", rounds) + part("gate", rounds), plain=sum(part(name, plain) for name in ("verify", "commit")))


def warm_up(target: Target, drafter: Drafter | None, prompt: Sequence[int]) -> float:
    """A few rounds that nobody counts; returns their seconds."""
    started = time.perf_counter()
    for _ in decode(target, drafter, Never() if drafter is None else Always(max_stages=2), prompt, max_new_tokens=8):
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
