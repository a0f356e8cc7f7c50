"""Timing: usual seconds of the parts of a round, robust against other work on the machine.

A round's seconds come in parts (first draft, further drafts, gate, verification, the rest), and each part repeats
hundreds of times in a run. A round is charged the median of each of its parts: a verification by its number of tokens,
further drafts and gates once per stage. Rows are those of rounds/<slug>.jsonl (statistics.py).
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FREQUENT = 8
"""Rounds that a verification length needs for a median of its own.

Rarer lengths are interpolated or extrapolated linearly from the two nearest frequent ones.
"""
BUSY = 0.05
"""Relative difference between clock and usual times above which the machine counts as busy."""
SPREAD = 0.2
"""Value of Timing.spread above which the machine's speed counts as unsteady."""
DISTURBED = 1.25
"""Ratio of clock to usual time above which a response counts as disturbed."""


@dataclass(frozen=True)
class Timing:
    """One setting's rounds as amounts of each kind of work, with the measured seconds of a unit of each kind."""

    kinds: tuple[tuple[str, int], ...]
    """(part, tokens) of each kind; tokens is the length of a verification, and 0 for other parts."""
    # [R, K] units of each kind in a response. Its first draft is not counted, as the clock starts after it.
    work: Floats
    samples: tuple[tuple[Floats, Floats], ...]
    """For each kind: the median seconds of a unit in each response [R], and the number of rounds with a sample [R].

    The median is NaN if the response has no sample.
    """
    clock: Floats  # [R] measured seconds
    tokens: Floats  # [R] emitted tokens

    @staticmethod
    def of(rows: list[dict]) -> "Timing":
        lengths = frequent_lengths(rows)
        kinds = tuple(dict.fromkeys(kind for row in rows for one in row["rounds"] for kind in units(one, lengths)))
        place = {kind: number for number, kind in enumerate(kinds)}
        work = np.zeros((len(rows), len(kinds)))
        found: list[list[list[float]]] = [[[] for _ in rows] for _ in kinds]
        for number, row in enumerate(rows):
            for first, one in zip([True, *[False] * len(row["rounds"])], row["rounds"], strict=False):
                for (part, tokens), amount in units(one, lengths).items():
                    # The clock of a response starts after its first draft.
                    work[number, place[part, tokens]] += amount * (not (first and part == "draft_first"))
                    # A verification of a rare length is a mixture of two kinds, and a sample of neither.
                    if part != "verify" or tokens == one["drafted"] + 1:
                        found[place[part, tokens]][number].append(one["seconds"].get(part, 0.0) / amount)
        samples = tuple(
            (
                np.array([np.median(values) if values else np.nan for values in own]),
                np.array([float(len(values)) for values in own]),
            )
            for own in found
        )
        return Timing(
            kinds,
            work,
            samples,
            np.array([row["seconds"] for row in rows]),
            np.array([float(row["tokens"]) for row in rows]),
        )

    def costs(self, times: NDArray[np.int64], share: float = 0.5) -> Floats:
        """Usual seconds of a unit of each kind, for draws of responses. [draws, R] -> [draws, K]

        times[d, r] is how often draw d has response r. `share` is the quantile, by default the median.
        """
        found = [weighted_quantiles(values, counts, times, share) for values, counts in self.samples]
        return np.stack(found, axis=1) if self.kinds else np.zeros((len(times), 0))

    def usual_costs(self, share: float = 0.5) -> Floats:
        """`costs` with every response drawn once. [K]"""
        return self.costs(np.ones((1, len(self.work)), dtype=np.int64), share)[0]

    def seconds(self) -> Floats:
        """Usual seconds of each response. [R]"""
        return self.work @ self.usual_costs()

    def resampled_seconds_per_token(self, times: NDArray[np.int64]) -> Floats:
        """Mean seconds per token of the drawn responses, at usual costs from the same draw. [draws, R] -> [draws]"""
        amounts = times @ (self.work / self.tokens[:, None])  # [draws, K]
        return (amounts * self.costs(times)).sum(1) / times.sum(1)

    def disturbance(self) -> Floats:
        """Ratio of clock to usual seconds of each response. [R]"""
        return self.clock / np.maximum(self.seconds(), 1e-12)

    def busy(self) -> float:
        """Ratio of clock to usual seconds of all responses together; 1 on a quiet machine."""
        return float(self.clock.sum() / max(self.seconds().sum(), 1e-12))

    def spread(self) -> float:
        """Interquartile range of a kind's seconds divided by its median, averaged over kinds by their share of time.

        It is large if the machine's speed changed between responses, even if clock and usual times agree.
        """
        low, usual, high = (self.work.sum(0) @ self.usual_costs(share) for share in (0.25, 0.5, 0.75))
        return float((high - low) / max(usual, 1e-12))


def frequent_lengths(rows: list[dict]) -> list[int]:
    """Verification lengths (in tokens) that are frequent enough for a median; at least the two most frequent."""
    counts = Counter(one["drafted"] + 1 for row in rows for one in row["rounds"])
    return sorted(
        {tokens for tokens, count in counts.items() if count >= FREQUENT}
        | {tokens for tokens, _ in counts.most_common(2)}
    )


def units(one: dict, lengths: list[int]) -> dict[tuple[str, int], float]:
    """A round as amounts of each kind of work. A verification of a rare length is a mixture of two frequent ones."""
    amounts = {
        "draft_first": min(one["stages"], 1),
        "draft_more": one["stages"] - 1,
        "gate": one["stages"],
        "commit": 1,
    }
    parts = {(part, 0): float(amount) for part, amount in amounts.items() if amount > 0 and part in one["seconds"]}
    return parts | {
        ("verify", tokens): share for tokens, share in mixture(one["drafted"] + 1, lengths).items() if share
    }


def mixture(tokens: int, lengths: list[int]) -> dict[int, float]:
    """Weights of the two nearest `lengths` such that their weighted mean is `tokens`. Outside them, one is negative."""
    if tokens in lengths or len(lengths) == 1:
        return {tokens if tokens in lengths else lengths[0]: 1.0}
    high = next((place for place in range(1, len(lengths)) if lengths[place] >= tokens), len(lengths) - 1)
    low, high = lengths[high - 1], lengths[high]
    return {low: (high - tokens) / (high - low), high: (tokens - low) / (high - low)}


def weighted_quantiles(values: Floats, counts: Floats, times: NDArray[np.int64], share: float = 0.5) -> Floats:
    """Weighted quantile of the values, by default the median. [R], [R], [draws, R] -> [draws]

    The weight of a value is its count times how often its response was drawn. 0 for draws without any weight.
    """
    there = np.flatnonzero(counts)
    order = there[np.argsort(values[there], kind="stable")]
    weights = (times[:, order] * counts[order]).cumsum(1)  # [draws, R']
    place = (weights < weights[:, -1:] * share).sum(1)
    return np.where(weights[:, -1] > 0, values[order][np.minimum(place, len(order) - 1)], 0.0)


def steadied(rows: list[dict]) -> list[dict]:
    """The same rows with usual seconds for every part of every round; `clock` keeps the measured seconds."""
    timing, lengths = Timing.of(rows), frequent_lengths(rows)
    costs = dict(zip(timing.kinds, timing.usual_costs().tolist(), strict=True))
    result = []
    for row, seconds in zip(rows, timing.seconds().tolist(), strict=True):
        rounds = []
        for one in row["rounds"]:
            parts: dict[str, float] = {}
            for (part, tokens), amount in units(one, lengths).items():
                parts[part] = parts.get(part, 0.0) + amount * costs[part, tokens]
            rounds.append(one | {"seconds": parts})
        result.append(row | {"rounds": rounds, "seconds": seconds, "clock": row["seconds"]})
    return result


def disturbed(settings: list[list[dict]]) -> list[int]:
    """Indices of the prompts whose ratio of clock to usual time exceeded DISTURBED in some setting.

    The rows of every setting are in the order of the prompts.
    """
    ratios = np.stack([Timing.of(rows).disturbance() for rows in settings])
    return np.flatnonzero((ratios > DISTURBED).any(0)).tolist()
