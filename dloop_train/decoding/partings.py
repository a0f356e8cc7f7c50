"""Partings: how close the target's logits are at the first token where two greedy texts differ."""

import torch

from dloop_train.targets.target import Target


def parting_gap(target: Target, prompt: list[int], plain: list[int], text: list[int]) -> float | None:
    """Difference of the target's logits of the two tokens where a text first differs from plain decoding's.

    None for equal texts. The unit is one rounding of the dtype at the size of the logits. A few units are a near tie,
    which a matrix product over another number of rows can reverse; many would be a bug.
    """
    where = next((at for at, (one, other) in enumerate(zip(plain, text, strict=False)) if one != other), None)
    if where is None:
        assert len(plain) == len(text), "one text is a prefix of the other: decoding lost tokens"
        return None
    logits = target.read(
        torch.tensor([[*prompt, *plain[:where]]], device=target.device), logits=slice(-1, None)
    ).logits[0, -1]
    two = logits[[plain[where], text[where]]].double()
    return float((two[0] - two[1]).abs() / (torch.finfo(logits.dtype).eps * two.abs().max()))
