"""Replay: draft from every position of the target's own greedy text in one batched pass, then simulate any gate exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dloop_train.decoding.gates import Gate, log_probability
from dloop_train.drafters.base import Drafter, take
from dloop_train.targets.target import Target
from dloop_train.types import Context, Round

UNDRAFTED = -2
"""Stands for a token where a branch was not followed any further; the text is padded with -1."""


@dataclass(frozen=True)
class Replay:
    """What a drafter would draft from each position of one response."""

    k: int
    stages: int
    """Stages drafted from every position; later ones only where a gate may still draft on."""
    length: int
    """Tokens of the response; position t is the anchor response[t]."""
    max_new_tokens: int
    scores: Tensor  # [M, S] gate score of each stage; minus infinity for those not drafted
    accepted: Tensor  # [M] drafted tokens that agree with the text, from the first on
    stopped: Tensor  # [M] the stage (from 1) that first drafted a stop token; S + 1 for none
    cut: Tensor  # [M] bool, the text ended before a drafted token disagreed


@torch.inference_mode()
def replay(target: Target, drafter: Drafter, prompt: Sequence[int], response: Sequence[int], *, stages: int, deepest: int | None = None, floor: float = float("-inf"),
           max_new_tokens: int, temperature: float = 1.0, branches: int = 64) -> Replay:
    """Draft so many stages from every position of a greedy response, and up to the deepest where every stage has scored the floor:
    gates of a threshold at or above it stop elsewhere. Only the target's features are teacher-forced.

    Scores are those of a gate of this temperature.
    """
    device = target.device
    text = torch.tensor([[*prompt, *response]], device=device)
    features = target.read(text, reads=drafter.shape.reads).features
    context = Context(torch.cat([text, text[:, -1:]], dim=1), features)
    kv, projected = drafter.context_kv(context)
    tokens, scores = [], []
    for start in range(0, len(response), branches):
        origins = torch.arange(len(prompt) + start, len(prompt) + min(start + branches, len(response)), device=device)[None]
        drafted, scored = draft_all(drafter, drafter.open(kv, projected, context, origins), text.gather(1, origins), stages, deepest or stages, floor, temperature)
        tokens.append(drafted)
        scores.append(scored)
    return judge(torch.cat(tokens).cpu(), torch.cat(scores).cpu(), list(response), k=drafter.k, stages=stages, max_new_tokens=max_new_tokens, stops=target.spec.stop_ids)


def draft_all(drafter: Drafter, state, anchors: Tensor, stages: int, deepest: int, floor: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [M, S k] and stage scores [M, S] of all branches, each following its own drafts; S is the deepest stage."""
    k, count, device = drafter.k, anchors.shape[1], anchors.device
    tokens, scores = torch.full((count, deepest * k), UNDRAFTED, device=device), torch.full((count, deepest), float("-inf"), device=device)
    going = torch.arange(count, device=device)
    for number in range(deepest):
        if number >= stages:
            on = (scores[going, :number] >= floor).all(-1).nonzero()[:, 0]
            if len(on) == 0:
                break
            going, state, anchors = going[on], take(state, on), anchors[:, on]
        logprobs: list[Tensor] = []

        def most_likely(logits: Tensor, logprobs=logprobs) -> Tensor:
            ids = logits.argmax(-1)
            logprobs.append(log_probability(logits, ids, temperature))  # [B, N] of one slot, or [B, N, k]
            return drafter.token_ids(ids)

        stage = drafter.stage(state, anchors, lambda step, hidden, pick=most_likely: pick(drafter.logits(hidden)))
        chosen = drafter.speak(stage, anchors, most_likely)
        scores[going, number] = sum(logprob.reshape(*anchors.shape, -1).sum(-1) for logprob in logprobs)[0]
        tokens[going, number * k:(number + 1) * k] = chosen[0]
        state, anchors = stage.state, chosen[..., -1]
    return tokens, scores


def judge(tokens: Tensor, scores: Tensor, response: list[int], *, k: int, stages: int, max_new_tokens: int, stops: Sequence[int]) -> Replay:
    """Compare drafts [M, S k] with the text that follows each position."""
    positions, width = tokens.shape
    padded = torch.tensor(response + [-1] * width)
    after = torch.stack([padded[t + 1:t + 1 + width] for t in range(positions)])
    accepted = (tokens == after).long().cumprod(-1).sum(-1)
    cut = torch.arange(positions) + 1 + accepted >= len(response)
    stop = torch.isin(tokens, torch.tensor(list(stops)))
    stopped = torch.where(stop.any(-1), stop.long().argmax(-1) // k + 1, width // k + 1)
    return Replay(k, stages, len(response), max_new_tokens, scores, accepted, stopped, cut)


def walk(record: Replay, more: Callable[[int, Sequence[float], int], bool], *, max_stages: int) -> list[Round]:
    """The rounds that live decoding would run: t <- t + min(A, S k) + 1, from the anchor that the prefill emits.

    more(t, scores so far, accepted length at t) is asked after each stage.
    """
    rounds, t, scores, accepted = [], 0, record.scores.tolist(), record.accepted.tolist()
    stopped, drafted = record.stopped.tolist(), (record.scores > float("-inf")).sum(-1).tolist()
    while t < record.length - 1:
        left = record.max_new_tokens - 1 - t
        stages = 1
        while (stages < max_stages and stopped[t] > stages and (stages + 1) * record.k <= left and more(t, scores[t][:stages], accepted[t])):
            stages += 1
            assert stages <= drafted[t], "replay drafted fewer stages than the walk takes"
        confirmed = min(accepted[t], stages * record.k)
        emitted = min(confirmed + 1, record.length - 1 - t)
        rounds.append(Round(stages, stages * record.k, confirmed, emitted, tuple(scores[t][:stages])))
        t += emitted
    return rounds


def walk_gate(record: Replay, gate: Gate) -> list[Round]:
    """Rounds under a gate, whose cap or threshold must keep it within what was drafted."""
    return walk(record, lambda t, scores, accepted: gate.more(scores), max_stages=gate.max_stages)


def walk_oracle(record: Replay) -> list[Round]:
    """Rounds of a gate that knows the acceptance: another stage exactly when everything so far is accepted."""
    return walk(record, lambda t, scores, accepted: accepted > len(scores) * record.k, max_stages=record.stages)
