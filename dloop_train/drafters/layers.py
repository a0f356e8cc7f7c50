"""Layers: norms, rotary positions, attention and MLP of Llama, Qwen3, Qwen3.5 and Gemma 4."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dloop_train.drafters.attention import ContextMask, loop_attention
from dloop_train.drafters.sizes import LayerSizes, Rope
from dloop_train.types import KV


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least fp32.

    The forms differ in the product with the weight. `plain` (Llama, Qwen3): in the input's dtype.
    `precise` (Gemma 4): in fp32. `zero_centred` (Qwen3.5): in fp32, with one plus the weight.
    """

    def __init__(self, size: int, eps: float, form: str = "plain"):
        super().__init__()
        self.eps, self.form = eps, form
        self.weight = nn.Parameter(torch.full((size,), 1.0 - self.centre))

    @property
    def centre(self) -> float:
        """Number added to the weight."""
        return 1.0 if self.form == "zero_centred" else 0.0

    def forward(self, rows: Tensor) -> Tensor:
        normed = unit_rms(rows, self.eps)
        if self.form == "plain":
            return self.weight * normed.to(rows.dtype)
        return (normed * (self.weight.to(normed.dtype) + self.centre)).to(rows.dtype)


def unit_rms(rows: Tensor, eps: float) -> Tensor:
    """Rows scaled to a root mean square of one, in at least fp32."""
    precise = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)


def norm_of(sizes: LayerSizes, size: int) -> RMSNorm:
    """A norm of this size, in the form that the architecture uses."""
    return RMSNorm(size, sizes.rms_norm_eps, sizes.parts.norm)


class Rotary(nn.Module):
    """Rotary position embedding that pairs the two halves of a head, or of its first part."""

    def __init__(self, size: int, rope: Rope):
        super().__init__()
        turned = rope.turned(size)
        frequencies = rope.theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        if rope.kind == "llama3":
            frequencies = llama3_scaled(frequencies, dict(rope.scaling))
        if rope.kind == "proportional":
            frequencies[int(rope.part * size // 2) :] = 0  # frequency 0: these dimensions are not rotated
        # A plain attribute in float64: a buffer would be cast to bf16 with the module, which shifts distant positions.
        self.frequencies, self.turned, self.rope, self.size = frequencies, turned, rope, size

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at positions. [...] -> [..., 1, half of the rotated dimensions]"""
        self.frequencies = self.frequencies.to(positions.device)  # copied at the first call only
        angles = positions[..., None, None].double() * self.frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, heads: Tensor, places: "RotaryPositions") -> Tensor:
        """Rotate heads [..., H, E] by their positions [...]. Returns the same shape."""
        cos, sin = places.tables(self, heads.dtype)
        turned, still = heads[..., : self.turned], heads[..., self.turned :]
        first, second = turned.chunk(2, dim=-1)
        parts = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat(parts if still.shape[-1] == 0 else [*parts, still], dim=-1)


class RotaryPositions:
    """Positions [...] of rows, with cached cos and sin tables that layers with the same rotary settings share."""

    def __init__(self, positions: Tensor):
        self.positions = positions
        self.made: dict[tuple[Rope, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (rotary.rope, rotary.size, dtype)
        if key not in self.made:
            self.made[key] = rotary.tables(self.positions, dtype)
        return self.made[key]


def llama3_scaled(frequencies: Tensor, scaling: dict) -> Tensor:
    """Llama 3's scaling of the low frequencies (rope_type llama3 in transformers)."""
    factor, low, high, original = (
        scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelengths = 2 * torch.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


class Attention(nn.Module):
    """Attention of one layer. `width` is the size of its input (2 D for EAGLE-3).

    With `lent_keys` it has no key and value projections and attends to keys and values of the target.
    """

    def __init__(self, sizes: LayerSizes, width: int, *, lent_keys: bool = False):
        super().__init__()
        parts, bias = sizes.parts, sizes.attention_bias
        self.heads, self.groups, self.size, self.eps = (
            sizes.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
            sizes.rms_norm_eps,
        )
        self.window, self.causal, self.gated, self.value_norm = (
            sizes.window,
            sizes.causal,
            parts.output_gate,
            parts.value_norm,
        )
        self.scale = 1.0 if parts.unit_scale else self.size**-0.5
        self.q_proj = nn.Linear(width, self.heads * self.size * (2 if parts.output_gate else 1), bias=bias)
        self.o_proj = nn.Linear(self.heads * self.size, sizes.hidden_size, bias=bias)
        self.q_norm = norm_of(sizes, self.size) if parts.head_norms else nn.Identity()
        self.rotary = Rotary(self.size, sizes.rope)
        if not lent_keys:
            self.k_proj = nn.Linear(width, self.groups * self.size, bias=bias)
            self.v_proj = None if sizes.keys_are_values else nn.Linear(width, self.groups * self.size, bias=bias)
            self.k_norm = norm_of(sizes, self.size) if parts.head_norms else nn.Identity()

    def project(self, rows: Tensor, places: RotaryPositions) -> KV:
        """Keys and values of rows [..., width] at positions [...]. -> [..., G, E] each"""
        plain = self.k_proj(rows).unflatten(-1, (self.groups, self.size))
        values = plain if self.v_proj is None else self.v_proj(rows).unflatten(-1, (self.groups, self.size))
        if self.value_norm:
            values = unit_rms(values, self.eps).to(values.dtype)
        return KV(self.rotary.rotate(self.k_norm(plain), places), values)

    def forward(
        self, rows: Tensor, places: RotaryPositions, context: KV, own: KV | None, context_mask: ContextMask
    ) -> Tensor:
        """Rows [B, N, Q, width] attend to the context, as the mask allows, and to `own`. -> [B, N, Q, D]

        `own` includes the keys and values of these rows, or is None.
        """
        projected = self.q_proj(rows).unflatten(-1, (self.heads, -1))
        queries, gate = projected.chunk(2, dim=-1) if self.gated else (projected, None)
        queries = self.rotary.rotate(self.q_norm(queries), places)
        mixed = loop_attention(queries, context, own, context_mask, self.scale, window=self.window, causal=self.causal)
        return self.o_proj((mixed if gate is None else mixed * torch.sigmoid(gate)).flatten(-2))


class MLP(nn.Module):
    """A gated MLP with SiLU (SwiGLU) or with Gemma's tanh approximation of GELU."""

    def __init__(self, sizes: LayerSizes):
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)
        self.approximate = sizes.parts.activation != "silu"

    def forward(self, rows: Tensor) -> Tensor:
        gate = self.gate_proj(rows)
        return self.down_proj(
            (F.gelu(gate, approximate="tanh") if self.approximate else F.silu(gate)) * self.up_proj(rows)
        )


class DecoderLayer(nn.Module):
    """A decoder layer with the public tensor names. Drafters differ in the input of its attention only."""

    def __init__(self, sizes: LayerSizes, width: int, *, lent_keys: bool = False):
        super().__init__()
        self.self_attn = Attention(sizes, width, lent_keys=lent_keys)
        self.mlp = MLP(sizes)
        self.input_layernorm = norm_of(sizes, sizes.hidden_size)
        self.post_attention_layernorm = norm_of(sizes, sizes.hidden_size)
        self.sandwich = sizes.parts.sandwich
        if self.sandwich:
            self.pre_feedforward_layernorm = norm_of(sizes, sizes.hidden_size)
            self.post_feedforward_layernorm = norm_of(sizes, sizes.hidden_size)
            self.register_buffer("layer_scalar", torch.ones(1))

    def finish(self, rows: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream `rows` [..., D] after attention's output `mixed` and the MLP."""
        if not self.sandwich:
            rows = rows + mixed
            return rows + self.mlp(self.post_attention_layernorm(rows))
        rows = rows + self.post_attention_layernorm(mixed)
        rows = rows + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(rows)))
        return rows * self.layer_scalar.to(rows.dtype)  # cast, since DeepSpeed leaves buffers in fp32
