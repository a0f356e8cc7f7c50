"""Prepacked linear layers: bf16 weights kept in oneDNN's own layout, so that a CPU does not reorder them at every call."""

import torch
from torch import Tensor, nn

from dloop_train.targets.target import Target

ROWS = 192
"""Rows of a product that the layout is chosen for; any number is right."""


class PrepackedLinear(nn.Module):
    """A frozen bias-free linear layer; the same products as nn.Linear, several times as fast in batched decoding."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, None, "none", [], "")


def prepack(target: Target) -> Target:
    """Pack the linear layers of a bf16 target on a CPU, in place; elsewhere nothing changes."""
    if target.device.type != "cpu" or target.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return target
    for module in list(target.backbone.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.bias is None:
                setattr(module, name, PrepackedLinear(child))
    target.lm_head = PrepackedLinear(target.lm_head)
    return target
