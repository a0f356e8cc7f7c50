"""The gated drafting loop: draft stages while the gate says so, verify all at once, commit. Greedy, batch 1, lossless."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dloop_train.config import check
from dloop_train.decoding.gates import Gate, log_probability
from dloop_train.decoding.rules import accept_greedy
from dloop_train.drafters.base import Drafter
from dloop_train.targets.target import Target
from dloop_train.types import Context, DraftState, Reads, Round


@dataclass(frozen=True)
class Emission:
    """Tokens that became certain together. The first comes from the prefill and has no round."""

    tokens: list[int]
    round: Round | None


@dataclass(frozen=True)
class Drafted:
    """What one stage said."""

    tokens: list[int]
    logits: Tensor  # [k, V] over the draft vocabulary
    state: DraftState


class Clock:
    """Seconds by part; waits for the accelerator so that a part owns its work."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, {}
        self.last = self.now()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def charge(self, part: str) -> None:
        now = self.now()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now


@torch.inference_mode()
def decode(target: Target, drafter: Drafter | None, gate: Gate, prompt: Sequence[int], *, max_new_tokens: int) -> Iterator[Emission]:
    """Emit the target's own greedy continuation of `prompt`, round by round, until a stop token or the length limit.

    Without a drafter each round is one plain step of the target, through the same code path.
    """
    check(len(prompt) > 0, "the prompt is empty; it needs at least one token")
    check(max_new_tokens >= 1, f"max_new_tokens must be positive, got {max_new_tokens}")
    reads = drafter.shape.reads if drafter is not None else Reads()
    device, stops = target.device, set(target.spec.stop_ids)
    cache = target.new_cache()
    output = target.read(torch.tensor([list(prompt)], device=device), cache=cache, reads=reads, logits=slice(-1, None))
    anchor = int(output.logits[0, -1].argmax())
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
        drafted, scores, state = draft_round(drafter, gate, state, anchor, left, stops, clock)
        output = target.read(torch.tensor([[anchor, *drafted]], device=device), cache=cache, reads=reads, logits=slice(None))
        predicted = output.logits[0].argmax(-1).tolist()
        accepted = accept_greedy(drafted, predicted)
        clock.charge("verify")
        emitted = clip([*drafted[:accepted], predicted[accepted]], stops, left)
        left -= len(emitted)
        over = emitted[-1] in stops or not left
        if not over:
            target.commit(cache, origin, range(accepted + 1))
            if drafter is not None:
                known = torch.tensor([[anchor, *emitted]], device=device)
                state = drafter.commit(state, Context(known, output.features[:, :accepted + 1], start=origin))
            origin, anchor = origin + accepted + 1, emitted[-1]
        clock.charge("commit")
        yield Emission(emitted, Round(len(scores), len(drafted), accepted, len(emitted), tuple(scores), clock.seconds))
        if over:
            return


def draft_round(drafter: Drafter | None, gate: Gate, state: DraftState | None, anchor: int, left: int, stops: set[int],
                clock: Clock) -> tuple[list[int], list[float], DraftState | None]:
    """Stages until the gate, a drafted stop token or the length limit ends the round."""
    drafted: list[int] = []
    scores: list[float] = []
    while drafter is not None:
        stage = draft_stage(drafter, state, anchor)
        drafted += stage.tokens
        state, anchor = stage.state, stage.tokens[-1]
        clock.charge("draft_more" if scores else "draft_first")
        scores.append(float(log_probability(stage.logits, gate.temperature).sum()) if gate.needs_scores else 0.0)
        more = gate.more(scores)
        clock.charge("gate")
        if not more or stops.intersection(stage.tokens) or len(drafted) + drafter.k > left:
            break
    return drafted, scores, state


def draft_stage(drafter: Drafter, state: DraftState, anchor: int) -> Drafted:
    """One stage of the most likely tokens after `anchor`."""
    seen: list[Tensor] = []

    def most_likely(logits: Tensor) -> Tensor:
        seen.append(logits.flatten(0, -2))  # rows of one slot, or of all
        return drafter.token_ids(logits.argmax(-1))

    anchors = torch.tensor([[anchor]], device=state.origin.device)
    stage = drafter.stage(state, anchors, lambda step, hidden: most_likely(drafter.logits(hidden)))
    tokens = drafter.speak(stage, anchors, most_likely)
    return Drafted(tokens[0, 0].tolist(), torch.cat(seen), stage.state)


def clip(tokens: list[int], stops: set[int], left: int) -> list[int]:
    """Tokens up to the first stop token and the length limit."""
    for number, token in enumerate(tokens[:left]):
        if token in stops:
            return tokens[:number + 1]
    return tokens[:left]
