"""The official EAGLE-3 layout, as SpecForge writes it, with an optional reduced draft vocabulary.

The class is LlamaForCausalLMEagle3; the layer's tensors are under midlayer.
"""

from torch import Tensor

from dloop_train.checkpoints.parts import checked_maps, renamed, stated
from dloop_train.config import check
from dloop_train.drafters.eagle3 import Eagle3Shape
from dloop_train.drafters.sizes import FULL, plain_sizes, read_layers, required

WHAT = "LlamaForCausalLMEagle3"
FAMILY = "eagle3"
COPIES = {"embed": "embed_tokens.weight"}


def matches(config: dict) -> bool:
    return config.get("architectures") == ["LlamaForCausalLMEagle3"]


def read_shape(config: dict) -> Eagle3Shape:
    check(
        config.get("num_hidden_layers", 1) == 1,
        f"EAGLE-3 drafters have one layer, config.json says {config.get('num_hidden_layers')}",
    )
    check(
        not config.get("norm_before_fc") and not config.get("norm_output"),
        "norm_before_fc and norm_output are not supported",
    )
    required(config, "vocab_size", "hidden_size")
    nested, inputs = config.get("eagle_config") or {}, config.get("eagle_aux_hidden_state_layer_ids") or []
    # The top-level key counts layer inputs, the others count layer outputs.
    outputs = {"eagle_aux_hidden_state_layer_ids": [index - 1 for index in inputs] or None}
    taps = (
        stated(
            ({"target_layer_ids": config.get("target_layer_ids") or None}, nested, outputs),
            "target_layer_ids",
            "eagle_aux_hidden_state_layer_ids",
        )
        or ()
    )
    # The authors' files leave out rope_theta if it is Llama's default.
    config = {"rope_theta": 10000.0} | config if not config.get("rope_parameters") else config
    return Eagle3Shape(
        format="specforge_eagle3",
        layers=read_layers(config, "llama", [FULL]),
        taps=tuple(taps),
        num_target_layers=config.get("num_target_layers"),
        vocab_size=config["vocab_size"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        own_lm_head=True,
        fc_norm=bool(config.get("fc_norm")),
        num_taps=config.get("num_aux_hidden_states") or 3,
        state="raw",
    )


def write_config(shape: Eagle3Shape) -> dict:
    taps = list(shape.taps)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        "num_aux_hidden_states": len(taps) or shape.num_taps,
        "target_layer_ids": taps,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps},
        "fc_norm": shape.fc_norm,
        "num_target_layers": shape.num_target_layers,
        "vocab_size": shape.vocab_size,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        **plain_sizes(shape.layers),
    }


def from_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under this package's names, with checked vocabulary maps (checked_maps)."""
    tensors = checked_maps(tensors)
    return renamed(
        tensors, lambda name: name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
    )


def to_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
    }
