"""Shared parts of the layouts: nested config.json keys, block drafters' fields, vocabulary maps."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dloop_train.config import check
from dloop_train.drafters.base import DrafterShape
from dloop_train.drafters.sizes import FULL, public_sizes, read_layers, required


def one_of(key: str, *places: dict, default=None):
    """The value of a key in one of several sections of config.json.

    Raises ValueError for contradicting values, and for a missing key without a default.
    """
    value = stated(places, key)
    check(value is not None or default is not None, f"config.json has no {key}, at the top level or nested")
    return default if value is None else value


def stated(places: Sequence[dict], *keys: str):
    """The value of any of these keys in any of these sections, or None. Raises ValueError for contradicting values."""
    found = [place[key] for place in places for key in keys if place.get(key) is not None]
    check(
        all(value == found[0] for value in found),
        f"config.json has {' or '.join(keys)} twice with different values: {found}; keep the right one",
    )
    return found[0] if found else None


def layer_kinds(config: dict) -> list[str]:
    """The layer_types of a config.json, one per layer. Without the key all layers have full attention."""
    required(config, "num_hidden_layers")
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [FULL] * count
    check(len(kinds) == count, f"config.json has num_hidden_layers {count} and {len(kinds)} layer_types")
    return kinds


def block_fields(format: str, places: Sequence[dict], *, architecture: str, alignment: str) -> dict:
    """The fields of BlockShape that every block drafter's config.json has.

    `places` are its nested sections, if it has any, and last config.json itself.
    """
    config = places[-1]
    required(config, "vocab_size", "hidden_size")
    section = config.get("dloop") or {}
    return dict(
        format=format,
        layers=read_layers(config, architecture, layer_kinds(config), causal=stated(places, "is_causal", "causal")),
        taps=tuple(one_of("target_layer_ids", *places)),
        num_target_layers=config.get("num_target_layers"),
        vocab_size=config["vocab_size"],
        target_hidden_size=config["hidden_size"],
        width=one_of("block_size", *places),
        alignment=alignment,
        mask_token_id=one_of("mask_token_id", *places),
        head_scales=head_scales(config, architecture),
        state=section.get("state", "context_norm"),
        slot=section.get("slot", "own"),
    )


def anchor_slot(places: Sequence[dict]) -> str:
    """The alignment of a DeepSpec checkpoint: shifted, unless sample_from_anchor is false."""
    return "shifted" if one_of("sample_from_anchor", *places, default=True) else "fill_in"


def head_scales(config: dict, architecture: str) -> tuple[float, float | None] | None:
    """Embedding scale and logit softcap of the target, from a Gemma 4 config.json; None for other architectures.

    The scale is sqrt(D) rounded to fp32, because Gemma keeps it in an fp32 buffer.
    """
    if architecture != "gemma4":
        return None
    return torch.tensor(config["hidden_size"] ** 0.5, dtype=torch.float32).item(), config.get("final_logit_softcapping")


def shared_keys(shape: DrafterShape) -> dict:
    """The config.json keys that all layouts with Qwen3's or Gemma 4's layers write."""
    gemma4 = shape.layers[0].architecture == "gemma4"
    return {
        "model_type": "gemma4_text" if gemma4 else "qwen3",
        "num_target_layers": shape.num_target_layers,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        **public_sizes(shape.layers),
        **({"final_logit_softcapping": shape.head_scales[1]} if gemma4 else {}),
    }


def deepspec_block_keys(shape) -> dict:
    """The config.json keys of DeepSpec's block drafters, without those of their token heads."""
    return {
        "architectures": [deepspec_name(shape, "DSparkModel")],
        "block_size": shape.width,
        "target_layer_ids": list(shape.taps),
        "mask_token_id": shape.mask_token_id,
        "num_anchors": shape.num_anchors,
        "sample_from_anchor": shape.alignment == "shifted",
        **causal_key(shape),
        **shared_keys(shape),
    }


def causal_key(shape: DrafterShape) -> dict:
    """The is_causal key, if the layers differ from the default (sliding layers causal, full layers not)."""
    unusual = any(layer.causal != (layer.window is not None) for layer in shape.layers)
    return {"is_causal": shape.layers[0].causal} if unusual else {}


def deepspec_name(shape: DrafterShape, suffix: str) -> str:
    """A class name of DeepSpec, such as Qwen3DSparkModel or Gemma4Eagle3Model."""
    return ("Gemma4" if shape.layers[0].architecture == "gemma4" else "Qwen3") + suffix


def deepspec_architecture(config: dict, suffix: str) -> str | None:
    """The architecture of the layers by DeepSpec's class name, or None if config.json names another class."""
    return {f"Qwen3{suffix}": "qwen3", f"Gemma4{suffix}": "gemma4"}.get((config.get("architectures") or [""])[0])


def deepspec_sections(config: dict) -> tuple[dict, ...]:
    """The sections that may hold DeepSpec's keys: files made for SGLang may nest some of them."""
    return config.get("dspark_config") or {}, config.get("dflash_config") or {}, config


def renamed(tensors: dict[str, Tensor], name_of: Callable[[str], str]) -> dict[str, Tensor]:
    """The tensors under new names. Raises ValueError if two of them get the same name."""
    names = [name_of(name) for name in tensors]
    twice = sorted({name for name in names if names.count(name) > 1})
    check(not twice, f"the weights hold {twice} twice, under names that mean the same; keep the right ones")
    return dict(zip(names, tensors.values(), strict=True))


def same_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors unchanged, for layouts with this package's parameter names."""
    return dict(tensors)


# The speculators layout


VERIFIERS = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that a file may hold. They are ignored: the target's own are used."""


def speculators_fields(format: str, config: dict, *, shifted: bool) -> dict:
    """The fields of BlockShape from a speculators config.json.

    `shifted` is the family's default alignment, used if config.json has no sample_from_anchor.
    """
    required(config, "transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id", "block_size")
    layer, section = config["transformer_layer_config"], config.get("dloop") or {}
    required(layer, "vocab_size", "hidden_size")
    causal = None if config.get("sliding_window_non_causal") is None else not config["sliding_window_non_causal"]
    sliding = any(kind != FULL for kind in layer_kinds(layer))
    return dict(
        format=format,
        layers=read_layers(layer, "qwen3", layer_kinds(layer), causal=causal if sliding else None),
        taps=tuple(index - 1 for index in config["aux_hidden_state_layer_ids"]),
        num_target_layers=layer.get("num_target_layers"),
        vocab_size=layer["vocab_size"],
        target_hidden_size=config.get("target_hidden_size") or layer["hidden_size"],
        draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
        width=config["block_size"],
        alignment="shifted" if config.get("sample_from_anchor", shifted) else "fill_in",
        mask_token_id=config["mask_token_id"],
        state=section.get("state", "context_norm"),
        slot=section.get("slot", "own"),
    )


def speculators_keys(shape, algorithm: str, architecture: str) -> dict:
    """The config.json keys of a block drafter in the speculators layout.

    sliding_window_non_causal is true if no layer is causal. vLLM also reads from it whether slots of full layers attend
    to the whole block.
    """
    verifier = {"name_or_path": None, "architectures": []}
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "transformer_layer_config": shared_keys(shape),
        "draft_vocab_size": shape.draft_vocab_size,
        "block_size": shape.width,
        "target_hidden_size": shape.target_hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": shape.alignment == "shifted",
        "sliding_window_non_causal": not any(layer.causal for layer in shape.layers),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "verifier": verifier,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.k,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
        },
    }


def without_verifier(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The drafter's own tensors, without copies of the target's, and with checked vocabulary maps (checked_maps)."""
    return checked_maps({name: tensor for name, tensor in tensors.items() if name not in VERIFIERS})


def checked_maps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, without d2t and t2d if these keep the target's whole vocabulary.

    Raises ValueError if d2t and t2d contradict each other.
    """
    if (
        "t2d" in tensors
        and bool(tensors["t2d"].all())
        and not bool(tensors.get("d2t", tensors["t2d"].new_zeros(1)).any())
    ):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if "t2d" in tensors and "d2t" in tensors:
        kept = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        check(
            torch.equal(tensors["t2d"].nonzero()[:, 0], kept),
            "d2t and t2d keep different tokens of the target's; one of them is of another draft vocabulary",
        )
    return tensors


def public_maps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors to write. With the whole vocabulary the lm_head is left out: loaders take it from the target."""
    return (
        dict(tensors)
        if "d2t" in tensors
        else {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    )
