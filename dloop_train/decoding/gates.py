"""Gates: stopping rules that decide after every stage whether to draft another one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dloop_train.config import check

REPLAY = "replay"


def log_probability(logits: Tensor, chosen: Tensor, temperature: float = 1.0) -> Tensor:
    """fp32 log-probability of each row's chosen id, the paper's l_i. [..., V] and [...] -> [...]"""
    precise = logits.float() if temperature == 1.0 else logits.float() / temperature
    return precise.gather(-1, chosen[..., None])[..., 0] - torch.logsumexp(precise, dim=-1)


@dataclass(kw_only=True)
class Gate:
    """A stopping rule. It depends only on what is already drafted, which keeps decoding lossless."""

    max_stages: int = 16
    """Safety cap on the stages of a round."""
    temperature: float = 1.0
    """Divides the drafter's logits for the score; an ablation. Independent of the decoding temperature."""

    needs_scores = True
    threshold = None
    """Lowest score that continues a round; None for gates that do not compare scores."""
    paper_threshold = None
    by_replay = False
    """Whether the threshold is chosen by replay and not known yet."""

    def __post_init__(self):
        check(self.max_stages >= 1, f"gate.max_stages must be positive, got {self.max_stages}")
        check(self.temperature > 0, f"gate.temperature must be positive, got {self.temperature}")

    def floor(self, thresholds: Sequence[float]) -> float:
        """The score below which neither this gate nor one with any of `thresholds` drafts another stage."""
        return float("-inf")

    def more(self, scores: Sequence[float]) -> bool:
        """Whether to draft another stage.

        `scores` holds the summed log-probability of each stage's tokens so far, newest last.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class DLoop(Gate):
    """Drafts another stage if the newest block's summed log-probability is at least the threshold, the paper's g."""

    threshold: float | str = REPLAY
    """g, or `replay`: the threshold that replay on validation responses predicts to be fastest.

    The candidates are evaluate.thresholds and `paper_threshold`.
    """
    paper_threshold: float | None = None
    """The paper's g for this pair: a candidate of `replay`, and used where replay chooses none."""

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

    def with_threshold(self, threshold: float) -> "DLoop":
        """A copy of this gate with the given threshold."""
        return replace(self, threshold=threshold)

    def floor(self, thresholds: Sequence[float]) -> float:
        return min([self.paper_threshold if self.by_replay else self.threshold, *thresholds])

    def more(self, scores: Sequence[float]) -> bool:
        return len(scores) < self.max_stages and scores[-1] >= self.threshold


@dataclass(kw_only=True)
class Never(Gate):
    """One stage per round: ordinary speculative decoding."""

    needs_scores = False

    def floor(self, thresholds: Sequence[float]) -> float:
        return min(thresholds, default=float("inf"))

    def more(self, scores: Sequence[float]) -> bool:
        return False


@dataclass(kw_only=True)
class Always(Gate):
    """A fixed depth: max_stages stages in every round."""

    max_stages: int = 2
    needs_scores = False

    def more(self, scores: Sequence[float]) -> bool:
        return len(scores) < self.max_stages
