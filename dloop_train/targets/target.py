"""Target: the frozen language model that provides features and logits for verification.

All code for transformers' KV caches is here and in the subclasses (hybrid.py, gemma4.py).
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dloop_train.targets.head import softcapped
from dloop_train.types import FeatureSpec, TargetSpec


@dataclass(frozen=True)
class TargetOutput:
    """Result of one pass over [B, T] tokens."""

    logits: Tensor | None  # [B, T', V] of the requested rows
    features: Tensor | None  # [B, T, F]
    last_hidden: Tensor  # [B, T, D] after the final norm


class Tapped:
    """Layer outputs that the hooks record.

    The hooks refer to this object and not to the target, so that a target's memory is freed with its last reference.
    """

    def __init__(self):
        self.wanted: tuple[int, ...] = ()
        self.outputs: dict[int, Tensor] = {}

    def recorder(self, index: int):
        def record(module, args, output):
            if index in self.wanted:
                self.outputs[index] = output[0] if isinstance(output, tuple) else output

        return record


class GrowingLayer(DynamicLayer):
    """Keys and values in a buffer with space for further rows.

    Without it, a batch that is decoded token by token would copy all of them at each step.
    """

    _layer_type = None  # None: not registered as a layer type of transformers

    ROOM = 64
    """Spare rows of a new buffer."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.buffers = (self.keys, self.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.keys.shape[2]
        after = past + key_states.shape[2]
        self.buffers = tuple(
            with_room(buffer, rows, after, self.ROOM)
            for buffer, rows in zip(self.buffers, (self.keys, self.values), strict=True)
        )
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, past:after] = new
        self.keys, self.values = (buffer[:, :, :after] for buffer in self.buffers)
        return self.keys, self.values


def with_room(buffer: Tensor, rows: Tensor, length: int, room: int) -> Tensor:
    """The buffer if `rows` are its first rows and `length` rows fit; else a larger one with a copy of them.

    All have the shape [B, G, T, E].
    """
    if rows.data_ptr() == buffer.data_ptr() and len(rows) == len(buffer) and length <= buffer.shape[2]:
        return buffer
    batch, groups, past, size = rows.shape
    larger = rows.new_empty(batch, groups, length + room, size)
    larger[:, :, :past] = rows
    return larger


class GrowingCache(DynamicCache):
    """A cache of GrowingLayers, for plain attention."""

    def __init__(self):
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer


class Target:
    """A causal transformers model with plain attention (Llama, Qwen3), its tokenizer and its spec.

    Subclasses for other kinds of attention are in hybrid.py and gemma4.py.
    """

    norm_centre = 0.0
    """Constant that the model's norms add to their weights."""
    shares_prefix = True
    """Whether padding may follow a prefix that a batch shares.

    This requires that every layer attends to all rows that the attention mask allows, and to no others.
    """

    def __init__(self, model: nn.Module, tokenizer, spec: TargetSpec):
        require_one_device(model, spec.name)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.spec = spec
        self.backbone = model.get_decoder()  # the text model only, also in a multimodal model
        self.lm_head = model.get_output_embeddings()
        # The name of the argument changed within the tested range of transformers versions.
        parameters = inspect.signature(self.backbone.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._tapped = Tapped()
        for index, layer in enumerate(self.backbone.layers):
            layer.register_forward_hook(self._tapped.recorder(index))

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def new_cache(self) -> DynamicCache:
        return DynamicCache()

    def new_batch_cache(self) -> DynamicCache:
        """A cache for a batch of sequences that are decoded together."""
        return GrowingCache() if self.shares_prefix else self.new_cache()

    def before_read(self, cache: DynamicCache | None, count: int) -> None:
        """Prepare the cache for `count` more tokens, of which a commit may keep a part."""

    @torch.inference_mode()
    def read(
        self,
        tokens: Tensor,
        *,
        cache: DynamicCache | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        feature_spec: FeatureSpec = FeatureSpec(),  # noqa: B008 a frozen value
        logits: slice | None = None,
    ) -> TargetOutput:
        """Run [B, T] tokens after those in `cache`, and append them to it.

        mask [B, past + T] is false on padding; positions [B, T] are needed with left padding. `logits` selects the rows
        of T that get logits; None computes none.
        """
        require_taps(feature_spec.taps, self.spec)
        self._tapped.wanted = feature_spec.taps
        if feature_spec.shared_kv and cache is None:
            cache = self.new_cache()
        self.before_read(cache, tokens.shape[1])
        arguments = {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": cache is not None,
        }
        if cache is not None:
            arguments[self._cache_argument] = cache
        last_hidden = self.backbone(**arguments).last_hidden_state
        parts = [self._tapped.outputs[tap] for tap in feature_spec.taps]
        self._tapped.outputs.clear()
        if feature_spec.shared_kv:
            parts += self.shared_rows(cache, tokens.shape[1])
        if feature_spec.last_hidden:
            parts.append(last_hidden)
        features = torch.cat(parts, dim=-1) if parts else None
        return TargetOutput(None if logits is None else self.head(last_hidden[:, logits]), features, last_hidden)

    def shared_rows(self, cache: DynamicCache, count: int) -> list[Tensor]:
        """Keys and values of the newest `count` rows of the layers in spec.shared_kv, each [B, count, G * E]."""
        layers = [cache.layers[shared.layer] for shared in self.spec.shared_kv]
        return [
            rows[:, :, -count:].transpose(1, 2).flatten(2) for layer in layers for rows in (layer.keys, layer.values)
        ]

    def head(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden states to logits. [..., D] -> [..., V]"""
        return softcapped(self.lm_head(hidden), self.spec.softcap)

    def commit(self, cache: DynamicCache, past: int, path: Sequence[int]) -> None:
        """Keep the first `past` rows of the cache and the accepted rows of the newest read, and drop the others.

        `path` has the offsets of the accepted rows after `past`, in ascending order.
        """
        for layer in cache.layers:
            keep_rows(layer, past, path)

    def keep_sequences(self, cache: DynamicCache, rows: Tensor) -> None:
        """Drop the finished sequences of a batch; rows [B'] are the indices of those to keep."""
        cache.reorder_cache(rows)

    def repeat_sequences(self, cache: DynamicCache, count: int) -> None:
        """Turn a cache of one sequence into a cache of `count` copies of it."""
        cache.reorder_cache(torch.zeros(count, dtype=torch.long, device=self.device))


def keep_rows(layer, past: int, path: Sequence[int]) -> None:
    """Keep the rows before `past` and those of the path in an attention layer's keys and values."""
    past -= layer.get_seq_length() - layer.keys.shape[2]  # not counting rows that have left a sliding window
    keep = (
        slice(0, past + len(path))
        if is_prefix(path)
        else torch.tensor([*range(past), *(past + offset for offset in path)], device=layer.keys.device)
    )
    layer.keys = layer.keys[:, :, keep]
    layer.values = layer.values[:, :, keep]


def is_prefix(path: Sequence[int]) -> bool:
    """Whether the accepted rows are the first ones, without gaps."""
    return list(path) == list(range(len(path)))


def require_taps(taps: Sequence[int], spec: TargetSpec) -> None:
    """Raise ValueError for taps that cannot be read. Tap i is the output of decoder layer i.

    The last layer is refused because transformers returns its output after the final norm.
    """
    for tap in taps:
        if not 0 <= tap < spec.num_layers - 1:
            reason = (
                (
                    "it is the last layer, whose output transformers returns after the final norm "
                    "while serving engines give it before"
                )
                if tap == spec.num_layers - 1
                else "there is no such layer"
            )
            raise ValueError(
                f"tap {tap} of target {spec.name} ({spec.num_layers} layers) is refused: {reason}; "
                f"choose taps from 0 to {spec.num_layers - 2}"
            )


def require_one_device(model: nn.Module, name: str) -> None:
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"target {name} is split over {sorted(devices)}; a target on one device was expected: "
            f"choose a smaller one, or a device that holds it"
        )
