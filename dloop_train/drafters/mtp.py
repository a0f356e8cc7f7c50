"""MTP: the one-layer chain drafter of Qwen3.5 checkpoints, fed with the last hidden state."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.base import Work, linear_work
from dloop_train.drafters.chain import ChainConfig, ChainShape, OwnKeysChain
from dloop_train.drafters.layers import DecoderLayer, norm_of
from dloop_train.drafters.sizes import layers_for
from dloop_train.targets.head import TargetHead
from dloop_train.targets.target import Target
from dloop_train.types import FeatureSpec, TargetSpec


@dataclass(frozen=True, kw_only=True)
class MTPShape(ChainShape):
    """Shape of an MTP module. Its config.json is the target's."""

    @property
    def feature_spec(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=True)

    def expected_fields(self, target: TargetSpec, taps) -> dict:
        return super().expected_fields(target, ())


@dataclass(kw_only=True)
class MTPConfig(ChainConfig):
    """Settings of Qwen3.5's MTP module."""

    tokens_per_stage: int = 3

    family = "mtp"
    unpaired = "only Qwen3.5 checkpoints carry an MTP module"
    kind = ""

    def __post_init__(self):
        super().__post_init__()
        self.format = self.format or "qwen35_mtp"
        check(self.layers == 1, f"an MTP module has one layer, got drafter.layers={self.layers}")
        check(not self.taps, "mtp drafters read the target's last hidden state and no taps; leave drafter.taps out")

    def feature_spec(self, taps: list[int]) -> FeatureSpec:
        return FeatureSpec(last_hidden=True)

    def shape(self, target: TargetSpec, taps: list[int]) -> MTPShape:
        return MTPShape(
            format=self.format,
            layers=layers_for(target.text_config, "qwen3_5", 1),
            taps=(),
            num_target_layers=target.num_layers,
            vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=target.vocab_size,
            state="post_norm",
        )

    def build(self, shape: MTPShape, head: TargetHead | None) -> "MTP":
        return MTP(shape, head, k=self.tokens_per_stage, decay=self.decay)


class MTP(OwnKeysChain):
    """Qwen3.5's MTP module. It feeds back its output after its final norm, which the target's lm_head reads too."""

    def __init__(self, shape: MTPShape, head: TargetHead | None, *, k: int, decay: float):
        super().__init__(shape, head, k=k, decay=decay)
        sizes, width = shape.layers[0], shape.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm_of(sizes, width), norm_of(sizes, width)
        self.layers.append(DecoderLayer(sizes, width))

    def initialise(self, target: Target) -> None:
        """fc starts as the sum of embedding and hidden state."""
        self.fc.weight.copy_(torch.cat([torch.eye(self.shape.hidden_size)] * 2, dim=1))

    def project_features(self, features: Tensor) -> Tensor:
        return features

    def inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """fc reads [embedding, hidden state], in this order, each after its own norm. -> [..., D] twice"""
        pair = torch.cat([self.pre_fc_norm_embedding(self.embed(tokens)), self.pre_fc_norm_hidden(hidden)], dim=-1)
        rows = self.fc(pair)
        return rows, self.layers[0].input_layernorm(rows)

    def feedback(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def fuse_work(self) -> Work:
        return linear_work(self.fc)  # with gradients of its inputs, since the norms before fc are trained

    def pair_up_work(self) -> Work:
        return linear_work(self.fc)
