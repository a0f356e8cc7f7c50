"""Replay: draft from every position of the target's own greedy text, then simulate any gate exactly."""

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
"""Token id of stages that were not drafted. The text is padded with -1, so that the two are never equal."""


@dataclass(frozen=True)
class Replay:
    """A drafter's drafts from each position of one response, compared with the known text."""

    k: int
    stages: int
    """Stages drafted from every position.

    Later stages are drafted only where a gate may still continue or everything so far is accepted.
    """
    length: int
    """Number of tokens of the response. Position t has the anchor response[t]."""
    known: int
    """Number of tokens that drafts were compared with: the response and the target's own continuation of it."""
    max_new_tokens: int
    scores: Tensor  # [M, S] gate score of each stage; minus infinity if it was not drafted
    # [M] number of drafted tokens, from the first one on, that agree with the known text. They may reach past the
    # response's end, as in a live verification.
    accepted: Tensor
    stopped: Tensor  # [M] the first stage (from 1) that drafted a stop token; S + 1 if none did


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
    """Draft `stages` stages from every position of a greedy response, and up to `deepest` where gates may need them.

    After `stages` stages a position continues only if every stage so far has scored at least `floor`, or if all drafted
    tokens so far are correct. Gates with a threshold of at least `floor`, and oracles, stop everywhere else.

    Only the target's features are teacher-forced; later anchors are the drafter's own tokens. `temperature` is the
    gate's. `branches` positions are drafted at a time. `beyond` holds the target's own tokens after the response, at
    least `ahead` of them and at least k; they are decoded here if not given. They are needed because the first stage of
    a round may reach k tokens past the end, and the target verifies all of it. A record that will be regrouped to a
    larger k needs that k as `ahead`.
    """
    device, deepest, ahead = target.device, deepest or stages, max(ahead, drafter.k)
    beyond = continuation(target, prompt, response, ahead) if beyond is None else beyond
    assert len(beyond) >= ahead
    known = [*response, *beyond[:ahead]]
    text = torch.tensor([[*prompt, *response]], device=device)
    features = target.read(text, feature_spec=drafter.shape.feature_spec).features
    # A context has one more token than features. No origin is late enough to read the last token, so any id will do.
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
    """The next `count` tokens of the target's greedy text after a response. Stop tokens do not end it."""
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
    """The `width` known tokens after each of the first M = `positions` positions, padded with -1. [M, width]"""
    return torch.tensor([*known, *[-1] * width]).unfold(0, width, 1)[1 : positions + 1]


def draft_all(
    drafter: Drafter, state: DraftState, anchors: Tensor, truth: Tensor, stages: int, floor: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Tokens [M, S k] and stage scores [M, S] of all branches, each of which continues its own drafts.

    truth [M, S k] is the text after each branch's first anchor.
    """
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
            logprobs.append(log_probability(logits, ids, temperature))  # [B, N] of one slot, or [B, N, k] of all
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
    """Regroup a replay with one token per stage into one with k tokens per stage.

    Valid for drafters that draft the same tokens whatever their k (OwnKeysChain). A stage's score is the sum of its
    tokens' scores. Raises ValueError unless the record has one token per stage, every stage drafted from every
    position, and k known tokens after the response (replay's `ahead`).
    """
    check(record.k == 1, f"only replays of one token a stage can be regrouped, this one has {record.k}")
    check(
        record.stages == record.scores.shape[1],
        f"the replay has {record.stages} stages from every position, and {record.scores.shape[1]} from some: "
        f"replay with as many as deepest",
    )
    check(
        record.known >= record.length + k,
        f"the replay knows {record.known - record.length} tokens behind the response, "
        f"stages of {k} need as many: replay with ahead={k}",
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

    more(t, scores so far, accepted length at t) is called after each stage and returns whether to draft another one.
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
    """Number of stages that replay drafted from each position."""
    return (record.scores > float("-inf")).sum(-1).tolist()


def most_stages(record: Replay, t: int, max_stages: int) -> int:
    """Largest number of stages of a round from t with any gate: drafted stop tokens and the length limit end it."""
    left = record.max_new_tokens - 1 - t
    return max(1, min(max_stages, int(record.stopped[t]), left // record.k))


def round_at(record: Replay, t: int, stages: int) -> Round:
    """The round of `stages` stages from t, as decoding would report it."""
    accepted = min(int(record.accepted[t]), stages * record.k)
    emitted = min(accepted + 1, record.length - 1 - t)
    return Round(stages, stages * record.k, accepted, emitted, tuple(record.scores[t, :stages].tolist()))


def walk_gate(record: Replay, gate: Gate) -> list[Round]:
    """Rounds under a gate. Its cap or threshold must keep it within the stages that were drafted."""
    return walk(record, lambda t, scores, accepted: gate.more(scores), max_stages=gate.max_stages)


def walk_oracle(record: Replay, seconds: Callable[[Round], float], max_stages: int) -> list[Round]:
    """Rounds of the oracle, which uses accepted lengths and costs to minimise the time of the whole text.

    No gate with this cap is faster under these costs. Computed by dynamic programming from the end of the text:
    best(t) = min over S of seconds(S) + best(t + emitted).
    """
    drafted, end = stages_drafted(record), record.length - 1
    best, choice = [0.0] * (end + 1), [1] * (end + 1)
    for t in range(end - 1, -1, -1):
        useful = -(-(int(record.accepted[t]) + 1) // record.k)  # deeper stages only add time
        rounds = [
            round_at(record, t, stages)
            for stages in range(1, min(most_stages(record, t, max_stages), drafted[t], useful) + 1)
        ]
        totals = [seconds(one) + best[t + one.emitted] for one in rounds]
        best[t] = min(totals)
        choice[t] = rounds[totals.index(best[t])].stages
    return walk(record, lambda t, scores, accepted: len(scores) < choice[t], max_stages=max_stages)
