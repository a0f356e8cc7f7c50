"""Statistics of decoding: tau, speedup, bootstrap intervals, acceptance by stage, gate calibration.

Everything is computed from response rows, one per line of rounds/<slug>.jsonl:
{"id", "category", "tokens", "seconds", "rounds": [...]}.
The bootstrap draws prompts, identified by "id", and all settings use the same draws.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dloop_train.decoding.costs import verification_seconds
from dloop_train.decoding.timing import Timing

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def tau(rows: list[dict]) -> float:
    """Emitted tokens per verification, macro: the mean over responses of the mean over rounds of accepted + 1."""
    return float(tau_by_response(rows).mean())


def tau_micro(rows: list[dict]) -> float:
    """Micro tau: the mean of accepted + 1 over all rounds, so that long responses count more."""
    return float(np.mean([one["accepted"] + 1 for one in rounds_of(rows)]))


def speedup(rows: list[dict], baseline: list[dict]) -> float:
    """The baseline's seconds per token divided by those of these rows, each a mean over responses."""
    return float(seconds_per_token(baseline).mean() / seconds_per_token(rows).mean())


def speedup_micro(rows: list[dict], baseline: list[dict]) -> float:
    """Micro speedup: as `speedup`, with total seconds divided by total tokens instead of the mean over responses."""
    return pooled_seconds_per_token(baseline) / pooled_seconds_per_token(rows)


def tau_by_response(rows: list[dict]) -> Floats:
    return np.array([np.mean([one["accepted"] + 1 for one in row["rounds"]]) for row in rows])


def seconds_per_token(rows: list[dict]) -> Floats:
    return np.array([row["seconds"] / row["tokens"] for row in rows])


def pooled_seconds_per_token(rows: list[dict]) -> float:
    return sum(row["seconds"] for row in rows) / sum(row["tokens"] for row in rows)


def rounds_of(rows: list[dict]) -> list[dict]:
    return [one for row in rows for one in row["rounds"]]


# Intervals


def tau_estimate(rows: list[dict], *, draws: int, seed: int = 0) -> Estimate:
    return Estimate(tau(rows), *interval(resampled_means(rows, tau_by_response(rows), draws, seed)))


def speedup_estimate(rows: list[dict], baseline: list[dict], *, draws: int, seed: int = 0) -> Estimate:
    """Speedup over the baseline, paired by prompt.

    If the baseline is another drafter, this is the ratio of the two drafters' speedups over plain decoding.
    """
    require_same_prompts(rows, baseline)
    slow = resampled_means(baseline, seconds_per_token(baseline), draws, seed)
    fast = resampled_means(rows, seconds_per_token(rows), draws, seed)
    return Estimate(speedup(rows, baseline), *interval(slow / fast))


def usual_speedup_estimate(rows: list[dict], baseline: list[dict], *, draws: int, seed: int = 0) -> Estimate:
    """Speedup over the baseline with every round charged its usual time (timing.py), paired by prompt.

    Usual times are computed again for every draw, so that the interval includes their uncertainty.
    """
    require_same_prompts(rows, baseline)
    fast, slow = Timing.of(rows), Timing.of(baseline)
    value = float((slow.seconds() / slow.tokens).mean() / (fast.seconds() / fast.tokens).mean())
    return Estimate(
        value,
        *interval(
            slow.resampled_seconds_per_token(drawn_rows(baseline, draws, seed))
            / fast.resampled_seconds_per_token(drawn_rows(rows, draws, seed))
        ),
    )


def drawn_rows(rows: list[dict], draws: int, seed: int) -> NDArray[np.int64]:
    """How often each row is in each draw of prompts. -> [draws, R]

    The same seed draws the same prompts for every setting.
    """
    prompts, owner = np.unique([row["id"] for row in rows], return_inverse=True)
    return np.random.default_rng(seed).multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), size=draws)[
        :, owner
    ]


def resampled_means(rows: list[dict], values: Floats, draws: int, seed: int) -> Floats:
    """Means over the responses of prompts drawn with replacement. -> [draws]

    The same seed draws the same prompts for every setting.
    """
    times = drawn_rows(rows, draws, seed)
    return (times @ values) / times.sum(1)


def interval(values: Floats) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def require_same_prompts(rows: list[dict], others: list[dict]) -> None:
    differ = {row["id"] for row in rows} ^ {row["id"] for row in others}
    if differ:
        raise ValueError(
            f"settings were run on different prompts: {len(differ)} are in one only, such as {min(differ)}; "
            "rerun phases=[evaluate]"
        )


# Stages


def full_acceptance(rows: list[dict], k: int) -> list[dict]:
    """For each stage: the rounds that drafted it, and the share of them with all tokens up to its end accepted.

    `full` is the share of all rounds that drafted the stage. `full_given_previous` is the share of those whose earlier
    stages were fully accepted: only in them was this stage's block tested.
    """
    rounds = rounds_of(rows)
    stages, accepted = column(rounds, "stages"), column(rounds, "accepted")
    result = []
    for stage in range(1, int(stages.max(initial=0)) + 1):
        drafted = stages >= stage
        tested = drafted & (accepted >= (stage - 1) * k)
        full = drafted & (accepted >= stage * k)
        result.append(
            {
                "stage": stage,
                "rounds": int(drafted.sum()),
                "full": share(full, drafted),
                "full_given_previous": share(full, tested),
            }
        )
    return result


def by_depth(rows: list[dict]) -> list[dict]:
    """Rounds, emitted tokens and seconds by S, the number of stages."""
    rounds = rounds_of(rows)
    stages, emitted = column(rounds, "stages"), column(rounds, "emitted")
    seconds = np.array([sum(one["seconds"].values()) for one in rounds])
    return [
        {
            "stages": int(depth),
            "rounds": int((stages == depth).sum()),
            "tokens": int(emitted[stages == depth].sum()),
            "seconds": float(seconds[stages == depth].sum()),
        }
        for depth in np.unique(stages)
    ]


def by_category(rows: list[dict]) -> dict[str, float]:
    """Macro tau of each category."""
    return {
        category: tau([row for row in rows if row["category"] == category])
        for category in sorted({row["category"] for row in rows})
    }


def column(rounds: list[dict], key: str) -> NDArray[np.int64]:
    return np.array([one[key] for one in rounds], dtype=np.int64)


def share(part: NDArray, whole: NDArray) -> float | None:
    """Share of the true entries of `whole` that are true in `part`; None if there are none."""
    return float(part.sum() / whole.sum()) if whole.any() else None


# Gate


def calibration(rows: list[dict], *, k: int, stage: int, threshold: float, bins: int = 10) -> dict:
    """The gate's score of one stage, compared with full acceptance of its block.

    Only rounds whose earlier stages were fully accepted count, since only these test the block. Bins have equal width
    in exp(score), the probability that the drafter gives to its own block. `passed` is the share of rounds whose score
    reaches the threshold, and `precision` the share of fully accepted blocks among these. `auroc` is the probability
    that a fully accepted block has a higher score than one that is not. Each is None if there is no data for it.
    """
    tested = [one for one in rounds_of(rows) if len(one["scores"]) >= stage and one["accepted"] >= (stage - 1) * k]
    scores = np.array([one["scores"][stage - 1] for one in tested], dtype=np.float64)
    full = column(tested, "accepted") >= stage * k
    passed = scores >= threshold
    return {
        "stage": stage,
        "rounds": len(tested),
        "auroc": auroc(scores[full], scores[~full]),
        "passed": share(passed, np.ones_like(passed)),
        "precision": share(full & passed, passed),
        "bins": score_bins(np.exp(scores), full, bins),
    }


def score_bins(probability: Floats, full: NDArray[np.bool_], bins: int) -> list[dict]:
    """The bins with at least one round: edges, mean probability and observed share of full acceptance."""
    index = np.minimum((probability * bins).astype(int), bins - 1)
    return [
        {
            "low": float(number / bins),
            "high": float((number + 1) / bins),
            "rounds": int((index == number).sum()),
            "probability": float(probability[index == number].mean()),
            "full": float(full[index == number].mean()),
        }
        for number in np.unique(index)
    ]


def auroc(positive: Floats, negative: Floats) -> float | None:
    """Probability that a positive is greater than a negative; a tie counts half. None if either is missing."""
    if not len(positive) or not len(negative):
        return None
    ordered = np.sort(negative)
    below, not_above = np.searchsorted(ordered, positive, "left"), np.searchsorted(ordered, positive, "right")
    return float((below + not_above).mean() / 2 / len(negative))


# Time


def time_shares(rows: list[dict]) -> dict:
    """Shares of decoding time. The clock of a response starts after its first draft, whose time is added here.

    `outside_forwards` is the share outside drafting and verification: gate, commit and unrecorded time.
    """
    rounds = rounds_of(rows)
    parts = {
        name: sum(one["seconds"].get(name, 0.0) for one in rounds)
        for name in ("draft_first", "draft_more", "gate", "verify")
    }
    total = sum(row["seconds"] + row["rounds"][0]["seconds"].get("draft_first", 0.0) for row in rows)
    draft = parts["draft_first"] + parts["draft_more"]
    return {
        "seconds_per_round": total / len(rounds),
        "draft_to_verify": draft / parts["verify"],
        "gate": parts["gate"] / total,
        "outside_forwards": 1 - (draft + parts["verify"]) / total,
    }


def break_even(rows: list[dict], costs: dict, k: int) -> list[dict]:
    """The full-acceptance rate above which one more stage pays, for every depth s that some round exceeded.

    Stage s + 1 can only help if stages 1..s are fully accepted, with probability p. It then adds `a` tokens on average.
    A token is worth v, the setting's own seconds per token. The stage costs its draft, its gate and a longer
    verification:

        c = draft_more + gate + verify((s + 1) k + 1) - verify(s k + 1)

    The stage pays if p a v > c, that is, if p > c / (a v). `needed` is c / (a v); if it exceeds 1, no gate makes the
    stage pay. `observed` is p among the rounds that drafted stage s + 1.
    """
    rounds = rounds_of(rows)
    stages, accepted = column(rounds, "stages"), column(rounds, "accepted")
    value = pooled_seconds_per_token(rows)
    result = []
    for depth in range(1, int(stages.max(initial=0))):
        beyond = stages > depth
        helped = beyond & (accepted >= depth * k)
        gained = float(np.minimum(accepted[helped] - depth * k, k).mean()) if helped.any() else 0.0
        cost = (
            costs["draft_more"]
            + costs["gate"]
            + verify_seconds(costs, (depth + 1) * k + 1)
            - verify_seconds(costs, depth * k + 1)
        )
        result.append(
            {
                "depth": depth,
                "rounds": int(beyond.sum()),
                "cost_seconds": cost,
                "extra_tokens": gained,
                "needed": cost / (gained * value) if gained else None,
                "observed": share(helped, beyond),
            }
        )
    return result


def verify_seconds(costs: dict, tokens: int) -> float:
    """Seconds to verify `tokens` tokens, from a row of costs.json."""
    return verification_seconds({int(length): seconds for length, seconds in costs["verify"].items()}, tokens)
