"""Initialise a drafter from scratch: projections, MLPs and norms of the target's last layers, and the draft vocabulary."""

from collections import Counter

import torch

from dloop_train.config import TargetConfig
from dloop_train.data.responses import Response
from dloop_train.drafters.base import Drafter
from dloop_train.targets.sources import load_target


def initialise_from_target(drafter: Drafter, target: TargetConfig, responses: list[Response]) -> None:
    """Copy every layer tensor that has the target's shape; the last drafter layer takes the last target layer.

    A chain's projections read [embedding, hidden]: the hidden half takes the target's, the other half starts at zero. The
    feature fusion starts as the mean of the taps.
    """
    model = load_target(target, dtype="float32", device="cpu")
    theirs = list(model.backbone.layers)[-len(drafter.layers):]
    with torch.no_grad():
        for layer, source in zip(drafter.layers, theirs, strict=True):
            ours = dict(layer.named_parameters())
            for name, tensor in source.named_parameters():
                if name in ours and ours[name].shape == tensor.shape:
                    ours[name].copy_(tensor)
                elif name in ours and ours[name].shape[-1] == 2 * tensor.shape[-1]:
                    ours[name].zero_()
                    ours[name][:, tensor.shape[-1]:] = tensor
            if hasattr(layer, "hidden_norm"):  # the hidden half reads what the target's layer would
                layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
        drafter.norm.weight.copy_(model.backbone.norm.weight)
        width = drafter.fc.weight.shape[0]
        if drafter.shape.target_hidden_size == width:
            drafter.fc.weight.copy_(torch.eye(width).repeat(1, len(drafter.shape.taps)) / len(drafter.shape.taps))
        if hasattr(drafter, "keep_tokens"):
            initialise_vocabulary(drafter, model.lm_head.weight, responses)


def initialise_vocabulary(drafter, lm_head: torch.Tensor, responses: list[Response]) -> None:
    """The draft vocabulary is the most frequent response tokens; its rows start as the target's."""
    size = drafter.shape.draft_vocab_size
    if drafter.d2t is not None:
        counts = Counter(token for response in responses for token in response.response_ids)
        frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:size]
        rest = (token for token in range(drafter.shape.vocab_size) if token not in counts)
        while len(frequent) < size:
            frequent.append(next(rest))
        drafter.keep_tokens(torch.tensor(sorted(frequent)))
    if drafter.lm_head is not None:
        kept = drafter.kept_ids()
        drafter.lm_head.weight.copy_(lm_head if kept is None else lm_head[kept])
