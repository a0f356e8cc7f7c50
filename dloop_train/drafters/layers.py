"""Layers that drafters share: RMS norm, rotary positions, the attention projections and the gated MLP of Llama and Qwen3."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dloop_train.drafters.attention import loop_attention
from dloop_train.types import KV


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least fp32 and multiplied by its weight in the input's dtype (as Llama and Qwen3 do)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        precise = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return self.weight * (precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + self.eps)).to(rows.dtype)


class Rotary(nn.Module):
    """Rotary position embedding over the halves of a head; `scaling` as in Llama 3 where the config asks for it."""

    def __init__(self, size: int, theta: float, scaling: dict | None = None):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        # kept in float64 and outside the state dict: bf16 frequencies would move far positions
        self.frequencies = llama3_scaled(frequencies, scaling) if scaling else frequencies

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [...] -> [..., E]"""
        self.frequencies = self.frequencies.to(positions.device)  # moves once
        angles = positions[..., None].double() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """[..., H, E] at positions [...]"""
        cos, sin = (table[..., None, :] for table in self.tables(positions, heads.dtype))
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat([-second, first], dim=-1) * sin


def llama3_scaled(frequencies: Tensor, scaling: dict) -> Tensor:
    """Llama 3's stretching of the low frequencies (rope_type llama3 of transformers)."""
    factor, low, high, original = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    wavelengths = 2 * torch.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


class Attention(nn.Module):
    """Projections of one layer. `width` is the input's size (2 D for EAGLE-3); head norms as in Qwen3 where asked."""

    def __init__(self, sizes, width: int):
        super().__init__()
        self.heads, self.groups, self.size = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        bias = sizes.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=bias)
        self.k_proj = nn.Linear(width, self.groups * self.size, bias=bias)
        self.v_proj = nn.Linear(width, self.groups * self.size, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, sizes.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.size, sizes.rms_norm_eps) if sizes.head_norms else nn.Identity()
        self.k_norm = RMSNorm(self.size, sizes.rms_norm_eps) if sizes.head_norms else nn.Identity()
        self.rotary = Rotary(self.size, sizes.rope_theta, sizes.rope_scaling)

    def project(self, rows: Tensor, positions: Tensor) -> KV:
        """Keys and values of rows [..., width] at positions [...]"""
        keys = self.k_norm(self.k_proj(rows).unflatten(-1, (self.groups, self.size)))
        return KV(self.rotary.rotate(keys, positions), self.v_proj(rows).unflatten(-1, (self.groups, self.size)))

    def forward(self, rows: Tensor, positions: Tensor, context: KV, own: KV, origin: Tensor) -> Tensor:
        """Rows [B, N, Q, width] attend to the context before the origin and to `own` (which holds these rows too)."""
        queries = self.q_norm(self.q_proj(rows).unflatten(-1, (self.heads, self.size)))
        mixed = loop_attention(self.rotary.rotate(queries, positions), context, own, origin, self.size**-0.5)
        return self.o_proj(mixed.flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes):
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
