"""z-lab's DFlash: DFlashDraftModel with fill-in alignment; embedding and lm_head are the target's."""

from dloop_train.checkpoints.parts import block_fields, causal_key, same_names, shared_keys
from dloop_train.drafters.block import BlockShape

WHAT = "DFlashDraftModel with dflash_config, no token head"
FAMILY = "dflash"
COPIES: dict[str, str] = {}


def sections(config: dict) -> tuple[dict, dict]:
    return config.get("dflash_config") or {}, config


def matches(config: dict) -> bool:
    return config.get("architectures") == ["DFlashDraftModel"] and not any(
        place.get("projector_type") for place in sections(config)
    )


def read_shape(config: dict) -> BlockShape:
    return BlockShape(**block_fields("zlab_dflash", sections(config), architecture="qwen3", alignment="fill_in"))


def write_config(shape: BlockShape) -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": shape.width,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.taps),
            **causal_key(shape),
        },
        **shared_keys(shape),
    }


from_public = to_public = same_names
