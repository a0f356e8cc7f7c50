"""Initialise a drafter from scratch: layers as the target's last ones, then what its family starts with, and the draft vocabulary."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from dloop_train.config import TargetConfig
from dloop_train.data.responses import Response
from dloop_train.drafters.base import Drafter
from dloop_train.drafters.layers import DecoderLayer
from dloop_train.targets.sources import load_target
from dloop_train.targets.target import Target


def initialise_from_target(drafter: Drafter, target: TargetConfig, responses: list[Response]) -> None:
    """Start every layer as one of the target's last ones. What has the target's shape is copied.

    A chain's projections read [embedding, hidden]: the hidden half takes the target's, the other starts at zero. Norms on
    queries and keys that the target lacks start at the mean size of its queries and keys.
    """
    model = load_target(target, dtype="float32", device="cpu")
    theirs = layers_like(drafter.layers[0], model)[-len(drafter.layers) :]
    sizes = head_sizes(model, theirs, [response.prompt_ids + response.response_ids for response in responses[:4]])
    with torch.no_grad():
        for layer, source, (query, key) in zip(drafter.layers, theirs, sizes, strict=True):
            copy_layer(layer, source, model.norm_centre)
            if drafter.shape.layers[0].parts.head_norms and not hasattr(source.self_attn, "q_norm"):
                start_head_norms(layer, query, key)
        copy_gain(drafter.norm, model.backbone.norm, model.norm_centre)
        drafter.initialise(model)
        drafter.start_vocabulary(token_counts(responses), model.lm_head.weight, model.spec.stop_ids)


def token_counts(responses: Iterable[Response]) -> Counter[int]:
    """How often responses hold each token."""
    return Counter(token for response in responses for token in response.response_ids)


def layers_like(ours: DecoderLayer, model: Target) -> list[nn.Module]:
    """The target's layers with softmax attention, those of our head sizes if there are such; repeated where they are too few."""
    attending = [layer for layer in model.backbone.layers if hasattr(layer, "self_attn")]
    alike = [layer for layer in attending if layer.self_attn.o_proj.weight.shape == ours.self_attn.o_proj.weight.shape]
    found = alike or attending
    return found * -(-len(model.backbone.layers) // len(found))


def copy_layer(ours: DecoderLayer, theirs: nn.Module, centre: float) -> None:
    """Projections and norms of one layer, as far as their shapes allow."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if getattr(ours.self_attn, name, None) is not None and getattr(theirs.self_attn, name, None) is not None:
            copy_projection(getattr(ours.self_attn, name), getattr(theirs.self_attn, name), ours.self_attn.heads)
    if ours.self_attn.gated and theirs.self_attn.q_proj.weight.shape[0] * 2 == ours.self_attn.q_proj.weight.shape[0]:
        ours.self_attn.o_proj.weight.mul_(2)  # an output gate that starts at zero lets half pass
    for name in ("gate_proj", "up_proj", "down_proj"):
        copy_projection(getattr(ours.mlp, name), getattr(theirs.mlp, name), 0)
    for name in ("q_norm", "k_norm"):
        copy_gain(getattr(ours.self_attn, name, None), getattr(theirs.self_attn, name, None), centre)
    # What stands in front of the MLP is called pre_feedforward_layernorm where post_attention_layernorm stands behind the attention.
    before_mlp = [
        layer.pre_feedforward_layernorm
        if hasattr(layer, "pre_feedforward_layernorm")
        else layer.post_attention_layernorm
        for layer in (ours, theirs)
    ]
    copy_gain(ours.input_layernorm, theirs.input_layernorm, centre)
    copy_gain(*before_mlp, centre)
    if ours.sandwich and hasattr(theirs, "pre_feedforward_layernorm"):
        copy_gain(ours.post_attention_layernorm, theirs.post_attention_layernorm, centre)
        copy_gain(ours.post_feedforward_layernorm, theirs.post_feedforward_layernorm, centre)
    if hasattr(ours, "hidden_norm"):  # the hidden half reads what the target's layer would
        copy_gain(ours.hidden_norm, theirs.input_layernorm, centre)


def copy_projection(ours: nn.Linear, theirs: nn.Linear, heads: int) -> None:
    """The same shape; or a chain's two halves; or queries with an output gate on one side, which stand head by head."""
    weight, source = ours.weight, theirs.weight
    if heads and weight.shape[0] == 2 * source.shape[0]:
        by_head = source.new_zeros(heads, 2, source.shape[0] // heads, source.shape[1])
        by_head[:, 0] = source.view(heads, -1, source.shape[1])
        source = by_head.flatten(0, 2)
    elif heads and 2 * weight.shape[0] == source.shape[0]:
        source = source.view(heads, 2, -1, source.shape[1])[:, 0].flatten(0, 1)
    if weight.shape == source.shape:
        weight.copy_(source)
    elif weight.shape == (source.shape[0], 2 * source.shape[1]):
        weight.zero_()
        weight[:, source.shape[1] :] = source


def copy_gain(ours: nn.Module | None, theirs: nn.Module | None, centre: float) -> None:
    """A norm's factors; `centre` is what the target adds to its weights."""
    if hasattr(ours, "weight") and hasattr(theirs, "weight") and ours.weight.shape == theirs.weight.shape:
        ours.weight.copy_(theirs.weight + centre - ours.centre)


def start_head_norms(layer: DecoderLayer, query: float, key: float) -> None:
    """Norms on heads start at the size that the target's queries and keys have."""
    attention = layer.self_attn
    scale = attention.size**-0.5 if attention.scale == 1.0 else 1.0  # without a scale of its own the query carries it
    attention.q_norm.weight.fill_(query * scale - attention.q_norm.centre)
    if hasattr(attention, "k_norm"):
        attention.k_norm.weight.fill_(key - attention.k_norm.centre)


def head_sizes(model: Target, layers: list[nn.Module], texts: list[list[int]]) -> list[tuple[float, float]]:
    """Root mean square of each layer's queries and keys on some texts."""
    seen: list[list[float]] = []
    handles = []
    for layer in layers:
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
