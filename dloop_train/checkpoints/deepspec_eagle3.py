"""DeepSpec's EAGLE-3: full draft vocabulary, with frozen copies of embedding and lm_head.

The classes are Qwen3Eagle3Model and Gemma4Eagle3Model; the layer's tensors are under layers.0.
"""

from dloop_train.checkpoints.parts import (
    deepspec_architecture,
    deepspec_name,
    head_scales,
    layer_kinds,
    same_names,
    shared_keys,
)
from dloop_train.config import check
from dloop_train.drafters.eagle3 import Eagle3Shape
from dloop_train.drafters.sizes import read_layers, required

WHAT = "Qwen3Eagle3Model or Gemma4Eagle3Model"
FAMILY = "eagle3"
COPIES = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def matches(config: dict) -> bool:
    return deepspec_architecture(config, "Eagle3Model") is not None


def read_shape(config: dict) -> Eagle3Shape:
    required(config, "target_layer_ids", "vocab_size", "hidden_size")
    layers = config.get("draft_num_hidden_layers") or config.get("num_hidden_layers", 1)
    check(layers == 1, f"EAGLE-3 drafters have one layer, config.json says {layers}")
    architecture = deepspec_architecture(config, "Eagle3Model")
    return Eagle3Shape(
        format="deepspec_eagle3",
        layers=read_layers(config, architecture, layer_kinds(config | {"num_hidden_layers": 1})),
        taps=tuple(config["target_layer_ids"]),
        num_target_layers=config.get("num_target_layers"),
        vocab_size=config["vocab_size"],
        target_hidden_size=config["hidden_size"],
        draft_vocab_size=config["vocab_size"],
        own_lm_head=False,
        steps=config.get("ttt_length"),
        state="raw",
        head_scales=head_scales(config, architecture),
    )


def write_config(shape: Eagle3Shape) -> dict:
    return {
        "architectures": [deepspec_name(shape, "Eagle3Model")],
        "target_layer_ids": list(shape.taps),
        "ttt_length": shape.steps,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        **shared_keys(shape),
    }


from_public = to_public = same_names
