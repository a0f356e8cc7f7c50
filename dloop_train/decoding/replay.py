"""Replay: draft from every position of the target's own greedy text in one batched pass, then simulate any gate exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dloop_train.config import check
from dloop_train.decoding.gates import Gate, log_probability
from dloop_train.drafters.base import Drafter, select_branches
from dloop_train.targets.head import most_likely
from dloop_train.targets.target import Target
from dloop_train.types import Context, DraftState, Round

UNDRAFTED = -2
"""Stands for a token where a branch was not followed any further; the text is padded with -1."""


@dataclass(frozen=True)
class Replay:
    """What a drafter would draft from each position of one response."""

    k: int
    stages: int
    """Stages drafted from every position; later ones only where a gate may still draft on, or everything so far is accepted."""
    length: int
    """Tokens of the response; position t is the anchor response[t]."""
    known: int
    """Tokens of the response and of the target's own continuation behind it, with which drafts were compared."""
    max_new_tokens: int
    scores: Tensor  # [M, S] gate score of each stage; minus infinity for those not drafted
    accepted: Tensor  # [M] drafted tokens that agree with the known text, from the first on; also past the response's end, as a live verification counts
    stopped: Tensor  # [M] the stage (from 1) that first drafted a stop token; S + 1 for none


@torch.inference_mode()
def replay(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    stages: int,
    deepest: int | None = None,
    floor: float = float("-inf"),
    max_new_tokens: int,
    temperature: float = 1.0,
    branches: int = 64,
    beyond: Sequence[int] | None = None,
    ahead: int = 0,
) -> Replay:
    """Draft so many stages from every position of a greedy response, and up to the deepest where every stage has scored the floor
    or everything so far is accepted: gates of a threshold at or above the floor, and oracles, stop elsewhere.

    Only the target's features are teacher-forced. Scores are those of a gate of this temperature. `beyond` are at least `ahead` tokens
    (k, unless the record will be regrouped to more) of the target's own behind the response, decoded here if they are not given: a round's
    first stage may reach so far beyond the end, and the target verifies it whole.
    """
    device, deepest, ahead = target.device, deepest or stages, max(ahead, drafter.k)
    beyond = continuation(target, prompt, response, ahead) if beyond is None else beyond
    assert len(beyond) >= ahead
    known = [*response, *beyond[:ahead]]
    text = torch.tensor([[*prompt, *response]], device=device)
    features = target.read(text, feature_spec=drafter.shape.feature_spec).features
    context = Context(torch.cat([text, text[:, -1:]], dim=1), features)
    kv, projected = drafter.context_kv(context)
    truth = following(known, len(response), deepest * drafter.k).to(device)
    tokens, scores = [], []
    for start in range(0, len(response), branches):
        rows = slice(start, min(start + branches, len(response)))
        origins = torch.arange(len(prompt) + rows.start, len(prompt) + rows.stop, device=device)[None]
        drafted, scored = draft_all(
            drafter,
            drafter.open(kv, projected, context, origins),
            text.gather(1, origins),
            truth[rows],
            stages,
            floor,
            temperature,
        )
        tokens.append(drafted)
        scores.append(scored)
    return compare(
        torch.cat(tokens).cpu(),
        torch.cat(scores).cpu(),
        known,
        len(response),
        k=drafter.k,
        stages=stages,
        max_new_tokens=max_new_tokens,
        stops=target.spec.stop_ids,
    )


@torch.inference_mode()
def continuation(target: Target, prompt: Sequence[int], response: Sequence[int], count: int) -> list[int]:
    """So many tokens of the target's own greedy text behind a response, stop tokens or not."""
    tokens, cache, fed = [], target.new_cache(), [*prompt, *response]
    for _ in range(count):
        tokens.append(
            int(
                most_likely(
                    target.read(torch.tensor([fed], device=target.device), cache=cache, logits=slice(-1, None)).logits[
                        0, -1
                    ]
                )
            )
        )
        fed = tokens[-1:]
    return tokens


def following(known: Sequence[int], positions: int, width: int) -> Tensor:
    """The known tokens after each of so many positions, padded with -1. [M, width]"""
    return torch.tensor([*known, *[-1] * width]).unfold(0, width, 1)[1 : positions + 1]


def draft_all(
    drafter: Drafter, state: DraftState, anchors: Tensor, truth: Tensor, stages: int, floor: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Tokens [M, S k] and stage scores [M, S] of all branches, each following its own drafts; truth [M, S k] is the text behind them."""
    k, count, device = drafter.k, anchors.shape[1], anchors.device
    deepest = truth.shape[1] // k
    tokens, scores = (
        torch.full((count, deepest * k), UNDRAFTED, device=device),
        torch.full((count, deepest), float("-inf"), device=device),
    )
    going = torch.arange(count, device=device)
    for number in range(deepest):
        if number >= stages:
            sure = (scores[going, :number] >= floor).all(-1)
            right = (tokens[going, : number * k] == truth[going, : number * k]).all(-1)
            on = (sure | right).nonzero()[:, 0]
            if len(on) == 0:
                break
            going, state, anchors = going[on], select_branches(state, on), anchors[:, on]
        logprobs: list[Tensor] = []

        def likeliest(logits: Tensor, logprobs=logprobs) -> Tensor:
            ids = most_likely(logits)
            logprobs.append(log_probability(logits, ids, temperature))  # [B, N] of one slot, or [B, N, k]
            return drafter.token_ids(ids)

        stage = drafter.stage(state, anchors, lambda step, hidden, pick=likeliest: pick(drafter.logits(hidden)))
        chosen = drafter.draft_tokens(stage, anchors, likeliest)
        scores[going, number] = sum(logprob.reshape(*anchors.shape, -1).sum(-1) for logprob in logprobs)[0]
        tokens[going, number * k : (number + 1) * k] = chosen[0]
        state, anchors = stage.state, chosen[..., -1]
    return tokens, scores


def compare(
    tokens: Tensor,
    scores: Tensor,
    known: list[int],
    length: int,
    *,
    k: int,
    stages: int,
    max_new_tokens: int,
    stops: Sequence[int],
) -> Replay:
    """Compare drafts [M, S k] with the known text that follows each position of a response of this length."""
    positions, width = tokens.shape
    accepted = (tokens == following(known, positions, width)).long().cumprod(-1).sum(-1)
    stop = torch.isin(tokens, torch.tensor(list(stops)))
    stopped = torch.where(stop.any(-1), stop.long().argmax(-1) // k + 1, width // k + 1)
    return Replay(k, stages, length, len(known), max_new_tokens, scores, accepted, stopped)


def regroup(record: Replay, k: int) -> Replay:
    """The replay with k tokens a stage, from one with a single token a stage of a drafter whose chain goes on over the end of a stage as within it.

    Such a drafter (OwnKeysChain) drafts the same tokens whatever its k; a stage's score is the sum of its tokens'. The record must know
    k tokens behind the response (replay's `ahead`), and every stage of it must be drafted from every position.
    """
    check(record.k == 1, f"only replays of one token a stage can be regrouped, this one has {record.k}")
    check(
        record.stages == record.scores.shape[1],
        f"the replay has {record.stages} stages from every position, and {record.scores.shape[1]} from some: replay with as many as deepest",
    )
    check(
        record.known >= record.length + k,
        f"the replay knows {record.known - record.length} tokens behind the response, stages of {k} need as many: replay with ahead={k}",
    )
    known, positions = record.length + k, torch.arange(record.length)
    stages = record.scores.shape[1] // k
    scores = record.scores[:, : stages * k].unflatten(1, (stages, k)).sum(-1)
    accepted = torch.minimum(record.accepted, known - 1 - positions)
    return replace(
        record,
        k=k,
        stages=record.stages // k,
        known=known,
        scores=scores,
        accepted=accepted,
        stopped=(record.stopped + k - 1) // k,
    )


# Rounds that decoding would run


def walk(record: Replay, more: Callable[[int, Sequence[float], int], bool], *, max_stages: int) -> list[Round]:
    """The rounds that live decoding would run: t <- t + min(A, S k) + 1, from the anchor that the prefill emits.

    more(t, scores so far, accepted length at t) is asked after each stage.
    """
    rounds, t, scores, accepted = [], 0, record.scores.tolist(), record.accepted.tolist()
    drafted = stages_drafted(record)
    while t < record.length - 1:
        most, stages = most_stages(record, t, max_stages), 1
        while stages < most and more(t, scores[t][:stages], accepted[t]):
            stages += 1
            assert stages <= drafted[t], "replay drafted fewer stages than the walk takes"
        rounds.append(round_at(record, t, stages))
        t += rounds[-1].emitted
    return rounds


def stages_drafted(record: Replay) -> list[int]:
    """Stages that replay has drafted from each position."""
    return (record.scores > float("-inf")).sum(-1).tolist()


def most_stages(record: Replay, t: int, max_stages: int) -> int:
    """Stages that a round from t may have, whatever its gate: a drafted stop token and the length limit end it."""
    left = record.max_new_tokens - 1 - t
    return max(1, min(max_stages, int(record.stopped[t]), left // record.k))


def round_at(record: Replay, t: int, stages: int) -> Round:
    """A round of so many stages from t, as decoding would report it."""
    accepted = min(int(record.accepted[t]), stages * record.k)
    emitted = min(accepted + 1, record.length - 1 - t)
    return Round(stages, stages * record.k, accepted, emitted, tuple(record.scores[t, :stages].tolist()))


def walk_gate(record: Replay, gate: Gate) -> list[Round]:
    """Rounds under a gate, whose cap or threshold must keep it within what was drafted."""
    return walk(record, lambda t, scores, accepted: gate.more(scores), max_stages=gate.max_stages)


def walk_oracle(record: Replay, seconds: Callable[[Round], float], max_stages: int) -> list[Round]:
    """Rounds of a gate that knows the acceptance and what a round costs, and drafts as deep as takes the least time for the whole text.

    No gate with this cap is faster under these costs: best(t) = min over S of seconds(S) + best(t + emitted), from the text's end backwards.
    """
    drafted, end = stages_drafted(record), record.length - 1
    best, choice = [0.0] * (end + 1), [1] * (end + 1)
    for t in range(end - 1, -1, -1):
        useful = -(-(int(record.accepted[t]) + 1) // record.k)  # a deeper stage adds time alone
        rounds = [
            round_at(record, t, stages)
            for stages in range(1, min(most_stages(record, t, max_stages), drafted[t], useful) + 1)
        ]
        totals = [seconds(one) + best[t + one.emitted] for one in rounds]
        best[t] = min(totals)
        choice[t] = rounds[totals.index(best[t])].stages
    return walk(record, lambda t, scores, accepted: len(scores) < choice[t], max_stages=max_stages)
