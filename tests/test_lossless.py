"""Tests on every target architecture that decoding with its drafters gives plain decoding's text."""

import pytest
import torch
from conftest import teach
from teaching import counting_prompts, taught_drafter

from dloop_train.decoding.gates import DLoop
from dloop_train.decoding.loop import decode
from dloop_train.targets.responders import decode_plain

NATIVE = {
    "tiny_llama": ("dflash-fill_in", "eagle3-reduced"),
    "tiny_qwen3": ("domino-shifted", "dspark-rnn"),
    "tiny_qwen35": ("mtp", "dflash-shifted"),
    "tiny_gemma4": ("mtp_assistant", "dspark-gemma4", "eagle3-gemma4"),
}
LENGTH = 24


def prompts(count: int) -> list[list[int]]:
    """Counting prompts, as in the drafters' training, and random ones, some longer than Gemma's window."""
    generator = torch.Generator().manual_seed(7)
    counting = counting_prompts(count // 2).tolist()
    return counting + [
        torch.randint(4, 260, (length,), generator=generator).tolist()
        for length in torch.randint(1, 20, (count - len(counting),), generator=generator)
    ]


def texts_are_the_targets_own(name: str, count: int, variants: tuple[str, ...]) -> None:
    target = teach(name)
    plain = {tuple(prompt): decode_plain(target, prompt, max_new_tokens=LENGTH) for prompt in prompts(count)}
    for variant in variants:
        drafter = taught_drafter(variant, target)
        rounds = []
        for prompt, expected in plain.items():
            emissions = list(
                decode(target, drafter, DLoop(threshold=-12.0, max_stages=4), prompt, max_new_tokens=LENGTH)
            )
            assert [token for emission in emissions for token in emission.tokens] == expected, (
                f"{variant} on {name} behind {prompt}"
            )
            rounds += [emission.round for emission in emissions if emission.round is not None]
        # The test proves little unless rounds with several stages, whole accepted blocks and rejections occur.
        assert (
            any(r.stages > 1 for r in rounds)
            and any(r.accepted > drafter.k for r in rounds)
            and any(r.accepted < r.drafted for r in rounds)
        ), variant


@pytest.mark.parametrize("name", sorted(NATIVE.keys() - {"tiny_llama"}))  # Llama's are in test_decoding.py
def test_a_few_prompts(name, exact):
    texts_are_the_targets_own(name, 10, NATIVE[name][:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_two_hundred_prompts(name, exact):
    texts_are_the_targets_own(name, 200, NATIVE[name])
