"""Partings: where two greedy texts of one prompt differ, and how near a tie the target's logits are there."""

import torch

from dloop_train.targets.target import Target


def parting_gap(target: Target, prompt: list[int], plain: list[int], text: list[int]) -> float | None:
    """How far apart the target's logits of the two tokens are where a text parts from plain decoding's; None for equal texts.

    In roundings of the dtype at that size: a few are a tie, which one more row in a product may turn over; many would be a fault.
    """
    where = next((at for at, (one, other) in enumerate(zip(plain, text, strict=False)) if one != other), None)
    if where is None:
        assert len(plain) == len(text), "one text ends within the other: decoding lost something"
        return None
    logits = target.read(
        torch.tensor([[*prompt, *plain[:where]]], device=target.device), logits=slice(-1, None)
    ).logits[0, -1]
    two = logits[[plain[where], text[where]]].double()
    return float((two[0] - two[1]).abs() / (torch.finfo(logits.dtype).eps * two.abs().max()))
