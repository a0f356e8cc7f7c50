"""Responders: who answers the training prompts. Here the target itself, in batches with sampling, or one prompt at a time greedily."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dloop_train.config import GenerateConfig, SamplingConfig, TargetConfig
from dloop_train.data.responses import Question, Response
from dloop_train.targets.head import most_likely
from dloop_train.targets.target import Target


@dataclass(frozen=True)
class Refusal:
    """A prompt that a server would not answer."""

    id: str
    reason: str


@dataclass(kw_only=True)
class Responder:
    """Who answers the training prompts."""

    def settings(self) -> dict:
        """What of it shapes the responses, for their key."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Local(Responder):
    """The target on this run's own devices, its prompts shared out over the ranks."""

    def settings(self) -> dict:
        return {}


@dataclass(kw_only=True)
class Remote(Responder):
    """Somebody else, asked by the command's own process."""

    max_refused: float = 0.05
    """Largest share of prompts that may be left out; more of them end the phase."""

    def connect(self) -> str:
        """The name of the model that answers; stops where nobody could."""
        raise NotImplementedError

    def require_target(
        self, model: str, known: Sequence[Response], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> None:
        """Stop where another model than the target would answer; `known` are greedy answers of the target's own."""
        raise NotImplementedError

    def answers(
        self, model: str, questions: Iterable[Question], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> Iterator[Response | Refusal]:
        """Each question's answer as it comes, in any order."""
        raise NotImplementedError


def key_of_noise(identity: str, seed: int) -> int:
    """64 bits that belong to one prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{identity}".encode()).digest()[:8], "little")


def noise_of(identity: str, seed: int, length: int) -> Tensor:
    """Uniform numbers that belong to one prompt, whatever batch it stands in. [length]"""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key_of_noise(identity, seed))).random(length))


def choose(logits: Tensor, uniform: Tensor, sampling: SamplingConfig) -> Tensor:
    """Tokens by inverse transform of the top-k, top-p distribution. [B, V] and [B] -> [B]"""
    if sampling.temperature == 0:
        return most_likely(logits)
    top, ids = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
    probabilities = torch.softmax(top.double() / sampling.temperature, dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    cumulative = probabilities.cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniform.to(cumulative) * cumulative[:, -1])[:, None], right=True)
    return ids.gather(1, drawn.clamp(max=top.shape[-1] - 1))[:, 0]


def respond(
    target: Target,
    prompts: Sequence[list[int]],
    identities: Sequence[str],
    sampling: SamplingConfig,
    *,
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Answers to a batch of prompts: response ids, the stop token included when one was reached.

    What all prompts begin with is read once. The rest is padded on the left. Finished sequences leave the batch once they are
    a quarter of it.
    """
    shared = shared_prefix(prompts) if target.shares_prefix else 0
    longest = max(map(len, prompts))
    cache = target.new_batch_cache()
    if shared:
        target.read(torch.tensor([prompts[0][:shared]], device=target.device), cache=cache)
        target.repeat_sequences(cache, len(prompts))
    tokens = torch.tensor([[0] * (longest - len(ids)) + ids[shared:] for ids in prompts], device=target.device)
    mask = torch.tensor(
        [[1] * shared + [0] * (longest - len(ids)) + [1] * (len(ids) - shared) for ids in prompts], device=target.device
    )
    noise = torch.stack([noise_of(identity, seed, max_new_tokens) for identity in identities])
    answers: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts))
    finished = torch.zeros(len(prompts), dtype=torch.bool)
    stops = torch.tensor(target.spec.stop_ids, device=target.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, shared:]
    for step in range(max_new_tokens):
        logits = target.read(tokens, cache=cache, mask=mask, positions=positions, logits=slice(-1, None)).logits[:, 0]
        drawn = choose(logits, noise[alive, step].to(target.device), sampling)
        for row, token, done in zip(alive.tolist(), drawn.tolist(), finished.tolist(), strict=True):
            if not done:
                answers[row].append(token)
        finished = finished | torch.isin(drawn, stops).cpu()
        if finished.all():
            break
        if finished.sum() * 4 >= len(finished):
            keep = (~finished).nonzero()[:, 0]
            target.keep_sequences(cache, keep.to(target.device))
            alive, finished, drawn, mask, positions = (
                alive[keep],
                finished[keep],
                drawn[keep],
                mask[keep],
                positions[keep],
            )
        tokens = drawn[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return answers


SHORTEST_SHARED = 8
"""Tokens of a common beginning that are worth a read of their own."""


def shared_prefix(prompts: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with, such as those of a system prompt; each prompt keeps at least one of its own."""
    first, last = min(prompts), max(prompts)  # in lexical order these two differ the earliest
    most = min(min(map(len, prompts)) - 1, len(first) - 1)
    shared = next((place for place in range(most) if first[place] != last[place]), most)
    return shared if len(prompts) > 1 and shared >= SHORTEST_SHARED else 0


def decode_plain(target: Target, prompt: list[int], *, max_new_tokens: int) -> list[int]:
    """Plain greedy decoding at batch 1: the text that every drafter must reproduce."""
    tokens, cache, answer = torch.tensor([prompt], device=target.device), target.new_cache(), []
    while len(answer) < max_new_tokens:
        token = int(most_likely(target.read(tokens, cache=cache, logits=slice(-1, None)).logits[0, -1]))
        answer.append(token)
        if token in target.spec.stop_ids:
            break
        tokens = torch.tensor([[token]], device=target.device)
    return answer
