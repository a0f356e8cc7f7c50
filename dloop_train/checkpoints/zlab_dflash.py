"""z-lab's DFlash: DFlashDraftModel, fill-in alignment, embedding and head borrowed from the target."""

from torch import Tensor

from dloop_train.checkpoints.parts import all_full_attention, one_of, qwen3_keys
from dloop_train.config import check
from dloop_train.drafters.base import LayerSizes
from dloop_train.drafters.block import BlockShape

WHAT = "DFlashDraftModel with dflash_config, no token head"
FAMILY = "dflash"
COPIES: dict[str, str] = {}


def matches(config: dict) -> bool:
    return config.get("architectures") == ["DFlashDraftModel"] and "projector_type" not in config.get("dflash_config", {}) | config


def read_shape(config: dict) -> BlockShape:
    all_full_attention(config)
    nested = config.get("dflash_config", {})
    for key in ("is_causal", "causal"):
        check(not nested.get(key) and not config.get(key), f"config.json says {key}: true; only blocks whose slots see each other are supported")
    taps = one_of("target_layer_ids", nested, config)
    section = config.get("dloop", {})
    return BlockShape(format="zlab_dflash", sizes=LayerSizes.of(config, head_norms=True), num_layers=config["num_hidden_layers"],
                      taps=tuple(taps), num_target_layers=config.get("num_target_layers"), vocab_size=config["vocab_size"],
                      target_hidden_size=config["hidden_size"], width=one_of("block_size", config, nested), alignment="fill_in",
                      mask_token_id=one_of("mask_token_id", nested, config), state=section.get("state", "context_norm"),
                      slot=section.get("slot", "own"))


def write_config(shape: BlockShape) -> dict:
    return {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": shape.width,
            "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.taps)}, **qwen3_keys(shape)}


def from_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)


def to_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)
