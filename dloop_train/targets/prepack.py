"""Prepacked linear layers: bf16 weights in oneDNN's own layout.

A CPU would otherwise reorder the weights at every call.
"""

import torch
from torch import Tensor, nn

from dloop_train.targets.target import Target

ROWS = 192
"""Number of input rows that the layout is chosen for. Results are correct for any number."""


class PrepackedLinear(nn.Module):
    """A frozen linear layer without bias: computes the same as nn.Linear, several times as fast in batched decoding."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, None, "none", [], "")


def prepack(target: Target) -> Target:
    """Pack the linear layers of a bf16 target on a CPU, in place. Other targets stay as they are."""
    if target.device.type != "cpu" or target.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return target
    for module in list(target.backbone.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.bias is None:
                setattr(module, name, PrepackedLinear(child))
    target.lm_head = PrepackedLinear(target.lm_head)
    return target
