"""DeepSpec's DSpark: a Markov and a confidence head, with frozen copies of embedding and lm_head."""

from dloop_train.checkpoints.parts import (
    anchor_slot,
    block_fields,
    deepspec_architecture,
    deepspec_block_keys,
    deepspec_sections,
    one_of,
    same_names,
)
from dloop_train.drafters.dspark import DSparkShape

WHAT = "Qwen3DSparkModel or Gemma4DSparkModel with markov_rank above 0"
FAMILY = "dspark"
COPIES = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def matches(config: dict) -> bool:
    return deepspec_architecture(config, "DSparkModel") is not None and any(
        place.get("markov_rank") for place in deepspec_sections(config)
    )


def read_shape(config: dict) -> DSparkShape:
    places, architecture = deepspec_sections(config), deepspec_architecture(config, "DSparkModel")
    return DSparkShape(
        **block_fields("deepspec_dspark", places, architecture=architecture, alignment=anchor_slot(places)),
        num_anchors=config.get("num_anchors", 512),
        markov_rank=one_of("markov_rank", *places),
        markov_head_type=one_of("markov_head_type", *places, default="vanilla"),
        confidence=one_of("enable_confidence_head", *places, default=False),
        confidence_with_markov=one_of("confidence_head_with_markov", *places, default=True),
    )


def write_config(shape: DSparkShape) -> dict:
    """The heads' keys are written at the top level, where SGLang and vLLM read them."""
    return deepspec_block_keys(shape) | {
        "markov_rank": shape.markov_rank,
        "markov_head_type": shape.markov_head_type,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence_with_markov,
    }


from_public = to_public = same_names
