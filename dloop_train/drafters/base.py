"""Drafter: base class of all drafters, whose begin and stage run in both training and decoding."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from dloop_train.config import check
from dloop_train.drafters.attention import ContextMask
from dloop_train.drafters.layers import RotaryPositions, norm_of
from dloop_train.drafters.sizes import LayerSizes
from dloop_train.targets.head import TargetHead
from dloop_train.targets.target import Target
from dloop_train.types import KV, Context, DraftStage, DraftState, FeatureSpec, Labels, StageLoss, TargetSpec

Choose = Callable[[int, Tensor], Tensor]
"""choose(step, hidden [B, N, D]) -> tokens [B, N]: the tokens that a chain reads in its next pass."""

Pick = Callable[[Tensor], Tensor]
"""pick(logits [..., V]) -> target ids [...]: chooses tokens, for all slots at once or slot by slot."""


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Contents of a checkpoint's config.json: enough to build the drafter and to write the file again."""

    format: str
    """Public layout: the name of a module in checkpoints/."""
    layers: tuple[LayerSizes, ...]
    taps: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int
    target_hidden_size: int
    state: str = "context_norm"
    """Form of own states in later stages."""
    slot: str = "own"
    alignment: ClassVar[str] = ""
    """Block drafters: which token a slot predicts."""
    head_scales: tuple[float, float | None] | None = None
    """Scale of the target's embeddings and softcap of its logits, if the file has them."""
    draft_vocab_size: int = 0
    """Number of target ids that can be drafted. 0 is replaced by the size of the whole vocabulary."""

    def __post_init__(self):
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        check(
            self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} is larger than the target's vocabulary of {self.vocab_size}",
        )

    @property
    def reduced(self) -> bool:
        """Whether some of the target's ids cannot be drafted."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layers[0].hidden_size

    @property
    def feature_spec(self) -> FeatureSpec:
        """Which of the target's states the drafter reads."""
        return FeatureSpec(taps=self.taps)

    def on(self, target: TargetSpec, taps: Sequence[int]) -> "DrafterShape":
        """The shape for a target, with the values that the file leaves out.

        `taps` are the caller's, for files that list none.
        """
        return self

    def expected_fields(self, target: TargetSpec, taps: Sequence[int]) -> dict:
        """Fields, by name, that the shape of a checkpoint for this target must have."""
        facts = {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "taps": tuple(taps)}
        if self.num_target_layers is not None:
            facts["num_target_layers"] = target.num_layers
        if self.head_scales is not None:
            facts["head_scales"] = (target.embed_scale, target.softcap)
        return facts


@dataclass(frozen=True)
class Work:
    """FLOPs of matrix products, two per multiply-add. Norms, activations and softmax are not counted."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.forward + other.forward, self.backward + other.backward)

    def __rmul__(self, times: float) -> "Work":
        return Work(times * self.forward, times * self.backward)

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Flops:
    """FLOPs of a drafter's parts, each for one unit. training/accounting.py multiplies them by the units of a step."""

    context: Work
    """One context row, once for all stages."""
    stage: Work
    """One stage of one branch, in the linear parts of the layers."""
    own: Work
    """Projections of one own state for the next stage. A stage has k own states."""
    queries: int
    """Queries of one branch in one stage."""
    passes: int
    """Passes that these queries are divided into. Each pass sees the own states of the passes before it."""
    has_own: bool
    """Whether queries also attend to keys of the branch's own states."""
    slots: Work
    """One stage of one branch, between layers and logits (token heads). Only in stages with a loss."""
    row: Work
    """Logits of one supervised slot."""
    teacher: Work
    """The target's logits of one supervised slot, and the comparison with them."""


@dataclass(kw_only=True)
class DrafterConfig:
    """Settings of a drafter: where its weights come from and how it drafts."""

    init: str = ""
    """scratch, a folder, a hub id, or starter:<name> for weights that come with this package.

    Set by a pair's YAML or by the user.
    """
    format: str = ""
    """Public layout of a drafter from scratch. For released weights it is read from their config.json."""
    layers: int = 1
    taps: list[int] = field(default_factory=list)
    """Tapped target layers. If empty, the target's list for this kind is used."""
    revision: str = "main"
    draft_vocab_size: int = 0
    """Number of target ids that can be drafted: the stop ids and the most frequent tokens of the responses.

    0 keeps the whole vocabulary, or a checkpoint's own draft vocabulary.
    """
    released: dict[str, int] = field(default_factory=dict)
    """Settings that make a drafter from scratch as large as the weights that `init` names.

    A dry run computes sizes from them if the weights are not on this machine.
    """

    family: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    """block or chain: selects one of the target's lists of taps. Empty for drafters that read no taps."""
    alignment: ClassVar[str] = ""
    """Block drafters: which token a slot predicts."""
    backbone: ClassVar[str] = ""
    """Block drafters: the drafter whose layers, fc and norms a drafter from scratch starts from."""
    unpaired: ClassVar[str] = "no released weights are known"
    """Why a target may have no pair with this family; part of an error message."""
    needs: ClassVar[str] = ""
    """Settings that are required in addition to init if no pair exists."""
    reduced_format: ClassVar[str] = ""
    """Public layout that can store a reduced draft vocabulary; empty if none can."""

    def __post_init__(self):
        check(self.layers >= 1, f"drafter.layers must be positive, got {self.layers}")
        check(self.draft_vocab_size >= 0, f"drafter.draft_vocab_size must not be negative, got {self.draft_vocab_size}")
        check(
            not self.draft_vocab_size or bool(self.reduced_format),
            f"drafter.draft_vocab_size: no public layout of {self.family} can record which tokens a draft vocabulary "
            "keeps; leave it out",
        )

    def feature_spec(self, taps: list[int]) -> FeatureSpec:
        """Which of the target's states the drafter reads."""
        return FeatureSpec(taps=tuple(taps))

    def shape(self, target: TargetSpec, taps: list[int]) -> DrafterShape:
        """The shape of a drafter from scratch."""
        raise NotImplementedError

    def build(self, shape: DrafterShape, head: TargetHead | None) -> "Drafter":
        """A drafter of this shape, without loaded weights. None as head builds the modules only."""
        raise NotImplementedError

    def with_loop_settings(self, shape: DrafterShape) -> DrafterShape:
        """A released checkpoint's shape with the settings of this config that may differ from the checkpoint's."""
        return shape

    def shape_unread(self, target: TargetSpec, taps: list[int]) -> DrafterShape | None:
        """The shape by settings alone, for weights that are not on this machine. None if they do not determine it."""
        if self.init == "scratch":
            return self.shape(target, taps)
        return (
            self.with_loop_settings(replace(self, init="scratch", **self.released).shape(target, taps))
            if self.released
            else None
        )

    def section(self) -> dict:
        """Settings that an export must store in its dloop section, since no public key has them."""
        return {}

    def drafting(self, k: int) -> Self:
        """The same drafter with k tokens per stage."""
        raise NotImplementedError

    def as_exported(self, section: dict) -> Self:
        """These settings, changed to those in the dloop section of an export's config.json.

        The section has the export's tokens per stage and form of own states.
        """
        return self


@dataclass(frozen=True)
class TeacherLogits:
    """The target's logits of supervised rows: over the draft vocabulary and, if that is reduced, over the whole one."""

    kept: Tensor  # [R, V] over the draft vocabulary
    whole: Tensor | None = None  # [R, V_target]; None if the draft vocabulary is not reduced

    @property
    def taught(self) -> Tensor | None:
        """Rows whose most likely token of the target is in the draft vocabulary. [R] bool; None: all rows."""
        return None if self.whole is None else self.kept.amax(-1) == self.whole.amax(-1)

    def acceptance(self, logits: Tensor, distance: Tensor) -> Tensor:
        """Probability that rejection sampling accepts a token drawn from the draft logits [R, V]. [R]

        This is the sum over tokens of min(p, q). `distance` [R] is the total variation of the two distributions over
        the draft vocabulary, with the target's renormalised to it.
        With the whole vocabulary the result is 1 - distance. With a reduced one the sum is computed from the target's
        probabilities before renormalisation.
        """
        if self.whole is None:
            return (1 - distance).clamp(0, 1)
        precise = distance.dtype
        # [R] log of the target's probability of the whole draft vocabulary
        inside = torch.logsumexp(self.kept.to(precise), -1) - torch.logsumexp(self.whole.to(precise), -1)
        target = torch.softmax(self.kept, dim=-1, dtype=precise) * inside.exp()[:, None]
        return torch.minimum(torch.softmax(logits.detach(), dim=-1, dtype=precise), target).sum(-1)


class Drafter(nn.Module):
    """Drafts k tokens per stage for all branches at once.

    A branch sees the target's features strictly before its origin, and its own states of this round.
    Module attributes have the public tensor names.
    The target's head is shared with the target and is not among the parameters or in the state dict.
    """

    k: int
    """Tokens per stage."""
    lag: ClassVar[int] = 0
    """Number of rows before the origin that belong to the branch instead of to its context."""
    vocabulary_rows: ClassVar[tuple[str, ...]] = ()
    """Names of parameters with one row per id of the draft vocabulary."""

    def __init__(self, shape: DrafterShape, head: TargetHead | None):
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList()
        self.norm = norm_of(shape.layers[0], shape.hidden_size)
        # Public names: target id = draft id + d2t[draft id]; t2d is true at target ids that can be drafted.
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64) if shape.reduced else None)
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool) if shape.reduced else None)
        # A loaded d2t may select other rows of the head.
        self.register_load_state_dict_post_hook(lambda drafter, _: drafter.attach_head(drafter.head))
        self.attach_head(head)

    def attach_head(self, head: TargetHead | None) -> None:
        """Use this head for embeddings, and the draft vocabulary's rows of its lm_head for logits."""
        # nn.Module.__setattr__ would register the head as a submodule.
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "_draft_head", None)

    @property
    def draft_head(self) -> TargetHead | None:
        """The target's head with only the rows of the draft vocabulary, which are copied at the first use."""
        head = self.head
        if head is None or not self.shape.reduced:
            return head
        if self._draft_head is None:
            # If decoding uses it first, in inference mode, training must still be able to differentiate through it.
            with torch.inference_mode(False):
                object.__setattr__(self, "_draft_head", head.of_rows(self.kept_ids().to(head.lm_head_weight.device)))
        return self._draft_head

    # What a family implements

    def context_kv(self, context: Context) -> tuple[tuple[KV, ...], Tensor]:
        """Keys and values of context rows for every layer, and their projected features [B, T, D]."""
        raise NotImplementedError

    def stage(self, state: DraftState, anchors: Tensor, choose: Choose | None = None) -> DraftStage:
        """Draft k tokens after each anchor [B, N]."""
        raise NotImplementedError

    def loss(self, stage: DraftStage, anchors: Tensor, labels: Labels, progress: float, *, max_rows: int) -> StageLoss:
        """The family's released objective on one stage, as a sum over slots.

        `progress` is the completed share of the training, in [0, 1]. Logits of at most max_rows rows exist at once.
        """
        raise NotImplementedError

    def slot_weights(self) -> Tensor:
        """Weight of each slot in the loss; it restarts in every stage. [k]"""
        raise NotImplementedError

    # What all share

    def begin(self, context: Context, origins: Tensor) -> DraftState:
        """Start a round: `origins` [B, N] are positions of the anchors, at least 1."""
        kv, projected = self.context_kv(context)
        return self.open(kv, projected, context, origins)

    def commit(self, state: DraftState, context: Context) -> DraftState:
        """After a verification: drop own states and append new context rows.

        The next origin is the row after the last one.
        """
        kv, projected = self.context_kv(context)
        both = tuple(
            KV(torch.cat([old.keys, new.keys], dim=1), torch.cat([old.values, new.values], dim=1))
            for old, new in zip(state.context, kv, strict=True)
        )
        origins = torch.full_like(state.origin, context.start + context.features.shape[1])
        return self.open(both, projected, context, origins)

    def open(self, kv: tuple[KV, ...], projected: Tensor, context: Context, origins: Tensor) -> DraftState:
        """The state before the first stage of a round. `projected` [B, T, D]: the projected features of `context`."""
        first = torch.zeros_like(origins) if context.first is None else context.first.gather(1, origins)
        return DraftState(
            context=kv,
            own=None,
            context_mask=ContextMask(origins - self.lag, first),
            origin=origins,
            first=first,
            position=origins - first,
            hidden=None,
        )

    def places_of(self, context: Context) -> RotaryPositions:
        """Rotary positions of context rows, counted from the start of each document. [B or 1, T]"""
        rows = torch.arange(context.start, context.start + context.features.shape[1], device=context.features.device)[
            None
        ]
        return RotaryPositions(rows if context.first is None else rows - context.first)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of a stage to logits over the draft vocabulary. [..., D] -> [..., V]"""
        return self.draft_head.logits(self.norm(hidden))

    def require_reducible(self) -> None:
        """Raise ValueError if no layout can store this drafter with a reduced draft vocabulary."""

    def keep_tokens(self, ids: Tensor) -> None:
        """Set the draft vocabulary to these target ids [V_draft], ascending. ValueError if their number is wrong."""
        check(
            len(ids) == self.shape.draft_vocab_size,
            f"{len(ids)} ids for a draft vocabulary of {self.shape.draft_vocab_size}",
        )
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True
        self.attach_head(self.head)

    def kept_ids(self) -> Tensor | None:
        """Target ids of a reduced draft vocabulary, ascending. None for the whole vocabulary."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Convert ids of the draft vocabulary to ids of the target."""
        return drafted if self.d2t is None else drafted + self.d2t[drafted]

    def drafted_ids(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Target ids as ids of the draft vocabulary, and which of them are in it (None: all).

        Tokens outside get an arbitrary valid id.
        """
        kept = self.kept_ids()
        if kept is None:
            return tokens, None
        places = torch.searchsorted(kept, tokens).clamp(max=len(kept) - 1)
        return places, kept[places] == tokens

    @property
    def teacher_vocabulary(self) -> int:
        """Target logits computed per supervised row: all of them, even if few are kept (see teacher_logits)."""
        return self.shape.vocab_size

    def teacher_logits(self, teacher: Tensor) -> TeacherLogits:
        """The target's logits of hidden states [R, D] after its final norm."""
        whole = self.head.logits(teacher)
        return TeacherLogits(whole[:, self.kept_ids()], whole) if self.shape.reduced else TeacherLogits(whole)

    def draft_tokens(self, stage: DraftStage, anchors: Tensor, pick: Pick) -> Tensor:
        """Choose the k tokens of a stage. [B, N, k]"""
        if stage.tokens is not None:
            return stage.tokens  # a chain chooses its tokens during its passes
        return pick(self.logits(stage.hidden[:, :, stage.predicts]))

    def rescore(self, stage: DraftStage, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Logits of the drafted slots given the tokens before each. [B, N, k, V]"""
        return self.logits(stage.hidden[:, :, stage.predicts])

    def confidence(self, stage: DraftStage, anchors: Tensor, tokens: Tensor) -> Tensor | None:
        """A learned estimate of the acceptance probability, as logits [B, N, k]. None if the family has none."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings in the drafter's dtype. [...] -> [..., D]"""
        return self.head.embed(tokens).to(self.norm.weight.dtype)

    def start_vocabulary(self, counts: Counter[int], lm_head: Tensor, stop_ids: Sequence[int]) -> None:
        """Choose the draft vocabulary of a drafter from scratch.

        `counts` has the number of occurrences of each token in the responses.
        An lm_head of the drafter's own starts as a copy of the target's.
        """
        if self.shape.reduced:
            self.keep_tokens(frequent_ids(counts, self.shape, stop_ids))

    def initialise(self, target: Target) -> None:
        """Set the weights of a drafter from scratch that are not copies of the target's. Called under no_grad."""
        raise NotImplementedError

    def flops(self) -> Flops:
        """FLOPs of the matrix products of a training step, by part."""
        raise NotImplementedError


def frequent_ids(counts: Counter[int], shape: DrafterShape, stop_ids: Sequence[int]) -> Tensor:
    """Ids of the draft vocabulary: stop ids, then the most frequent tokens, then the lowest ids. [V_draft] ascending"""
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    ordered = dict.fromkeys([*stop_ids, *frequent, *range(shape.vocab_size)])
    return torch.tensor(sorted(list(ordered)[: shape.draft_vocab_size]))


def with_vocabulary(drafter: Drafter, settings: DrafterConfig, ids: Tensor) -> Drafter:
    """The same drafter with the draft vocabulary `ids` [V_draft], in the layout that can store it."""
    drafter.require_reducible()
    shape = replace(drafter.shape, draft_vocab_size=len(ids), format=settings.reduced_format)
    smaller = settings.build(shape, drafter.head).to(drafter.norm.weight.dtype)
    tensors = {
        name: tensor[ids] if name in drafter.vocabulary_rows else tensor
        for name, tensor in drafter.state_dict().items()
    }
    smaller.keep_tokens(ids)
    smaller.load_state_dict({**tensors, "d2t": smaller.d2t, "t2d": smaller.t2d})
    return smaller


def select_branches(state: DraftState, branches: int | Tensor) -> DraftState:
    """The state of the first `branches` branches, or of those with the indices [M].

    Training sorts origins by depth, so that finished branches are at the end of the N axis.
    """
    number = branches if isinstance(branches, int) else len(branches)
    if number == state.origin.shape[1]:
        return state
    chosen = slice(branches) if isinstance(branches, int) else branches
    own = None if state.own is None else tuple(KV(kv.keys[:, chosen], kv.values[:, chosen]) for kv in state.own)
    return replace(
        state,
        own=own,
        context_mask=state.context_mask.select_branches(branches),
        origin=state.origin[:, chosen],
        first=state.first[:, chosen],
        position=state.position[:, chosen],
        hidden=None if state.hidden is None else state.hidden[:, chosen],
    )


def linear_flops(*modules: nn.Module | None) -> int:
    """FLOPs of one row through all linear layers: two per weight."""
    return sum(2 * weight.numel() for weight in linear_weights(modules))


def linear_weights(modules: Sequence[nn.Module | None]) -> list[nn.Parameter]:
    return [
        layer.weight
        for module in modules
        if module is not None
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    ]


def linear_work(*modules: nn.Module | None, reaches_inputs: bool = True) -> Work:
    """FLOPs of one row through all linear layers.

    Backward has a product for the gradient of the row, if `reaches_inputs`, and one for that of each trained weight.
    """
    weights = linear_weights(modules)
    return Work(
        sum(2 * weight.numel() for weight in weights),
        sum(2 * weight.numel() * (reaches_inputs + weight.requires_grad) for weight in weights),
    )


def frozen_work(rows: int, columns: int) -> Work:
    """FLOPs of one row through a frozen matrix: backward computes the gradient of the row only."""
    return Work(2 * rows * columns, 2 * rows * columns)
