"""Domino's layout in SpecForge and the released files: DFlash's keys, a GRU and a bottleneck.

config.json is a DFlash one with projector_type domino.
"""

from torch import Tensor

from dloop_train.checkpoints.parts import block_fields, causal_key, one_of, renamed, shared_keys, stated
from dloop_train.config import check
from dloop_train.drafters.domino import DominoShape

WHAT = "DFlashDraftModel or DominoDraftModel with projector_type domino"
FAMILY = "domino"
COPIES: dict[str, str] = {}
PROJECTORS = ("domino", "causal_v5")
"""Values of projector_type; early files have the second one."""
EARLY = "logit_head."
"""Prefix of the head's tensors in early files."""


def sections(config: dict) -> tuple[dict, dict]:
    """The sections that may hold a key: later files nest them, early ones have some at the top level."""
    return config.get("dflash_config") or {}, config


def matches(config: dict) -> bool:
    named = config.get("architectures") in (["DFlashDraftModel"], ["DominoDraftModel"])
    return named and any(place.get("projector_type") in PROJECTORS for place in sections(config))


def read_shape(config: dict) -> DominoShape:
    places = sections(config)
    for key in ("use_bias_norm", "use_bias_gate"):
        check(
            not any(place.get(key) for place in places),
            f"config.json says {key}: true, a switch of unreleased Domino files that is not supported",
        )
    alignment = "shifted" if one_of("shift_label", *places) else "fill_in"
    return DominoShape(
        **block_fields("specforge_domino", places, architecture="qwen3", alignment=alignment),
        emb_dim=one_of("emb_dim", *places),
        gru_hidden_dim=one_of("gru_hidden_dim", *places),
        pure_draft_prefix_len=one_of("pure_draft_prefix_len", *places, default=1),
        num_draft_tokens=stated(places, "num_draft_tokens"),
    )


def write_config(shape: DominoShape) -> dict:
    """The architecture is the class that SGLang registers, and the head's keys are nested, where SGLang reads them."""
    drafted = {} if shape.num_draft_tokens is None else {"num_draft_tokens": shape.num_draft_tokens}
    head = {
        "projector_type": "domino",
        "emb_dim": shape.emb_dim,
        "gru_hidden_dim": shape.gru_hidden_dim,
        "pure_draft_prefix_len": shape.pure_draft_prefix_len,
        "shift_label": shape.alignment == "shifted",
        **drafted,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": shape.width,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.taps),
            **causal_key(shape),
            **head,
        },
        **shared_keys(shape),
    }


def from_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return renamed(tensors, lambda name: name.removeprefix(EARLY))


def to_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors)
