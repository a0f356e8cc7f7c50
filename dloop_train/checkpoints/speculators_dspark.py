"""The speculators layout of DSpark, with the whole or a reduced draft vocabulary.

It is the speculators layout of DFlash with a Markov head and a confidence head.
"""

from dloop_train.checkpoints.parts import public_maps, speculators_fields, speculators_keys, without_verifier
from dloop_train.drafters.dspark import DSparkShape

WHAT = "speculators_model_type dspark"
FAMILY = "dspark"
COPIES = {"lm_head": "lm_head.weight"}


def matches(config: dict) -> bool:
    return config.get("speculators_model_type") == "dspark"


def read_shape(config: dict) -> DSparkShape:
    return DSparkShape(
        **speculators_fields("speculators_dspark", config, shifted=True),
        markov_rank=config.get("markov_rank", 256),
        markov_head_type=config.get("markov_head_type", "vanilla"),
        confidence=config.get("enable_confidence_head", True),
        confidence_with_markov=config.get("confidence_head_with_markov", True),
    )


def write_config(shape: DSparkShape) -> dict:
    return speculators_keys(shape, "dspark", "DSparkSpeculator") | {
        "markov_rank": shape.markov_rank,
        "markov_head_type": shape.markov_head_type,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence_with_markov,
    }


from_public, to_public = without_verifier, public_maps
