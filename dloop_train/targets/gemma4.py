"""Gemma4Target: Gemma 4, whose sliding layers remember a window of rows; what a read adds stays whole until the next one, so that it can be rejected."""

from collections.abc import Sequence

from torch import nn
from transformers import DynamicCache

from dloop_train.targets.target import Target
from dloop_train.types import TargetSpec


class Gemma4Target(Target):
    """Sliding and full attention in turn. Works as plain attention does, but for rows that have left the window."""

    shares_prefix = False  # a window counts padding

    def __init__(self, model: nn.Module, tokenizer, spec: TargetSpec):
        text = model.config.get_text_config()
        if text.num_kv_shared_layers or getattr(text, "hidden_size_per_layer_input", 0):
            raise ValueError(
                f"target {spec.name} shares keys and values between its layers or has embeddings for each layer (as Gemma 4 E2B and "
                f"E4B do), which is not supported; choose a Gemma 4 without them, such as google/gemma-4-12B-it"
            )
        super().__init__(model, tokenizer, spec)

    def new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        cache.activate_past_recording()  # otherwise rows that slide out during a read are lost, rejected or not
        return cache

    def before_read(self, cache: DynamicCache | None, count: int) -> None:
        """Forget what no later row can see: a query sees itself and window - 1 rows before it."""
        for layer in sliding(cache):
            if layer.keys is not None:
                start = max(layer.keys.shape[2] - layer.sliding_window + 1, 0)
                layer.keys, layer.values = layer.keys[:, :, start:], layer.values[:, :, start:]

    def commit(self, cache: DynamicCache, past: int, path: Sequence[int]) -> None:
        super().commit(cache, past, path)
        for layer in sliding(cache):
            layer.cumulative_length = past + len(path)


def sliding(cache: DynamicCache | None) -> list:
    """The cache's sliding layers."""
    return [] if cache is None else [layer for layer in cache.layers if layer.is_sliding]
