"""DeepSpec's EAGLE-3: Qwen3Eagle3Model, a Qwen3 layer under layers.0, full vocabulary, frozen copies of embedding and lm_head."""

from torch import Tensor

from dloop_train.checkpoints.parts import all_full_attention, qwen3_keys
from dloop_train.config import check
from dloop_train.drafters.base import LayerSizes
from dloop_train.drafters.eagle3 import Eagle3Shape

WHAT = "Qwen3Eagle3Model"
FAMILY = "eagle3"
COPIES = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def matches(config: dict) -> bool:
    return config.get("architectures") == ["Qwen3Eagle3Model"]


def read_shape(config: dict) -> Eagle3Shape:
    all_full_attention(config)
    layers = config.get("draft_num_hidden_layers", config.get("num_hidden_layers", 1))
    check(layers == 1, f"EAGLE-3 drafters have one layer, config.json says {layers}")
    return Eagle3Shape(format="deepspec_eagle3", sizes=LayerSizes.of(config, head_norms=True), num_layers=1, taps=tuple(config["target_layer_ids"]),
                       num_target_layers=config.get("num_target_layers"), vocab_size=config["vocab_size"], target_hidden_size=config["hidden_size"],
                       draft_vocab_size=config["vocab_size"], own_lm_head=False, steps=config.get("ttt_length"), state="raw")


def write_config(shape: Eagle3Shape) -> dict:
    return {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": list(shape.taps), "ttt_length": shape.steps, "step_loss_decay": 0.8,
            "draft_num_hidden_layers": 1, **qwen3_keys(shape)}


def from_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)


def to_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)
