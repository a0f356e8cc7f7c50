"""Gates: stopping rules that decide, after every stage, whether to draft on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dloop_train.config import check

REPLAY = "replay"


def log_probability(logits: Tensor, chosen: Tensor, temperature: float = 1.0) -> Tensor:
    """fp32 log-probability of each row's chosen id: the paper's l_i, untempered unless asked. [..., V] and [...] -> [...]"""
    precise = logits.float() if temperature == 1.0 else logits.float() / temperature
    return precise.gather(-1, chosen[..., None])[..., 0] - torch.logsumexp(precise, dim=-1)


@dataclass(kw_only=True)
class Gate:
    """A stopping rule. It sees only what is already drafted, which keeps decoding lossless."""

    max_stages: int = 16
    """Safety cap on the stages of a round."""
    temperature: float = 1.0
    """An ablation: log-probabilities of the drafter's logits divided by this. The decoding temperature does not enter."""

    needs_scores = True
    threshold = None
    """Of gates that compare a score with one."""
    paper_threshold = None
    by_replay = False
    """Whether the threshold is still to be chosen."""

    def __post_init__(self):
        check(self.max_stages >= 1, f"gate.max_stages must be positive, got {self.max_stages}")
        check(self.temperature > 0, f"gate.temperature must be positive, got {self.temperature}")

    def floor(self, thresholds: Sequence[float]) -> float:
        """A score below which this gate drafts no more, whichever of the thresholds it has."""
        return float("-inf")

    def more(self, scores: Sequence[float]) -> bool:
        """Draft another stage? `scores` holds the summed log-probability of each stage's tokens so far, newest last."""
        raise NotImplementedError


@dataclass(kw_only=True)
class DLoop(Gate):
    """Draft on while the newest block is likely: its summed log-probability is at least the threshold (the paper's g)."""

    threshold: float | str = REPLAY
    """g, or `replay`: the one of evaluate.thresholds and `paper_threshold` that replay on validation responses predicts to be fastest."""
    paper_threshold: float | None = None
    """The g that the paper names for this pair, which stands beside a chosen one."""

    def __post_init__(self):
        super().__post_init__()
        check(
            self.by_replay or not isinstance(self.threshold, str),
            f"gate.threshold must be a number or replay, got {self.threshold!r}",
        )
        check(
            not self.by_replay or self.paper_threshold is not None,
            "gate.threshold=replay falls back on gate.paper_threshold, which is not given; set it to a number",
        )
        for name in ("paper_threshold",) if self.by_replay else ("threshold", "paper_threshold"):
            check(
                (getattr(self, name) or 0) <= 0,
                f"gate.{name} is a log-probability and cannot be positive, got {getattr(self, name)}",
            )

    @property
    def by_replay(self) -> bool:
        return self.threshold == REPLAY

    def gather_at(self, threshold: float) -> "DLoop":
        """The same gate with this threshold."""
        return replace(self, threshold=threshold)

    def floor(self, thresholds: Sequence[float]) -> float:
        return min([self.paper_threshold if self.by_replay else self.threshold, *thresholds])

    def more(self, scores: Sequence[float]) -> bool:
        return len(scores) < self.max_stages and scores[-1] >= self.threshold


@dataclass(kw_only=True)
class Never(Gate):
    """One stage a round: ordinary speculative decoding."""

    needs_scores = False

    def floor(self, thresholds: Sequence[float]) -> float:
        return min(thresholds, default=float("inf"))

    def more(self, scores: Sequence[float]) -> bool:
        return False


@dataclass(kw_only=True)
class Always(Gate):
    """A fixed depth: always max_stages stages."""

    max_stages: int = 2
    needs_scores = False

    def more(self, scores: Sequence[float]) -> bool:
        return len(scores) < self.max_stages
