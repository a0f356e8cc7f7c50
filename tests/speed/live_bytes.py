"""Live bytes: a mode that adds up the tensors that are alive, operator by operator, for a peak that no allocator and no other process blurs."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Storages born inside the mode count from the operator that made them until their last reference goes.

    What an operator allocates and frees within itself is not seen.
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        outcome = function(*arguments, **(keywords or {}))
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((arguments, keywords)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(outcome):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in before:
                    self.add(storage)
        return outcome

    def add(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
