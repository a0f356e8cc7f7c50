"""Initialise: sets the weights and the draft vocabulary of a drafter that is trained from scratch."""

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
    """Copy the target's last layers into the drafter's, where shapes allow it, and initialise the family's own parts.

    A chain's projections read [embedding, hidden]. The hidden half gets the target's weights, the other half zeros.
    Norms on queries and keys that the target lacks start at the mean size of its queries and keys.
    The most frequent tokens of `responses` become the draft vocabulary.
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
    """Number of occurrences of each token in the responses."""
    return Counter(token for response in responses for token in response.response_ids)


def layers_like(ours: DecoderLayer, model: Target) -> list[nn.Module]:
    """The target's layers with softmax attention, if possible only those with the drafter's attention sizes.

    They are repeated to at least as many as the target has layers.
    """
    attending = [layer for layer in model.backbone.layers if hasattr(layer, "self_attn")]
    alike = [layer for layer in attending if layer.self_attn.o_proj.weight.shape == ours.self_attn.o_proj.weight.shape]
    found = alike or attending
    return found * -(-len(model.backbone.layers) // len(found))


def copy_layer(ours: DecoderLayer, theirs: nn.Module, centre: float) -> None:
    """Copy projections and norms of one layer whose shapes are the same or can be converted."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if getattr(ours.self_attn, name, None) is not None and getattr(theirs.self_attn, name, None) is not None:
            copy_projection(getattr(ours.self_attn, name), getattr(theirs.self_attn, name), ours.self_attn.heads)
    if ours.self_attn.gated and theirs.self_attn.q_proj.weight.shape[0] * 2 == ours.self_attn.q_proj.weight.shape[0]:
        ours.self_attn.o_proj.weight.mul_(2)  # a zero-initialised output gate halves its input
    for name in ("gate_proj", "up_proj", "down_proj"):
        copy_projection(getattr(ours.mlp, name), getattr(theirs.mlp, name), 0)
    for name in ("q_norm", "k_norm"):
        copy_gain(getattr(ours.self_attn, name, None), getattr(theirs.self_attn, name, None), centre)
    # The norm before the MLP is called pre_feedforward_layernorm in layers whose post_attention_layernorm is applied
    # to the attention's output, and post_attention_layernorm in all others.
    our_norm, their_norm = (
        layer.pre_feedforward_layernorm
        if hasattr(layer, "pre_feedforward_layernorm")
        else layer.post_attention_layernorm
        for layer in (ours, theirs)
    )
    copy_gain(ours.input_layernorm, theirs.input_layernorm, centre)
    copy_gain(our_norm, their_norm, centre)
    if ours.sandwich and hasattr(theirs, "pre_feedforward_layernorm"):
        copy_gain(ours.post_attention_layernorm, theirs.post_attention_layernorm, centre)
        copy_gain(ours.post_feedforward_layernorm, theirs.post_feedforward_layernorm, centre)
    if hasattr(ours, "hidden_norm"):  # the hidden half has the same input as the target's layer
        copy_gain(ours.hidden_norm, theirs.input_layernorm, centre)


def copy_projection(ours: nn.Linear, theirs: nn.Linear, heads: int) -> None:
    """Copy a projection of the same shape, into a chain's hidden half, or to or from queries with an output gate.

    A gated projection has rows [head, (query, gate), E]. `heads` is the number of query heads, 0 for the MLP.
    """
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
    """Copy a norm's factors. `centre` is the constant that the target adds to its norm weights."""
    if hasattr(ours, "weight") and hasattr(theirs, "weight") and ours.weight.shape == theirs.weight.shape:
        ours.weight.copy_(theirs.weight + centre - ours.centre)


def start_head_norms(layer: DecoderLayer, query: float, key: float) -> None:
    """Set the norms on heads to the size of the target's queries and keys."""
    attention = layer.self_attn
    # Attention that does not scale its scores needs the factor in the queries.
    scale = attention.size**-0.5 if attention.scale == 1.0 else 1.0
    attention.q_norm.weight.fill_(query * scale - attention.q_norm.centre)
    if hasattr(attention, "k_norm"):
        attention.k_norm.weight.fill_(key - attention.k_norm.centre)


def head_sizes(model: Target, layers: list[nn.Module], texts: list[list[int]]) -> list[tuple[float, float]]:
    """Root mean square of each layer's queries and keys, averaged over `texts`."""
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
