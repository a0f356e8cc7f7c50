"""Qwen3.5's MTP module: the mtp.* tensors in a target's safetensors, or in a separate side file."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dloop_train.checkpoints.parts import stated
from dloop_train.config import check
from dloop_train.drafters.mtp import MTPShape
from dloop_train.drafters.sizes import FULL, plain_sizes, read_layers, required

WHAT = "a Qwen3.5 target with mtp_num_hidden_layers, or its mtp.* side file"
FAMILY = "mtp"
COPIES: dict[str, str] = {}
PREFIX = "mtp."
"""Only tensors with this prefix belong to the drafter."""


def matches(config: dict) -> bool:
    """Whether config.json is a Qwen3.5 model's.

    The class is checked beside model_type, because drafters of other kinds may copy their target's keys.
    """
    named = (config.get("architectures") or ["Qwen3_5"])[0]
    return named.startswith("Qwen3_5") and (text_config(config).get("model_type") or "").startswith("qwen3_5")


def text_config(config: dict) -> dict:
    """The text part of a composite config.json."""
    return config.get("text_config") or config


def read_shape(config: dict) -> MTPShape:
    text = text_config(config)
    required(text, "num_hidden_layers", "vocab_size", "hidden_size")
    count = stated((text, config), "mtp_num_hidden_layers")
    check(
        count == 1,
        f"config.json says mtp_num_hidden_layers: {count}; one layer was expected. "
        "A target without the key has no MTP module: train one from scratch",
    )
    check(
        not stated((text, config), "mtp_use_dedicated_embeddings"),
        "config.json says mtp_use_dedicated_embeddings: true, which is not supported",
    )
    return MTPShape(
        format="qwen35_mtp",
        layers=read_layers(text, "qwen3_5", [FULL]),
        taps=(),
        num_target_layers=text["num_hidden_layers"],
        vocab_size=text["vocab_size"],
        target_hidden_size=text["hidden_size"],
        draft_vocab_size=text["vocab_size"],
        state="post_norm",
    )


def write_config(shape: MTPShape) -> dict:
    """The config.json of a side file: the sizes of its one layer, under the target's keys."""
    sizes = {
        key: value
        for key, value in plain_sizes(shape.layers).items()
        if key not in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    }
    return sizes | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": shape.num_target_layers,
        "vocab_size": shape.vocab_size,
    }


def from_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    check(
        bool(tensors),
        "config.json has mtp_num_hidden_layers, the safetensors hold no mtp.* tensor: "
        "transformers drops them when it saves a model again. "
        "Use the original files, or train a module from scratch",
    )
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def to_public(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {PREFIX + name: tensor for name, tensor in tensors.items()}


def merge_into(drafter: Path, target: Path, out: Path) -> list[Path]:
    """Copy the target's safetensors files that hold mtp.* tensors to `out`, with the drafter's tensors in their place.

    Returns the paths of the copies; none if the target has no MTP module.
    """
    index, single = target / "model.safetensors.index.json", target / "model.safetensors"
    names = (
        json.loads(index.read_text())["weight_map"]
        if index.is_file()
        else dict.fromkeys(tensor_names(single), single.name)
    )
    files = sorted({file for name, file in names.items() if name.startswith(PREFIX)})
    if not files:
        return []
    with safe_open(drafter / "model.safetensors", "pt") as trained:
        ours = {name: trained.get_tensor(name) for name in trained.keys()}
    out.mkdir(parents=True, exist_ok=True)
    return [merge(target / file, ours, out / file) for file in files]


def tensor_names(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with safe_open(path, "pt") as file:
        return list(file.keys())


def merge(shard: Path, ours: dict[str, Tensor], out: Path) -> Path:
    """Write one shard with its mtp.* tensors replaced. Every tensor keeps the dtype that it has in the shard."""
    with safe_open(shard, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    unknown = [name for name in tensors if name.startswith(PREFIX) and name not in ours]
    check(not unknown, f"{shard} holds {unknown}, which the drafter has not")
    merged = {
        name: ours[name].to(tensor.dtype).contiguous() if name in ours else tensor for name, tensor in tensors.items()
    }
    save_file(merged, out, metadata=metadata)
    return out
