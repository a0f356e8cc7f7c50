"""HybridTarget: targets (Qwen3.5) whose linear-attention layers carry a running state; rejected rows are undone by replaying those layers alone."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from dloop_train.targets.target import Target, is_prefix, keep_rows
from dloop_train.types import TargetSpec


@dataclass(frozen=True)
class Rewind:
    """The linear layers as they stood before a read, and what the read fed them; by layer."""

    convolutions: dict[int, Tensor]  # [B, channels, kernel]
    states: dict[int, Tensor]  # [B, heads, key, value]
    inputs: dict[int, Tensor]  # [B, T, D]


class HybridCache(DynamicCache):
    """A cache that can take back its newest read, where that read may have to be taken back."""

    def __init__(self, config):
        super().__init__(config=config)
        self.rewind: Rewind | None = None


class Inputs:
    """What the linear layers' hooks write to, while somebody wants it. They hold this and not the target (see Tapped)."""

    def __init__(self):
        self.rows: dict[int, Tensor] | None = None

    def recorder(self, index: int):
        def record(module, args, named):
            if self.rows is not None:
                self.rows[index] = named["hidden_states"]

        return record


class HybridTarget(Target):
    """A target that mixes linear with full attention. A draft is a chain here: the state has no room for the branches of a tree."""

    norm_centre = 1.0
    shares_prefix = False  # a running state does not skip padding in the middle

    def __init__(self, model: nn.Module, tokenizer, spec: TargetSpec):
        super().__init__(model, tokenizer, spec)
        kinds = model.config.get_text_config().layer_types
        self._linear = {
            index: self.backbone.layers[index].linear_attn
            for index, kind in enumerate(kinds)
            if kind == "linear_attention"
        }
        parameters = inspect.signature(next(iter(self._linear.values())).forward).parameters
        self._state_argument = "cache" if "cache" in parameters else "cache_params"  # moved like the backbone's
        self._inputs = Inputs()
        for index, module in self._linear.items():
            module.register_forward_pre_hook(self._inputs.recorder(index), with_kwargs=True)

    def new_cache(self) -> HybridCache:
        return HybridCache(self.model.config)

    def before_read(self, cache: HybridCache | None, count: int) -> None:
        """Prefills and plain decoding, where nothing is ever rejected, pay for no snapshot."""
        self._inputs.rows = None
        if cache is None:
            return
        cache.rewind = None
        if count > 1 and cache.get_seq_length() > 0:
            self._inputs.rows = {}
            layers = {index: cache.layers[index] for index in self._linear}
            # Clones, since the model writes both tensors in place.
            cache.rewind = Rewind(
                {index: layer.conv_states[0].clone() for index, layer in layers.items()},
                {index: layer.recurrent_states[0].clone() for index, layer in layers.items()},
                self._inputs.rows,
            )

    @torch.inference_mode()
    def commit(self, cache: HybridCache, past: int, path: Sequence[int]) -> None:
        if not is_prefix(path):
            raise ValueError(
                f"target {self.spec.name} has linear-attention layers and keeps the first rows of a draft only, got the path "
                f"{list(path)}; draft chains, or choose a target with plain attention for trees"
            )
        rejected = cache.get_seq_length() > past + len(path)
        for index, layer in enumerate(cache.layers):
            if index not in self._linear:
                keep_rows(layer, past, path)
        if rejected:
            self._replay(cache, len(path))
        cache.rewind = None

    def _replay(self, cache: HybridCache, count: int) -> None:
        """Put the linear layers back and feed them the first `count` rows again: their share of a pass, without attention, MLP and lm_head."""
        rewind, self._inputs.rows = cache.rewind, None
        assert rewind is not None, "only a read of several tokens after others can be taken back"
        for index, module in self._linear.items():
            cache.layers[index].conv_states[0] = rewind.convolutions[index]
            cache.layers[index].recurrent_states[0] = rewind.states[index]
            if count:
                module(hidden_states=rewind.inputs[index][:, :count], **{self._state_argument: cache})
