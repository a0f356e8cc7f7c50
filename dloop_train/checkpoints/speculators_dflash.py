"""The speculators layout of DFlash, with the whole or a reduced draft vocabulary.

The sizes of the layers are nested under transformer_layer_config, and tapped layers are counted from 1.
"""

from dloop_train.checkpoints.parts import public_maps, speculators_fields, speculators_keys, without_verifier
from dloop_train.drafters.block import BlockShape

WHAT = "speculators_model_type dflash"
FAMILY = "dflash"
COPIES = {"lm_head": "lm_head.weight"}


def matches(config: dict) -> bool:
    return config.get("speculators_model_type") == "dflash"


def read_shape(config: dict) -> BlockShape:
    return BlockShape(**speculators_fields("speculators_dflash", config, shifted=False))


def write_config(shape: BlockShape) -> dict:
    return speculators_keys(shape, "dflash", "DFlashSpeculator")


from_public, to_public = without_verifier, public_maps
