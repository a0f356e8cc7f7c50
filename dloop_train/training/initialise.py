"""Initialise a drafter from scratch: projections, MLPs and norms of the target's last layers, and the draft vocabulary."""

from collections import Counter

import torch
from torch import nn

from dloop_train.config import TargetConfig
from dloop_train.data.responses import Response
from dloop_train.drafters.base import Drafter
from dloop_train.targets.sources import load_target
from dloop_train.targets.target import Target


def initialise_from_target(drafter: Drafter, target: TargetConfig, responses: list[Response]) -> None:
    """Start every layer as one of the target's last ones, and the fused features as the output of the deepest tap.

    What has the target's shape is copied. A chain's projections read [embedding, hidden]: the hidden half takes the target's, the
    other starts at zero. Norms on queries and keys that the target lacks start at the mean size of its queries and keys.
    """
    model = load_target(target, dtype="float32", device="cpu")
    theirs = list(model.backbone.layers)[-len(drafter.layers):]
    sizes = head_sizes(model, [response.prompt_ids + response.response_ids for response in responses[:4]])[-len(theirs):]
    with torch.no_grad():
        for layer, source, (query, key) in zip(drafter.layers, theirs, sizes, strict=True):
            copy_layer(layer, source)
            if drafter.shape.layers[0].parts.head_norms and not hasattr(source.self_attn, "q_norm"):
                layer.self_attn.q_norm.weight.fill_(query)
                layer.self_attn.k_norm.weight.fill_(key)
        if hasattr(drafter, "hidden_norm"):  # block drafters: one norm in front of every layer's context projections
            drafter.hidden_norm.weight.copy_(theirs[0].input_layernorm.weight)
        drafter.norm.weight.copy_(model.backbone.norm.weight)
        width = drafter.fc.weight.shape[0]
        if drafter.shape.target_hidden_size == width:
            drafter.fc.weight.zero_()
            drafter.fc.weight[:, -width:] = torch.eye(width)
        if hasattr(drafter, "keep_tokens"):
            initialise_vocabulary(drafter, model.lm_head.weight, responses)


def copy_layer(layer: nn.Module, source: nn.Module) -> None:
    ours = dict(layer.named_parameters())
    for name, tensor in source.named_parameters():
        if name in ours and ours[name].shape == tensor.shape:
            ours[name].copy_(tensor)
        elif name in ours and ours[name].shape[-1] == 2 * tensor.shape[-1]:
            ours[name].zero_()
            ours[name][:, tensor.shape[-1]:] = tensor
    if hasattr(layer, "hidden_norm"):  # the hidden half reads what the target's layer would
        layer.hidden_norm.weight.copy_(source.input_layernorm.weight)


def head_sizes(model: Target, texts: list[list[int]]) -> list[tuple[float, float]]:
    """Root mean square of each layer's queries and keys on some texts."""
    seen: list[list[float]] = []
    handles = []
    for layer in model.backbone.layers:
        seen.append([0.0, 0.0])
        for place, projection in enumerate((layer.self_attn.q_proj, layer.self_attn.k_proj)):
            def record(module, args, output, row=seen[-1], place=place):
                row[place] += float(output.pow(2).mean().sqrt()) / len(texts)
            handles.append(projection.register_forward_hook(record))
    for ids in texts:
        model.read(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return [(query, key) for query, key in seen]


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
