"""Responders: where the answers to the training prompts come from.

This file has the base classes and decoding with the target itself: sampling in batches (`respond`), and greedy
decoding of one prompt (`decode_plain`).
"""

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
    """A prompt without a usable answer."""

    id: str
    reason: str


@dataclass(kw_only=True)
class Responder:
    """Where the answers to the training prompts come from."""

    def settings(self) -> dict:
        """The settings that change the responses; they enter the responses' key."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Local(Responder):
    """The target on this run's own devices. The prompts are distributed over the ranks."""

    def settings(self) -> dict:
        return {}


@dataclass(kw_only=True)
class Remote(Responder):
    """An external source of answers, used by the command's own process."""

    max_refused: float = 0.05
    """Largest share of prompts that may be left out. If more are, the phase fails."""

    def connect(self) -> str:
        """The name of the model that answers. Raises an error if the source cannot be used."""
        raise NotImplementedError

    def require_target(
        self, model: str, known: Sequence[Response], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> None:
        """Raise ValueError if another model than the target answers. `known` are the target's own greedy answers."""
        raise NotImplementedError

    def answers(
        self, model: str, questions: Iterable[Question], target: TargetConfig, generate: GenerateConfig, tokenizer
    ) -> Iterator[Response | Refusal]:
        """The answer of each question as it arrives, in any order."""
        raise NotImplementedError


def key_of_noise(identity: str, seed: int) -> int:
    """A 64-bit seed for one prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{identity}".encode()).digest()[:8], "little")


def noise_of(identity: str, seed: int, length: int) -> Tensor:
    """Uniform random numbers for one prompt, independent of the batch that it is in. [length]"""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key_of_noise(identity, seed))).random(length))


def choose(logits: Tensor, uniform: Tensor, sampling: SamplingConfig) -> Tensor:
    """Sample tokens from the top-k, top-p distribution by inverse transform. [B, V] and [B] -> [B]"""
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
    """Answers to a batch of prompts: response ids, the stop token included if one was reached.

    The common prefix of all prompts is read once. The rest is padded on the left. Finished sequences are removed from
    the batch when they make up a quarter of it.
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
"""Shortest common prefix, in tokens, that is read separately."""


def shared_prefix(prompts: Sequence[list[int]]) -> int:
    """Length of the common prefix of all prompts, such as a system prompt; 0 below SHORTEST_SHARED.

    At least one token of each prompt stays outside the prefix.
    """
    first, last = min(prompts), max(prompts)  # in lexical order, no other pair has a shorter common prefix
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
