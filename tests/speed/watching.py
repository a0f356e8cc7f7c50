"""Watching: a dispatch mode that counts FLOPs of matrix products and bytes of live tensors."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Watching(TorchDispatchMode):
    """Counts storages made inside the mode from the operator that made them until their last reference is dropped.

    The counts are not affected by other processes. Memory that an operator allocates and frees internally is not
    counted. torch's own FlopCounterMode counts the same products, except where a gradient is taken inside a forward.
    """

    def __init__(self):
        super().__init__()
        self.flops, self.alive, self.peak = 0, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        outcome = function(*arguments, **keywords)
        if function.overloadpacket in flop_registry:
            self.flops += flop_registry[function.overloadpacket](*arguments, **keywords, out_val=outcome)
        given = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((arguments, keywords))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_leaves(outcome):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known | given:
                self.born(tensor.untyped_storage())
        return outcome

    def born(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.died, storage._cdata, storage.nbytes())

    def died(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size
