"""DeepSpec's DFlash: a DSpark class without token heads, with frozen copies of embedding and lm_head.

markov_rank is 0. The alignment is shifted unless sample_from_anchor is false.
"""

from dloop_train.checkpoints.parts import (
    anchor_slot,
    block_fields,
    deepspec_architecture,
    deepspec_block_keys,
    deepspec_sections,
    same_names,
)
from dloop_train.drafters.block import BlockShape

WHAT = "Qwen3DSparkModel or Gemma4DSparkModel with markov_rank 0 and no confidence head"
FAMILY = "dflash"
COPIES = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def matches(config: dict) -> bool:
    heads = any(place.get("markov_rank") or place.get("enable_confidence_head") for place in deepspec_sections(config))
    return deepspec_architecture(config, "DSparkModel") is not None and not heads


def read_shape(config: dict) -> BlockShape:
    places, architecture = deepspec_sections(config), deepspec_architecture(config, "DSparkModel")
    return BlockShape(
        **block_fields("deepspec_dflash", places, architecture=architecture, alignment=anchor_slot(places)),
        num_anchors=config.get("num_anchors", 512),
    )


def write_config(shape: BlockShape) -> dict:
    return deepspec_block_keys(shape) | {"markov_rank": 0, "enable_confidence_head": False}


from_public = to_public = same_names
