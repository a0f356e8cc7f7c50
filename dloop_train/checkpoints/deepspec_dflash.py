"""DeepSpec's DFlash: Qwen3DSparkModel without heads (markov_rank 0), shifted alignment, frozen copies of embedding and lm_head."""

from torch import Tensor

from dloop_train.checkpoints.parts import all_full_attention, qwen3_keys
from dloop_train.drafters.base import LayerSizes
from dloop_train.drafters.block import BlockShape

WHAT = "Qwen3DSparkModel with markov_rank 0 and no confidence head"
FAMILY = "dflash"
COPIES = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def matches(config: dict) -> bool:
    return config.get("architectures") == ["Qwen3DSparkModel"] and not config.get("markov_rank") and not config.get("enable_confidence_head")


def read_shape(config: dict) -> BlockShape:
    all_full_attention(config)
    section = config.get("dloop", {})
    return BlockShape(format="deepspec_dflash", sizes=LayerSizes.of(config, head_norms=True), num_layers=config["num_hidden_layers"],
                      taps=tuple(config["target_layer_ids"]), num_target_layers=config.get("num_target_layers"), vocab_size=config["vocab_size"],
                      target_hidden_size=config["hidden_size"], width=config["block_size"], alignment="shifted",
                      mask_token_id=config["mask_token_id"], num_anchors=config.get("num_anchors", 512),
                      state=section.get("state", "context_norm"), slot=section.get("slot", "own"))


def write_config(shape: BlockShape) -> dict:
    return {"architectures": ["Qwen3DSparkModel"], "block_size": shape.width, "target_layer_ids": list(shape.taps), "mask_token_id": shape.mask_token_id,
            "num_anchors": shape.num_anchors, "markov_rank": 0, "enable_confidence_head": False, **qwen3_keys(shape)}


def from_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)


def to_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)
