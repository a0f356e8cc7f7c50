"""HybridTarget: targets with linear-attention layers (Qwen3.5), whose state must be rolled back.

The recurrent state includes all rows of a read. If some are rejected, the state from before the read is restored, and
only the linear-attention layers are run again, on the accepted rows.
"""

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
    """States of the linear layers before a read, and their inputs in this read; by layer index."""

    convolutions: dict[int, Tensor]  # [B, channels, kernel]
    states: dict[int, Tensor]  # [B, heads, key, value]
    inputs: dict[int, Tensor]  # [B, T, D]


class HybridCache(DynamicCache):
    """A cache with a snapshot from before its newest read, if rows of that read may be rejected."""

    def __init__(self, config):
        super().__init__(config=config)
        self.rewind: Rewind | None = None


class Inputs:
    """Inputs that the linear layers' hooks record; `rows` is None while nothing is recorded.

    The hooks refer to this object and not to the target (see Tapped).
    """

    def __init__(self):
        self.rows: dict[int, Tensor] | None = None

    def recorder(self, index: int):
        def record(module, args, named):
            if self.rows is not None:
                self.rows[index] = named["hidden_states"]

        return record


class HybridTarget(Target):
    """A target that mixes linear with full attention.

    A draft must be a chain: the recurrent state cannot hold the branches of a tree.
    """

    norm_centre = 1.0
    shares_prefix = False  # the recurrent state would include padding in the middle

    def __init__(self, model: nn.Module, tokenizer, spec: TargetSpec):
        super().__init__(model, tokenizer, spec)
        kinds = model.config.get_text_config().layer_types
        self._linear = {
            index: self.backbone.layers[index].linear_attn
            for index, kind in enumerate(kinds)
            if kind == "linear_attention"
        }
        parameters = inspect.signature(next(iter(self._linear.values())).forward).parameters
        self._state_argument = "cache" if "cache" in parameters else "cache_params"  # renamed like the backbone's
        self._inputs = Inputs()
        for index, module in self._linear.items():
            module.register_forward_pre_hook(self._inputs.recorder(index), with_kwargs=True)

    def new_cache(self) -> HybridCache:
        return HybridCache(self.model.config)

    def before_read(self, cache: HybridCache | None, count: int) -> None:
        """Take a snapshot of the linear layers, except for prefills and single tokens, which are never rejected."""
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
                f"target {self.spec.name} has linear-attention layers and keeps the first rows of a draft only, "
                f"got the path {list(path)}; draft chains, or choose a target with plain attention for trees"
            )
        rejected = cache.get_seq_length() > past + len(path)
        for index, layer in enumerate(cache.layers):
            if index not in self._linear:
                keep_rows(layer, past, path)
        if rejected:
            self._replay(cache, len(path))
        cache.rewind = None

    def _replay(self, cache: HybridCache, count: int) -> None:
        """Restore the linear layers' states and run these layers again on the first `count` rows.

        The other parts of a pass (attention, MLP, lm_head) are not needed.
        """
        rewind, self._inputs.rows = cache.rewind, None
        assert rewind is not None, "only a read of several tokens after others can be taken back"
        for index, module in self._linear.items():
            cache.layers[index].conv_states[0] = rewind.convolutions[index]
            cache.layers[index].recurrent_states[0] = rewind.states[index]
            if count:
                module(hidden_states=rewind.inputs[index][:, :count], **{self._state_argument: cache})
