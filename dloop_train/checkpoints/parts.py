"""What the public layouts have in common: keys that stand at one of two levels, the fields of block drafters, the keys of layers."""

from torch import Tensor

from dloop_train.config import check
from dloop_train.drafters.base import DrafterShape
from dloop_train.drafters.sizes import FULL, public_sizes, read_layers


def one_of(key: str, *places: dict, default=None):
    """The value of a key that stands at the top level or in a nested section; contradicting values are an error."""
    found = [place[key] for place in places if place.get(key) is not None] or ([] if default is None else [default])
    check(bool(found), f"config.json has no {key}, at the top level or nested")
    check(all(value == found[0] for value in found), f"config.json has {key} twice with different values: {found}")
    return found[0]


def layer_kinds(config: dict) -> list[str]:
    """layer_types, one a layer."""
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [FULL] * count
    check(len(kinds) == count, f"config.json has num_hidden_layers {count} and {len(kinds)} layer_types")
    return kinds


def block_fields(format: str, config: dict, nested: dict, *, architecture: str, alignment: str) -> dict:
    """What every block drafter's config.json says; `nested` is its inner section, if it has one."""
    said = [place[key] for key in ("is_causal", "causal") for place in (nested, config) if place.get(key) is not None]
    section = config.get("dloop", {})
    return dict(format=format, layers=read_layers(config, architecture, layer_kinds(config), causal=said[0] if said else None),
                taps=tuple(one_of("target_layer_ids", nested, config)), num_target_layers=config.get("num_target_layers"),
                vocab_size=config["vocab_size"], target_hidden_size=config["hidden_size"], width=one_of("block_size", config, nested),
                alignment=alignment, mask_token_id=one_of("mask_token_id", nested, config), head_scales=head_scales(config, architecture),
                state=section.get("state", "context_norm"), slot=section.get("slot", "own"))


def head_scales(config: dict, architecture: str) -> tuple[float, float | None] | None:
    """What a Gemma 4 file says of the target's embeddings and logits."""
    return (config["hidden_size"] ** 0.5, config.get("final_logit_softcapping")) if architecture == "gemma4" else None


def shared_keys(shape: DrafterShape) -> dict:
    """The config.json keys that all layouts with Qwen3's or Gemma 4's layers write."""
    gemma4 = shape.layers[0].architecture == "gemma4"
    return {"model_type": "gemma4_text" if gemma4 else "qwen3", "num_target_layers": shape.num_target_layers, "vocab_size": shape.vocab_size,
            "tie_word_embeddings": False, **public_sizes(shape.layers), **({"final_logit_softcapping": shape.head_scales[1]} if gemma4 else {})}


def causal_key(shape: DrafterShape) -> dict:
    """is_causal, where the layers are not causal as usual (sliding ones are, full ones are not)."""
    unusual = any(layer.causal != (layer.window is not None) for layer in shape.layers)
    return {"is_causal": shape.layers[0].causal} if unusual else {}


def deepspec_name(shape: DrafterShape, suffix: str) -> str:
    """DeepSpec's classes: Qwen3DSparkModel, Gemma4Eagle3Model, ..."""
    return ("Gemma4" if shape.layers[0].architecture == "gemma4" else "Qwen3") + suffix


def deepspec_architecture(config: dict, suffix: str) -> str | None:
    """The kind of layers that DeepSpec's class name tells, or None for another class."""
    return {f"Qwen3{suffix}": "qwen3", f"Gemma4{suffix}": "gemma4"}.get((config.get("architectures") or [""])[0])


def same_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For layouts whose names are the modules' own."""
    return dict(tensors)
