"""MTP assistant: Gemma 4's chain drafter, whose queries attend to the target's keys and values."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.base import Flops, Work, linear_work
from dloop_train.drafters.chain import ChainConfig, ChainDrafter, ChainShape
from dloop_train.drafters.layers import DecoderLayer, RotaryPositions
from dloop_train.drafters.sizes import FULL, SLIDING, LayerSizes, Rope, read_rope
from dloop_train.targets.head import TargetHead
from dloop_train.targets.target import Target
from dloop_train.types import KV, Context, DraftState, FeatureSpec, SharedKV, TargetSpec

POSITIONS = ("last_kv", "bonus")


@dataclass(frozen=True, kw_only=True)
class AssistantShape(ChainShape):
    """Shape of an assistant checkpoint."""

    @property
    def feature_spec(self) -> FeatureSpec:
        return FeatureSpec(shared_kv=True, last_hidden=True)

    @property
    def readers(self) -> tuple[LayerSizes, LayerSizes]:
        """The first layer that attends to the target's sliding-window keys, and the first for its full-attention keys.

        If all layers are of one kind, the first layer is used for the missing kind.
        """
        sliding = [layer for layer in self.layers if layer.window is not None] or self.layers
        full = [layer for layer in self.layers if layer.window is None] or self.layers
        return sliding[0], full[0]

    @property
    def shared_kv(self) -> tuple[tuple[int, int, int | None], ...]:
        """(groups, head size, window) of the target keys that sliding-window and full-attention layers attend to."""
        return tuple((layer.num_key_value_heads, layer.head_dim, layer.window) for layer in self.readers)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary settings of those keys. Queries must be rotated in the same way as the target's keys."""
        return tuple(layer.rope for layer in self.readers)

    def expected_fields(self, target: TargetSpec, taps) -> dict:
        target_kv = tuple((shared.groups, shared.size, shared.window) for shared in target.shared_kv)
        turned = tuple(
            read_rope(target.text_config, FULL if shared.window is None else SLIDING) for shared in target.shared_kv
        )
        return super().expected_fields(target, ()) | {"shared_kv": target_kv, "ropes": turned}


@dataclass(kw_only=True)
class AssistantConfig(ChainConfig):
    """Settings of Gemma 4's assistant."""

    tokens_per_stage: int = 4
    layers: int = 4
    hidden_size: int = 256
    """Hidden size D of an assistant from scratch."""
    intermediate_size: int = 0
    """Width of the feed-forward layers of an assistant from scratch; 0 is four times hidden_size."""
    draft_position: str = "last_kv"
    """Rotary position of all passes of a round. last_kv: the last known row, origin - 1. bonus: the anchor's.

    Serving engines differ in this.
    """
    train_embedding: bool = False
    """Whether the drafter's own embedding, which serves only as its lm_head, is trained."""

    family = "mtp_assistant"
    unpaired = "assistants are released for Gemma 4 alone"
    kind = ""

    def __post_init__(self):
        super().__post_init__()
        self.format = self.format or "gemma4_assistant"
        check(
            self.draft_position in POSITIONS,
            f"drafter.draft_position must be one of {POSITIONS}, got {self.draft_position!r}",
        )
        check(
            not self.taps,
            "mtp_assistant drafters read the target's keys and values and no taps; leave drafter.taps out",
        )

    def feature_spec(self, taps: list[int]) -> FeatureSpec:
        return FeatureSpec(shared_kv=True, last_hidden=True)

    def section(self) -> dict:
        return {"draft_position": self.draft_position}

    def as_exported(self, section: dict) -> Self:
        return replace(super().as_exported(section), draft_position=section.get("draft_position", self.draft_position))

    def shape(self, target: TargetSpec, taps: list[int]) -> AssistantShape:
        """The shape of an assistant from scratch.

        Its last layer attends to the target's last full-attention layer, all others to its last sliding-window layer.
        Raises ValueError if the target has no layer of softmax attention.
        """
        check(
            bool(target.shared_kv),
            f"an assistant reads the target's keys and values, and {target.name} has no layer of softmax attention; "
            "choose another drafter",
        )
        sliding, full = target.shared_kv
        layers = (self.layer_on(target, sliding),) * (self.layers - 1) + (self.layer_on(target, full),)
        return AssistantShape(
            format=self.format,
            layers=layers,
            taps=(),
            num_target_layers=None,
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=target.vocab_size,
            state="post_norm",
        )

    def layer_on(self, target: TargetSpec, shared: SharedKV) -> LayerSizes:
        config = target.text_config
        kind = FULL if shared.window is None else SLIDING
        return LayerSizes(
            architecture="gemma4",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size or 4 * self.hidden_size,
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=shared.groups,
            head_dim=shared.size,
            rms_norm_eps=config["rms_norm_eps"],
            rope=read_rope(config, kind),
            max_position_embeddings=config.get("max_position_embeddings") or 4096,
            keys_are_values=kind == FULL and bool(config.get("attention_k_eq_v")),
            window=shared.window,
            causal=shared.window is not None,
        )

    def build(self, shape: AssistantShape, head: TargetHead | None) -> "Assistant":
        return Assistant(
            shape,
            head,
            k=self.tokens_per_stage,
            decay=self.decay,
            position=self.draft_position,
            train_embedding=self.train_embedding,
        )


class Assistant(ChainDrafter):
    """Each pass reads the newest token and the state of the pass before, projected to the target's width.

    It has no keys of its own: earlier drafted tokens of a round reach a pass only through the fed-back state.
    All passes of a round have the same position.
    """

    shape: AssistantShape

    def __init__(
        self,
        shape: AssistantShape,
        head: TargetHead | None,
        *,
        k: int,
        decay: float,
        position: str,
        train_embedding: bool,
    ):
        super().__init__(shape, head, k=k, decay=decay)
        self.position = position
        self.pre_projection = nn.Linear(2 * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.post_projection = nn.Linear(shape.hidden_size, shape.target_hidden_size, bias=False)
        # An embedding table by its public name, used as the lm_head only.
        self.embed_tokens = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.embed_tokens.weight.requires_grad_(train_embedding)
        self.layers.extend(DecoderLayer(sizes, shape.hidden_size, lent_keys=True) for sizes in shape.layers)

    def initialise(self, target: Target) -> None:
        """Embedding and projections start from the D principal directions of the target's lm_head.

        Raises ValueError if drafter.hidden_size is larger than the target's.
        """
        ours, theirs = self.shape.hidden_size, self.shape.target_hidden_size
        check(
            ours <= theirs,
            "an assistant from scratch starts from the target's embedding, so drafter.hidden_size may be at most "
            f"{theirs}, got {ours}",
        )
        table = target.lm_head.weight.double()
        _, directions = torch.linalg.eigh(table.T @ table)
        directions = directions[:, -self.shape.hidden_size :].to(self.embed_tokens.weight)  # [D_target, D], orthonormal
        self.embed_tokens.weight.copy_(target.lm_head.weight @ directions)
        self.pre_projection.weight.copy_(torch.cat([directions.T, directions.T], dim=1))
        self.post_projection.weight.copy_(directions)

    def context_kv(self, context: Context) -> tuple[tuple[KV, ...], Tensor]:
        """Keys and values of the target's last sliding-window layer and of its last full-attention layer.

        The projected features are the target's last hidden state, after its final norm.
        """
        *target_kv, hidden = context.features.split(self.row_parts(), dim=-1)
        rows = [
            part.unflatten(-1, (groups, size))
            for part, (groups, size, _) in zip(
                target_kv, (kv for kv in self.shape.shared_kv for _ in range(2)), strict=True
            )
        ]
        return (KV(rows[0], rows[1]), KV(rows[2], rows[3])), hidden

    def row_parts(self) -> list[int]:
        """Widths of the parts of a feature row: keys and values of two layers, then the last hidden state."""
        widths = [groups * size for groups, size, _ in self.shape.shared_kv for _ in range(2)]
        return [*widths, self.shape.target_hidden_size]

    def advance(
        self, tokens: Tensor, fed: Tensor, step: int, state: DraftState, own: tuple[KV, ...] | None
    ) -> tuple[Tensor, None]:
        rows = self.pre_projection(torch.cat([self.embed(tokens), fed], dim=-1))[:, :, None]
        start = state.origin - state.first
        places = RotaryPositions((start - 1 if self.position == "last_kv" else start)[..., None])  # [B, N, 1]
        for layer, sizes in zip(self.layers, self.shape.layers, strict=True):
            target_kv = state.context[1 if sizes.window is None else 0]
            rows = layer.finish(
                rows, layer.self_attn(layer.input_layernorm(rows), places, target_kv, None, state.context_mask)
            )
        return rows[:, :, 0], None

    def feedback(self, hidden: Tensor) -> Tensor:
        return self.post_projection(self.norm(hidden))

    def head_weights(self) -> tuple[Tensor, ...]:
        return (self.embed_tokens.weight,)

    def head_logits(self, normed: Tensor) -> Tensor:
        return self.embed_tokens(normed)

    def flops(self) -> Flops:
        return self.chain_flops(
            context=Work(),
            one=linear_work(self.pre_projection, self.post_projection, self.layers),
            has_own=False,
            row=linear_work(self.embed_tokens),
        )
