"""Sizes: reads and writes the keys of a config.json that describe decoder layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dloop_train.config import check

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Parts:
    """Features in which the layers of the architectures differ."""

    head_norms: bool = False
    """Norms on queries and keys, per head."""
    norm: str = "plain"
    """plain | precise | zero_centred: see RMSNorm."""
    activation: str = "silu"
    sandwich: bool = False
    """Norms also after attention and MLP, and a scalar that multiplies the layer's output."""
    value_norm: bool = False
    """A norm without weight on the values."""
    unit_scale: bool = False
    """Attention scores are not divided by the square root of the head size."""
    output_gate: bool = False
    """The query projection has a second half, whose sigmoid multiplies the output of the heads."""


ARCHITECTURES = {
    "llama": Parts(),
    "qwen3": Parts(head_norms=True),
    "qwen3_5": Parts(head_norms=True, norm="zero_centred", output_gate=True),
    "gemma4": Parts(
        head_norms=True, norm="precise", activation="gelu_pytorch_tanh", sandwich=True, value_norm=True, unit_scale=True
    ),
}


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a layer."""

    theta: float
    kind: str = "default"
    """default | llama3 | proportional (frequencies spaced over the whole head, only the first part is rotated)."""
    part: float = 1.0
    """Share of a head that is rotated (partial_rotary_factor)."""
    scaling: tuple[tuple[str, float], ...] = ()
    """Llama 3's scaling parameters, as (name, value)."""

    def turned(self, size: int) -> int:
        """Number of dimensions of a head over which the frequencies are spaced."""
        return size if self.kind == "proportional" else int(size * self.part)

    def public(self) -> dict:
        """The rope_parameters of a config.json."""
        part = {} if self.part == 1.0 else {"partial_rotary_factor": self.part}
        return {"rope_theta": self.theta, "rope_type": self.kind, **part, **dict(self.scaling)}


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes and settings of one decoder layer."""

    architecture: str
    """A key of ARCHITECTURES."""
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    attention_bias: bool = False
    keys_are_values: bool = False
    """Gemma's k = v: the values are the output of the key projection."""
    window: int | None = None
    """Tokens that a query sees, itself included; None for all."""
    causal: bool = False
    """Slots of a block do not see the slots after them."""

    def __post_init__(self):
        check(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{self.num_key_value_heads}",
        )
        check(
            self.rope.turned(self.head_dim) % 2 == 0,
            f"rotary positions turn pairs; of head_dim {self.head_dim} they would turn "
            f"{self.rope.turned(self.head_dim)}",
        )
        check(self.window is None or self.window >= 1, f"sliding_window must be positive, got {self.window}")

    @property
    def parts(self) -> Parts:
        return ARCHITECTURES[self.architecture]


# Reading


def read_layers(
    config: dict, architecture: str, kinds: Sequence[str], *, causal: bool | None = None
) -> tuple[LayerSizes, ...]:
    """One layer for each kind (full_attention | sliding_attention), from a config.json of transformers 4 or 5.

    `causal` is the file's setting for blocks. None is the default: sliding layers are causal, full ones are not.
    Raises ValueError if a key is missing or a value is not supported.
    """
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    wanted = ARCHITECTURES[architecture].activation
    check(
        activation == wanted,
        f"hidden_act {activation!r} is not supported; {wanted} was expected of {architecture} layers",
    )
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    check(not unknown, f"layer_types has {unknown}; {FULL} and {SLIDING} are supported")
    return tuple(read_layer(config, architecture, kind, causal) for kind in kinds)


def required(config: dict, *keys: str) -> None:
    """Raise ValueError if a config.json lacks some of these keys."""
    lacking = [key for key in keys if config.get(key) is None]
    check(not lacking, f"config.json has no {', '.join(lacking)}; take the file that came with the weights")


def read_layer(config: dict, architecture: str, kind: str, causal: bool | None) -> LayerSizes:
    required(config, "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
    window = window_of(config) if kind == SLIDING else None
    own = own_sizes(config, kind) if architecture == "gemma4" else config
    heads = config["num_attention_heads"]
    return LayerSizes(
        architecture=architecture,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=own.get("num_key_value_heads") or heads,
        head_dim=own.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config["rms_norm_eps"],
        rope=read_rope(config, kind),
        max_position_embeddings=config.get("max_position_embeddings") or 4096,
        attention_bias=bool(config.get("attention_bias")),
        keys_are_values=architecture == "gemma4" and kind == FULL and bool(config.get("attention_k_eq_v")),
        window=window,
        causal=window is not None if causal is None else causal,
    )


def window_of(config: dict) -> int | None:
    """The window of sliding layers; use_sliding_window: false overrides it, as in transformers."""
    if config.get("use_sliding_window") is False:
        return None
    window = config.get("sliding_window")
    check(window is not None, "config.json has sliding_attention layers and no sliding_window")
    return window


def own_sizes(config: dict, kind: str) -> dict:
    """The config with the head sizes of a Gemma 4 layer of this kind.

    Full-attention layers have their own sizes, in global_ keys (transformers 5.10) or in per_layer_config (later).
    """
    if kind == SLIDING:
        return config
    kinds = config.get("layer_types") or []
    for index, changes in (config.get("per_layer_config") or {}).items():
        if str(index).isdigit() and int(index) < len(kinds) and kinds[int(index)] == FULL:
            return config | changes
    size = config.get("global_head_dim") or config.get("head_dim")
    groups = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return config | {"head_dim": size, "num_key_value_heads": groups or config.get("num_key_value_heads")}


def read_rope(config: dict, kind: str = FULL) -> Rope:
    """Rotary settings from rope_theta and scaling, which may be flat, nested or by layer type.

    Raises ValueError for missing or contradictory values, since wrong ones would only lower acceptance.
    """
    nested, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    nested = nested.get(kind) or nested
    flat, inner = config.get("rope_theta"), nested.get("rope_theta")
    theta = flat if inner is None else inner
    check(
        theta is not None,
        "config.json has rope_theta neither at the top level nor in rope_parameters; add the target's value",
    )
    check(
        flat is None or float(flat) == float(theta),
        f"config.json has rope_theta {flat} at the top level and {theta} in rope_parameters",
    )
    kinds = {place.get("rope_type") or place.get("type") for place in (scaling, nested)} - {None}
    check(
        len(kinds) <= 1,
        f"config.json has rope_scaling and rope_parameters of different types: {sorted(kinds)}; "
        "keep the one that the weights were trained with",
    )
    named = next(iter(kinds), "default")
    check(
        named in ("default", "llama3", "proportional"),
        f"rope_type {named!r} is not supported; default, llama3 and proportional are",
    )
    numbers = (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if named == "llama3"
        else ()
    )
    required(nested | scaling, *numbers)
    # The nested factor has priority: transformers 5.17 also writes its class's default at the top level.
    part = nested.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return Rope(float(theta), named, float(part), tuple((name, (nested | scaling)[name]) for name in numbers))


def architecture_of(text_config: dict) -> str:
    """The architecture of a target's layers, a key of ARCHITECTURES. Raises ValueError if there is none."""
    for name in ("qwen3_5", "gemma4", "qwen3", "llama"):
        if text_config["model_type"].startswith(name):
            return name
    raise ValueError(
        f"model_type {text_config['model_type']!r} is not known; drafters know the layers of {sorted(ARCHITECTURES)}"
    )


def layers_for(text_config: dict, architecture: str, count: int) -> tuple[LayerSizes, ...]:
    """Layers of a drafter from scratch: of this architecture, with the sizes of the target's full-attention layers."""
    if architecture == architecture_of(text_config):
        return read_layers(text_config, architecture, [FULL] * count)
    rope = read_rope(text_config)
    foreign = text_config | {"hidden_act": ARCHITECTURES[architecture].activation, "hidden_activation": None}
    # Only the target's own architecture rotates a part of a head.
    rope = replace(rope, kind="llama3" if rope.kind == "llama3" else "default", part=1.0)
    return tuple(replace(layer, rope=rope) for layer in read_layers(foreign, architecture, [FULL] * count))


# Writing


def public_sizes(layers: Sequence[LayerSizes]) -> dict:
    """The config.json keys that describe these layers."""
    return gemma4_sizes(layers) if layers[0].architecture == "gemma4" else plain_sizes(layers)


def common_sizes(layers: Sequence[LayerSizes]) -> dict:
    first, windows = layers[0], [layer.window for layer in layers if layer.window is not None]
    return {
        "hidden_size": first.hidden_size,
        "intermediate_size": first.intermediate_size,
        "num_attention_heads": first.num_attention_heads,
        "num_hidden_layers": len(layers),
        "rms_norm_eps": first.rms_norm_eps,
        "attention_bias": first.attention_bias,
        "attention_dropout": 0.0,
        "max_position_embeddings": first.max_position_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "layer_types": [FULL if layer.window is None else SLIDING for layer in layers],
        "sliding_window": windows[0] if windows else None,
    }


def plain_sizes(layers: Sequence[LayerSizes]) -> dict:
    """Keys of Llama and Qwen, with RoPE both flat (transformers 4, serving engines) and nested (transformers 5)."""
    first = layers[0]
    rope = first.rope.public()
    scaling = (
        None if first.rope.kind == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    )
    part = {} if first.rope.part == 1.0 else {"partial_rotary_factor": first.rope.part}
    sliding = any(layer.window is not None for layer in layers)
    return common_sizes(layers) | {
        "num_key_value_heads": first.num_key_value_heads,
        "head_dim": first.head_dim,
        "hidden_act": "silu",
        "use_sliding_window": sliding,
        "max_window_layers": len(layers),
        "rope_theta": first.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        **part,
    }


def gemma4_sizes(layers: Sequence[LayerSizes]) -> dict:
    """Keys of Gemma 4. Sizes of full layers are in global_ keys, as in transformers 5.10, which DeepSpec pins."""
    full = [layer for layer in layers if layer.window is None] or list(layers)
    sliding = [layer for layer in layers if layer.window is not None] or full
    ropes = {
        FULL: full[0].rope.public(),
        SLIDING: sliding[0].rope.public() if sliding is not full else {"rope_theta": 10000.0, "rope_type": "default"},
    }
    return common_sizes(layers) | {
        "num_key_value_heads": sliding[0].num_key_value_heads,
        "head_dim": sliding[0].head_dim,
        "global_head_dim": full[0].head_dim,
        "num_global_key_value_heads": full[0].num_key_value_heads if full[0].keys_are_values else None,
        "attention_k_eq_v": full[0].keys_are_values,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": ropes,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }
