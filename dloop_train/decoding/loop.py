"""The gated drafting loop at batch 1: draft stages until the gate stops, verify them at once, commit."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dloop_train.config import check
from dloop_train.decoding.gates import Gate, log_probability
from dloop_train.decoding.rules import GREEDY, AcceptanceRule, SampleRng
from dloop_train.drafters.base import Drafter
from dloop_train.targets.target import Target
from dloop_train.types import Context, DraftState, FeatureSpec, Round


@dataclass(frozen=True)
class Emission:
    """Tokens that are emitted together. The first emission comes from the prefill and has no round."""

    tokens: list[int]
    round: Round | None

    @property
    def drafted_by(self) -> list[int]:
        """The stage (from 1) that drafted each token; 0 for the target's own."""
        return [0] * len(self.tokens) if self.round is None else self.round.drafted_by(len(self.tokens))


@dataclass(frozen=True)
class Drafted:
    """Result of drafting one stage."""

    tokens: list[int]
    ids: Tensor  # [k] the same tokens in the draft vocabulary
    logits: Tensor  # [k, V] over the draft vocabulary
    # The distributions that the ids were sampled from, [rows, V] each; empty if nothing was sampled.
    proposed: list[Tensor]
    state: DraftState


@dataclass(frozen=True)
class Draft:
    """Result of drafting all stages of a round."""

    tokens: list[int]
    proposed: Tensor | None  # [n, V] over the draft vocabulary
    scores: list[float]  # one per stage
    state: DraftState | None


class Clock:
    """Seconds by part of a round. Synchronises the accelerator, so that each part is charged its own work."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, {}
        self.last = self.now()

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def charge(self, part: str) -> None:
        """Add the seconds since the last charge to this part."""
        now = self.now()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter | None,
    gate: Gate,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    rule: AcceptanceRule = GREEDY,
    rng: SampleRng | None = None,
) -> Iterator[Emission]:
    """Emit the target's own continuation of `prompt`, round by round, until a stop token or the length limit.

    The continuation is greedy, or sampled from the target's distribution at the rule's temperature. Without a drafter
    each round is one plain step of the target, through the same code path.
    """
    check(len(prompt) > 0, "the prompt is empty; it needs at least one token")
    check(max_new_tokens >= 1, f"max_new_tokens must be positive, got {max_new_tokens}")
    feature_spec = drafter.shape.feature_spec if drafter is not None else FeatureSpec()
    device, stops = target.device, set(target.spec.stop_ids)
    rng = rng or SampleRng(rule.seed)
    cache = target.new_cache()
    output = target.read(
        torch.tensor([list(prompt)], device=device), cache=cache, feature_spec=feature_spec, logits=slice(-1, None)
    )
    [anchor] = rule.verify([], None, output.logits[0], rng)
    origin, left = len(prompt), max_new_tokens - 1  # position of the anchor; tokens that may still be emitted
    yield Emission([anchor], None)
    if anchor in stops or not left:
        return
    state = None
    if drafter is not None:
        tokens = torch.tensor([[*prompt, anchor]], device=device)
        state = drafter.begin(Context(tokens, output.features), torch.tensor([[origin]], device=device))
    while True:
        clock = Clock(device)
        draft = draft_round(drafter, gate, rule, rng, state, anchor, left, stops, clock)
        state = draft.state
        output = target.read(
            torch.tensor([[anchor, *draft.tokens]], device=device),
            cache=cache,
            feature_spec=feature_spec,
            logits=slice(None),
        )
        proposed = None if draft.proposed is None else over_target(draft.proposed, drafter, output.logits.shape[-1])
        verified = rule.verify(draft.tokens, proposed, output.logits[0], rng)
        accepted = len(verified) - 1
        clock.charge("verify")
        emitted = clip(verified, stops, left)
        left -= len(emitted)
        over = emitted[-1] in stops or not left
        if not over:
            target.commit(cache, origin, range(accepted + 1))
            if drafter is not None:
                known = torch.tensor([[anchor, *emitted]], device=device)
                state = drafter.commit(state, Context(known, output.features[:, : accepted + 1], start=origin))
            origin, anchor = origin + accepted + 1, emitted[-1]
        clock.charge("commit")
        yield Emission(
            emitted,
            Round(len(draft.scores), len(draft.tokens), accepted, len(emitted), tuple(draft.scores), clock.seconds),
        )
        if over:
            return


def draft_round(
    drafter: Drafter | None,
    gate: Gate,
    rule: AcceptanceRule,
    rng: SampleRng,
    state: DraftState | None,
    anchor: int,
    left: int,
    stops: set[int],
    clock: Clock,
) -> Draft:
    """Draft stages until the gate, a drafted stop token or the length limit ends the round."""
    drafted: list[int] = []
    proposed: list[Tensor] = []
    scores: list[float] = []
    while drafter is not None:
        stage = draft_stage(drafter, rule, rng, state, anchor)
        drafted += stage.tokens
        proposed += stage.proposed
        state, anchor = stage.state, stage.tokens[-1]
        clock.charge("draft_more" if scores else "draft_first")
        scores.append(
            float(log_probability(stage.logits, stage.ids, gate.temperature).sum()) if gate.needs_scores else 0.0
        )
        more = gate.more(scores)
        clock.charge("gate")
        if not more or stops.intersection(stage.tokens) or len(drafted) + drafter.k > left:
            break
    return Draft(drafted, torch.cat(proposed) if proposed else None, scores, state)


def draft_stage(drafter: Drafter, rule: AcceptanceRule, rng: SampleRng, state: DraftState, anchor: int) -> Drafted:
    """Draft one stage after `anchor`; the rule chooses its tokens."""
    ids: list[Tensor] = []
    seen: list[Tensor] = []
    proposed: list[Tensor] = []

    def pick(logits: Tensor) -> Tensor:
        chosen, probabilities = rule.propose(logits, rng)
        ids.append(chosen.flatten())
        seen.append(logits.flatten(0, -2))  # [1, V] of one slot, or [k, V] of all
        if probabilities is not None:
            proposed.append(probabilities.flatten(0, -2))
        return drafter.token_ids(chosen)

    anchors = torch.tensor([[anchor]], device=state.origin.device)
    stage = drafter.stage(state, anchors, lambda step, hidden: pick(drafter.logits(hidden)))
    tokens = drafter.draft_tokens(stage, anchors, pick)
    return Drafted(tokens[0, 0].tolist(), torch.cat(ids), torch.cat(seen), proposed, stage.state)


def over_target(proposed: Tensor, drafter: Drafter, vocab_size: int) -> Tensor:
    """Extend distributions over the draft vocabulary with zeros to the target's vocabulary. [n, V'] -> [n, V]"""
    ids = drafter.token_ids(torch.arange(proposed.shape[-1], device=proposed.device))
    return proposed.new_zeros(len(proposed), vocab_size).index_copy(1, ids, proposed)


def clip(tokens: list[int], stops: set[int], left: int) -> list[int]:
    """The tokens up to the first stop token, which is included, and at most `left` of them."""
    for number, token in enumerate(tokens[:left]):
        if token in stops:
            return tokens[: number + 1]
    return tokens[:left]
