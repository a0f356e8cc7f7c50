"""Gemma4Target: Gemma 4, which has layers with sliding-window attention.

The cache of such a layer keeps all rows that a read adds until the next read, so that they can be rejected.
"""

from collections.abc import Sequence

from torch import nn
from transformers import DynamicCache

from dloop_train.targets.target import Target
from dloop_train.types import TargetSpec


class Gemma4Target(Target):
    """Sliding-window and full attention layers in turn. Differs from plain attention in rows outside the window."""

    shares_prefix = False  # the sliding window would count padding rows

    def __init__(self, model: nn.Module, tokenizer, spec: TargetSpec):
        text = model.config.get_text_config()
        if text.num_kv_shared_layers or getattr(text, "hidden_size_per_layer_input", 0):
            raise ValueError(
                f"target {spec.name} shares keys and values between its layers or has embeddings for each layer "
                f"(as Gemma 4 E2B and E4B do), which is not supported; "
                f"choose a Gemma 4 without them, such as google/gemma-4-12B-it"
            )
        super().__init__(model, tokenizer, spec)

    def new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        # Otherwise rows that leave the window during a read are lost, even if that read is rejected.
        cache.activate_past_recording()
        return cache

    def before_read(self, cache: DynamicCache | None, count: int) -> None:
        """Drop rows that no later query attends to: a query attends to itself and the window - 1 rows before it."""
        for layer in sliding(cache):
            if layer.keys is not None:
                start = max(layer.keys.shape[2] - layer.sliding_window + 1, 0)
                layer.keys, layer.values = layer.keys[:, :, start:], layer.values[:, :, start:]

    def commit(self, cache: DynamicCache, past: int, path: Sequence[int]) -> None:
        super().commit(cache, past, path)
        for layer in sliding(cache):
            # transformers counts all rows here, those outside the window included.
            layer.cumulative_length = past + len(path)


def sliding(cache: DynamicCache | None) -> list:
    """The cache's sliding-window layers."""
    return [] if cache is None else [layer for layer in cache.layers if layer.is_sliding]
