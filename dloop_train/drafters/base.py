"""Drafter: a model that drafts ahead of a frozen target. Training and decoding run the same two methods, begin and stage."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

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
"""choose(step, hidden [B, N, D]) -> tokens [B, N]: what a chain feeds to its next pass."""

Pick = Callable[[Tensor], Tensor]
"""pick(logits [..., V]) -> target ids [...]: how a token is chosen, the same for all slots or slot by slot."""


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """What a checkpoint's config.json says of a drafter: enough to build it and to write it back."""

    format: str
    """Public layout: the name of a file in checkpoints/."""
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
    """Scale of the target's embeddings and softcap of its logits, where a file says them."""
    draft_vocab_size: int = 0
    """Target ids that can be drafted; 0 becomes the whole vocabulary."""

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
        """The shape on a target, with what its file leaves to the target; `taps` are the caller's for files that name none."""
        return self

    def expected_fields(self, target: TargetSpec, taps: Sequence[int]) -> dict:
        """What a checkpoint made for this target would hold, field by field."""
        facts = {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "taps": tuple(taps)}
        if self.num_target_layers is not None:
            facts["num_target_layers"] = target.num_layers
        if self.head_scales is not None:
            facts["head_scales"] = (target.embed_scale, target.softcap)
        return facts


@dataclass(frozen=True)
class Work:
    """FLOPs of matrix products: multiply-adds times two. Norms, activations and softmax are not products and count nothing."""

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
    """The products of a drafter's parts, each for one of what is counted; training/accounting.py knows how many there are in a step."""

    context: Work
    """A context row, once for all stages."""
    stage: Work
    """A branch's stage through the linear parts of the layers."""
    own: Work
    """An own state on its way into the next stage, of which a stage leaves k."""
    queries: int
    """Queries of a branch's stage."""
    passes: int
    """Passes that they are asked in; each sees the own states of those before it."""
    has_own: bool
    """Whether queries also meet keys of what the branch drafted itself."""
    slots: Work
    """A branch's stage through what stands between layers and logits; in stages with loss alone."""
    row: Work
    """The logits of a supervised slot."""
    teacher: Work
    """The target's logits of a supervised slot, and what compares with them."""


@dataclass(kw_only=True)
class DrafterConfig:
    """A drafter: where its weights come from and how it is looped."""

    init: str = ""
    """scratch, a folder, a hub id, or starter:<name> for weights that come with this package. A pair's YAML names it, or the user."""
    format: str = ""
    """Public layout of a drafter from scratch; from released weights it is read from their config.json."""
    layers: int = 1
    taps: list[int] = field(default_factory=list)
    """Tapped target layers; empty takes the target's list for this kind."""
    revision: str = "main"
    draft_vocab_size: int = 0
    """Target ids that can be drafted: the most frequent ones of the responses, and the stop ids. 0 keeps the whole vocabulary, or a checkpoint's own."""
    released: dict[str, int] = field(default_factory=dict)
    """What these settings would be for a drafter from scratch as large as the weights that `init` names: what a dry run reckons with before they are on this machine."""

    family: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    """block or chain: which of the target's tap lists applies. Empty for drafters that read no taps."""
    alignment: ClassVar[str] = ""
    """Block drafters: which token a slot predicts."""
    backbone: ClassVar[str] = ""
    """Block drafters: whose layers a drafter from scratch starts from."""
    unpaired: ClassVar[str] = "no released weights are known"
    """Why a target may lack a pair with this family."""
    needs: ClassVar[str] = ""
    """What must be set beside init where there is no pair."""
    reduced_format: ClassVar[str] = ""
    """The public layout that can say a reduced draft vocabulary; empty where none can."""

    def __post_init__(self):
        check(self.layers >= 1, f"drafter.layers must be positive, got {self.layers}")
        check(self.draft_vocab_size >= 0, f"drafter.draft_vocab_size must not be negative, got {self.draft_vocab_size}")
        check(
            not self.draft_vocab_size or bool(self.reduced_format),
            f"drafter.draft_vocab_size: no public layout of {self.family} can say which tokens a draft vocabulary keeps; leave it out",
        )

    def feature_spec(self, taps: list[int]) -> FeatureSpec:
        """Which of the target's states the drafter reads."""
        return FeatureSpec(taps=tuple(taps))

    def shape(self, target: TargetSpec, taps: list[int]) -> DrafterShape:
        """The shape of a drafter from scratch."""
        raise NotImplementedError

    def build(self, shape: DrafterShape, head: TargetHead | None) -> "Drafter":
        raise NotImplementedError

    def with_loop_settings(self, shape: DrafterShape) -> DrafterShape:
        """A released checkpoint's shape as these settings loop it."""
        return shape

    def shape_unread(self, target: TargetSpec, taps: list[int]) -> DrafterShape | None:
        """The shape as far as settings tell it, for weights that are not on this machine; None where they do not."""
        if self.init == "scratch":
            return self.shape(target, taps)
        return (
            self.with_loop_settings(replace(self, init="scratch", **self.released).shape(target, taps))
            if self.released
            else None
        )

    def section(self) -> dict:
        """What of these settings an export must keep, since no public key tells it."""
        return {}

    def drafting(self, k: int) -> "DrafterConfig":
        """The same drafter with k tokens per stage."""
        raise NotImplementedError

    def as_exported(self, section: dict) -> "DrafterConfig":
        """These settings as the dloop section of an export's config.json changes them: its own tokens per stage and form of own states."""
        return self


@dataclass(frozen=True)
class TeacherLogits:
    """The target's logits of supervised rows, and what a reduced draft vocabulary leaves out of them."""

    kept: Tensor  # [R, V] over the draft vocabulary
    whole: Tensor | None = None  # [R, V_target]; None where the draft vocabulary is the target's

    @property
    def taught(self) -> Tensor | None:
        """Rows whose most likely token is in the draft vocabulary; None: all. [R] bool"""
        return None if self.whole is None else self.kept.amax(-1) == self.whole.amax(-1)

    def acceptance(self, logits: Tensor, distance: Tensor) -> Tensor:
        """How often rejection sampling accepts a token drawn from the draft logits [R, V]: the sum over tokens of min(p, q). [R]

        `distance` [R] is the total variation over the draft vocabulary, to which the target's distribution is renormalised. Where it is
        the whole one the two add up to 1; elsewhere the tokens outside are the target's alone.
        """
        if self.whole is None:
            return (1 - distance).clamp(0, 1)
        precise = distance.dtype
        inside = torch.logsumexp(self.kept.to(precise), -1) - torch.logsumexp(self.whole.to(precise), -1)
        target = torch.softmax(self.kept, dim=-1, dtype=precise) * inside.exp()[:, None]
        return torch.minimum(torch.softmax(logits.detach(), dim=-1, dtype=precise), target).sum(-1)


class Drafter(nn.Module):
    """Drafts k tokens a stage for every branch at once.

    Nothing of the target at or after a branch's origin is visible to it; what it drafted itself in this round is. Module
    attributes carry the public tensor names. The target's head is borrowed and stays outside parameters and state dict.
    """

    k: int
    """Tokens per stage."""
    lag: ClassVar[int] = 0
    """Rows before the origin that belong to the branch and not to its context."""
    vocabulary_rows: ClassVar[tuple[str, ...]] = ()
    """Parameters with a row for each id of the draft vocabulary."""

    def __init__(self, shape: DrafterShape, head: TargetHead | None):
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList()
        self.norm = norm_of(shape.layers[0], shape.hidden_size)
        # The public maps: target id = draft id + d2t, and which target ids are kept.
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64) if shape.reduced else None)
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool) if shape.reduced else None)
        self.register_load_state_dict_post_hook(
            lambda drafter, _: drafter.attach_head(drafter.head)
        )  # another vocabulary, other rows of the head
        self.attach_head(head)

    def attach_head(self, head: TargetHead | None) -> None:
        """Use this head for embeddings and, of its lm_head the rows of the draft vocabulary, for logits."""
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "_draft_head", None)

    @property
    def draft_head(self) -> TargetHead | None:
        """The borrowed head with the rows of the draft vocabulary alone; these are copied at the first use."""
        head = self.head
        if head is None or not self.shape.reduced:
            return head
        if self._draft_head is None:
            with torch.inference_mode(
                False
            ):  # where decoding asks first, training must still be able to differentiate through it
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
        """The family's released objective on one stage, as a sum over slots. progress is in [0, 1]."""
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
        """After a verification: drop own states, append what the target now knows; the next origin follows its last row."""
        kv, projected = self.context_kv(context)
        both = tuple(
            KV(torch.cat([old.keys, new.keys], dim=1), torch.cat([old.values, new.values], dim=1))
            for old, new in zip(state.context, kv, strict=True)
        )
        origins = torch.full_like(state.origin, context.start + context.features.shape[1])
        return self.open(both, projected, context, origins)

    def open(self, kv: tuple[KV, ...], projected: Tensor, context: Context, origins: Tensor) -> DraftState:
        """A state before its first stage; `projected` are the context's last rows."""
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
        """Where context rows stand in their documents. [B or 1, T]"""
        rows = torch.arange(context.start, context.start + context.features.shape[1], device=context.features.device)[
            None
        ]
        return RotaryPositions(rows if context.first is None else rows - context.first)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of a stage to logits over the draft vocabulary. [..., D] -> [..., V]"""
        return self.draft_head.logits(self.norm(hidden))

    def require_reducible(self) -> None:
        """Stop where no layout holds this drafter with a reduced draft vocabulary."""

    def keep_tokens(self, ids: Tensor) -> None:
        """Make these target ids [V_draft] (ascending) the draft vocabulary."""
        check(
            len(ids) == self.shape.draft_vocab_size,
            f"{len(ids)} ids for a draft vocabulary of {self.shape.draft_vocab_size}",
        )
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True
        self.attach_head(self.head)

    def kept_ids(self) -> Tensor | None:
        """Target ids of a reduced draft vocabulary, ascending; None for the whole one."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Ids of the draft vocabulary to ids of the target."""
        return drafted if self.d2t is None else drafted + self.d2t[drafted]

    def drafted_ids(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Target ids as ids of the draft vocabulary, and which of them are in it (None: all)."""
        kept = self.kept_ids()
        if kept is None:
            return tokens, None
        places = torch.searchsorted(kept, tokens).clamp(max=len(kept) - 1)
        return places, kept[places] == tokens

    @property
    def teacher_vocabulary(self) -> int:
        """Logits of the target that a supervised row of its distribution takes: all of them, also where few are kept (see teacher_logits)."""
        return self.shape.vocab_size

    def teacher_logits(self, teacher: Tensor) -> TeacherLogits:
        """The target's logits of hidden states [R, D]."""
        whole = self.head.logits(teacher)
        return TeacherLogits(whole[:, self.kept_ids()], whole) if self.shape.reduced else TeacherLogits(whole)

    def draft_tokens(self, stage: DraftStage, anchors: Tensor, pick: Pick) -> Tensor:
        """Choose the k tokens of a stage. [B, N, k]"""
        if stage.tokens is not None:
            return stage.tokens  # a chain has spoken on the way
        return pick(self.logits(stage.hidden[:, :, stage.predicts]))

    def rescore(self, stage: DraftStage, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Logits of the drafted slots given the tokens before each. [B, N, k, V]"""
        return self.logits(stage.hidden[:, :, stage.predicts])

    def confidence(self, stage: DraftStage, anchors: Tensor, tokens: Tensor) -> Tensor | None:
        """A learned acceptance estimate [B, N, k], where a family has one."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings in the drafter's dtype. [...] -> [..., D]"""
        return self.head.embed(tokens).to(self.norm.weight.dtype)

    def start_vocabulary(self, counts: Counter[int], lm_head: Tensor, stop_ids: Sequence[int]) -> None:
        """The draft vocabulary of a drafter from scratch; `counts` says how often responses hold a token. A head of its own starts as the target's."""
        if self.shape.reduced:
            self.keep_tokens(frequent_ids(counts, self.shape, stop_ids))

    def initialise(self, target: Target) -> None:
        """What of a drafter from scratch the target's last layers do not give; called without gradients."""
        raise NotImplementedError

    def flops(self) -> Flops:
        """What a training step's products are made of."""
        raise NotImplementedError


def frequent_ids(counts: Counter[int], shape: DrafterShape, stop_ids: Sequence[int]) -> Tensor:
    """The stop ids, then the most frequent tokens, then any, as many as the draft vocabulary has. [V_draft] ascending"""
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    ordered = dict.fromkeys([*stop_ids, *frequent, *range(shape.vocab_size)])
    return torch.tensor(sorted(list(ordered)[: shape.draft_vocab_size]))


def with_vocabulary(drafter: Drafter, settings: DrafterConfig, ids: Tensor) -> Drafter:
    """The same drafter with these target ids [V_draft] alone to draft, in the layout that can say it."""
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
    """So many branches from the start of the N axis, or those of an index [M]. Training sorts origins by depth, so that finished ones leave at the end."""
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
    """2 x the weights of all linear layers: the FLOPs of one row through each."""
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
    """One row through all linear layers: backward is a product for the row's gradient, if it is wanted, and one for the weight's, where it is trained."""
    weights = linear_weights(modules)
    return Work(
        sum(2 * weight.numel() for weight in weights),
        sum(2 * weight.numel() * (reaches_inputs + weight.requires_grad) for weight in weights),
    )


def frozen_work(rows: int, columns: int) -> Work:
    """One row through a frozen matrix: of the gradients only the row's is taken."""
    return Work(2 * rows * columns, 2 * rows * columns)
