"""Acceptance rules: how draft tokens are chosen, and which of them the target accepts.

The emitted text has the target's own distribution at every temperature.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop_train.config import check
from dloop_train.targets.head import most_likely


class SampleRng:
    """Random numbers of one response. They depend only on seed and identity, not on other responses or the device."""

    def __init__(self, seed: int = 0, identity: str = ""):
        key = hashlib.sha256(f"{seed}/{identity}".encode()).digest()[:8]
        self.generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))

    def draw(self, probabilities: Tensor) -> Tensor:
        """Sample an index from each row, by inverse transform. [..., V] -> [...]"""
        cumulative = probabilities.double().cumsum(-1)
        uniform = torch.rand(probabilities.shape[:-1], generator=self.generator, dtype=torch.float64).to(
            cumulative.device
        )
        drawn = torch.searchsorted(cumulative, uniform[..., None] * cumulative[..., -1:], right=True)[..., 0]
        return drawn.clamp(max=probabilities.shape[-1] - 1)

    def flip(self, probability: float) -> bool:
        """True with this probability; never for 0, always for 1."""
        return torch.rand((), generator=self.generator, dtype=torch.float64).item() < probability


@dataclass(kw_only=True)
class AcceptanceRule:
    """Chooses the tokens of a draft and decides which of them are accepted.

    At temperature 0 every rule is greedy: a drafted token is accepted if it is the target's most likely one.
    """

    temperature: float = 0.0
    """Temperature of the target's logits; 0 is greedy."""
    draft_temperature: float | None = None
    """Temperature of the drafter's logits. null takes the target's temperature; 0 drafts the most likely tokens."""
    seed: int = 0
    """Seed of the samples."""

    def __post_init__(self):
        check(self.temperature >= 0, f"rule.temperature must not be negative, got {self.temperature}")
        check(
            self.draft_temperature is None or self.draft_temperature >= 0,
            f"rule.draft_temperature must not be negative, got {self.draft_temperature}",
        )
        check(
            self.temperature > 0 or not self.draft_temperature,
            f"rule.draft_temperature is {self.draft_temperature} where rule.temperature is 0: decoding is greedy then; "
            f"raise rule.temperature or leave the other null",
        )

    @property
    def drafts_at(self) -> float:
        """The temperature at which drafts are sampled."""
        return self.temperature if self.draft_temperature is None else self.draft_temperature

    def row(self) -> dict:
        """The rule's entries in evaluations and reports."""
        return {
            "rule": type(self).__name__.lower(),
            "temperature": self.temperature,
            "draft_temperature": self.drafts_at,
        }

    def propose(self, logits: Tensor, rng: SampleRng) -> tuple[Tensor, Tensor | None]:
        """Draft ids [...] chosen from logits [..., V], and the distributions [..., V] that they were sampled from.

        The ids are of the draft vocabulary. The distributions are None if the ids are the most likely ones.
        """
        if self.drafts_at == 0:
            return most_likely(logits), None
        probabilities = distribution(logits, self.drafts_at)
        return rng.draw(probabilities), probabilities

    def verify(self, drafted: Sequence[int], proposed: Tensor | None, logits: Tensor, rng: SampleRng) -> list[int]:
        """The drafted tokens that the target accepts, followed by one token of the target's own.

        logits [n + 1, V] are the target's; row i is for the token after the first i drafted ones. proposed [n, V] are
        the distributions over the target's vocabulary that the n drafted tokens were sampled from. It is None if they
        are the most likely tokens.
        """
        if self.temperature == 0:
            return confirmed(drafted, most_likely(logits).tolist())
        return self.verify_sampled(drafted, proposed, distribution(logits, self.temperature), rng)

    def verify_sampled(
        self, drafted: Sequence[int], proposed: Tensor | None, target: Tensor, rng: SampleRng
    ) -> list[int]:
        """`verify` above temperature 0; target [n + 1, V] are the target's distributions."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Rejection(AcceptanceRule):
    """Speculative sampling: accept a drafted token x with probability min(1, p(x) / q(x)).

    The first rejected token is replaced by a sample from max(p - q, 0), normalised.
    """

    def verify_sampled(
        self, drafted: Sequence[int], proposed: Tensor | None, target: Tensor, rng: SampleRng
    ) -> list[int]:
        if proposed is None:  # most likely tokens, not samples: q is 1 at the drafted token
            proposed = F.one_hot(torch.tensor(drafted, dtype=torch.int64, device=target.device), target.shape[-1]).to(
                target.dtype
            )
        accepted = 0
        for ratio in acceptance(target[:-1], proposed, drafted):
            if not rng.flip(ratio):
                return [*drafted[:accepted], int(rng.draw(residual(target[accepted], proposed[accepted])))]
            accepted += 1
        return [*drafted, int(rng.draw(target[-1]))]


@dataclass(kw_only=True)
class Match(AcceptanceRule):
    """Sample the target's own token at every position, and accept drafted tokens as long as the two are equal."""

    def verify_sampled(
        self, drafted: Sequence[int], proposed: Tensor | None, target: Tensor, rng: SampleRng
    ) -> list[int]:
        drawn: list[int] = []
        for row in target:
            drawn.append(int(rng.draw(row)))
            if drawn != drafted[: len(drawn)]:
                break
        return drawn


GREEDY = Rejection()


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax in fp32 or better, used both for sampling and for acceptance. [..., V] -> [..., V]"""
    return torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)


def acceptance(target: Tensor, proposed: Tensor, drafted: Sequence[int]) -> list[float]:
    """min(1, p(x) / q(x)) of each drafted token. [n, V] twice -> n numbers"""
    tokens = torch.tensor(drafted, dtype=torch.int64, device=target.device)[:, None]
    return (target.gather(1, tokens) / proposed.gather(1, tokens)).clamp(max=1)[:, 0].tolist()


def residual(target: Tensor, proposed: Tensor) -> Tensor:
    """max(p - q, 0), normalised: the distribution of a rejected token's replacement. [V] twice -> [V]"""
    rest = (target - proposed).clamp(min=0)
    rest = torch.where(rest.sum() > 0, rest, target)  # p = q, and the rejection came from rounding
    return rest / rest.sum()


def confirmed(drafted: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """The drafted prefix that equals the target's own choices, then the target's next token.

    predicted[i] is the target's choice after the first i drafted tokens.
    """
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == predicted[accepted]:
        accepted += 1
    return [*drafted[:accepted], predicted[accepted]]
