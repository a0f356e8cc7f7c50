"""Gemma 4's MTP assistant: layers with queries only, and an own embedding that is also the lm_head."""

from torch import Tensor

from dloop_train.checkpoints.parts import layer_kinds, one_of
from dloop_train.config import check
from dloop_train.drafters.mtp_assistant import AssistantShape
from dloop_train.drafters.sizes import common_sizes, read_layers, required

WHAT = "Gemma4UnifiedAssistantForCausalLM or Gemma4AssistantForCausalLM"
FAMILY = "mtp_assistant"
COPIES: dict[str, str] = {}
NAMES = ("Gemma4UnifiedAssistantForCausalLM", "Gemma4AssistantForCausalLM")
INNER = ("layers.", "norm.", "embed_tokens.")
"""Prefixes of the names that are written under `model.`."""


def matches(config: dict) -> bool:
    return (config.get("architectures") or [""])[0] in NAMES


def read_shape(config: dict) -> AssistantShape:
    required(config, "text_config")
    text = config["text_config"]
    required(text, "vocab_size")
    check(
        not any(place.get("use_ordered_embeddings") for place in (config, text)),
        "config.json says use_ordered_embeddings: true (centroid heads, the E2B and E4B assistants), "
        "which is not supported",
    )
    check(
        text.get("final_logit_softcapping") is None,
        "config.json says final_logit_softcapping for the assistant itself, which is not supported",
    )
    return AssistantShape(
        format="gemma4_assistant",
        layers=read_layers(text, "gemma4", layer_kinds(text)),
        taps=(),
        num_target_layers=None,
        vocab_size=text["vocab_size"],
        target_hidden_size=one_of("backbone_hidden_size", config, text),
        draft_vocab_size=text["vocab_size"],
        state="post_norm",
    )


def write_config(shape: AssistantShape) -> dict:
    """Sizes that differ from the sliding layers' are written in per_layer_config, as transformers 5.24 does."""
    sliding = next((layer for layer in shape.layers if layer.window is not None), shape.layers[0])
    others = {
        str(index): {"head_dim": layer.head_dim, "num_key_value_heads": layer.num_key_value_heads}
        for index, layer in enumerate(shape.layers)
        if (layer.head_dim, layer.num_key_value_heads) != (sliding.head_dim, sliding.num_key_value_heads)
    }
    ropes = {
        "full_attention" if layer.window is None else "sliding_attention": layer.rope.public() for layer in shape.layers
    }
    ropes = {kind: ropes.get(kind, sliding.rope.public()) for kind in ("full_attention", "sliding_attention")}
    text = common_sizes(shape.layers) | {
        "model_type": "gemma4_unified_text",
        "num_key_value_heads": sliding.num_key_value_heads,
        "head_dim": sliding.head_dim,
        "per_layer_config": others,
        "attention_k_eq_v": any(layer.keys_are_values for layer in shape.layers),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": ropes,
        "num_kv_shared_layers": len(shape.layers),
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "vocab_size": shape.vocab_size,
        "use_double_wide_mlp": False,
    }
    return {
        "architectures": [NAMES[0]],
        "model_type": "gemma4_unified_assistant",
        "backbone_hidden_size": shape.target_hidden_size,
        "text_config": text,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
    }


def from_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)  # own_tensors in files.py has removed `model.`


def to_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}" if name.startswith(INNER) else name: tensor for name, tensor in tensors.items()}
