"""Types: the values that modules pass to each other, and the letters of their shapes.

B  sequences of a batch          T  tokens of a sequence        L  tapped target layers
N  branches: in training and replay the origins of a sequence, in decoding the round being drafted
D  hidden size                   V  vocabulary                  H  heads, G key/value heads, E head size
F  width of a feature row: L * D for taps, other layouts in FeatureSpec
W  slots of one drafter pass     k  tokens drafted per stage    P  tokens a branch has drafted so far
R  rows picked out of [B, N, k]
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class FeatureSpec:
    """The states of the target that a drafter reads. A feature row is their concatenation, in this order."""

    taps: tuple[int, ...] = ()
    """Outputs of these decoder layers."""
    shared_kv: bool = False
    """Keys and values of the target's last sliding-window and last full-attention layer, after norms and RoPE."""
    last_hidden: bool = False
    """The last hidden state after the final norm, which the lm_head reads."""

    def width(self, target: "TargetSpec") -> int:
        """Numbers in a feature row."""
        shared = sum(2 * layer.groups * layer.size for layer in target.shared_kv) if self.shared_kv else 0
        return (len(self.taps) + self.last_hidden) * target.hidden_size + shared


@dataclass(frozen=True)
class SharedKV:
    """A target layer whose keys and values a drafter attends to."""

    layer: int
    groups: int
    size: int
    window: int | None
    """Tokens that a query attends to, itself included; None in a layer of full attention."""


@dataclass(frozen=True)
class TargetSpec:
    """The facts about a target that other modules need: sizes, special ids and the source of its features."""

    name: str
    revision: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    mask_token_id: int
    stop_ids: tuple[int, ...]
    text_config: dict
    """The target's own text config as plain values; a drafter from scratch takes its layer sizes from it."""
    shared_kv: tuple[SharedKV, ...] = ()
    """The last sliding-window and the last full-attention layer; if none has a window, the last layer twice."""
    embed_scale: float = 1.0
    """Gemma multiplies its embeddings by sqrt(D)."""
    softcap: float | None = None
    """Gemma's final logits are softcap * tanh(logits / softcap)."""


@dataclass(frozen=True)
class Sample:
    """One answered prompt as the feature store keeps it."""

    id: str
    tokens: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool, true on the response and its end token
    features: Tensor  # [T, F] the states that the drafter reads
    last_hidden: Tensor  # [T, D] input of the target's lm_head (after the final norm)


@dataclass(frozen=True)
class Context:
    """The target's features that a drafter may read: rows [start, start + T) of the text."""

    tokens: Tensor  # [B, T + 1] ids of these rows and of the next one: a chain pairs row p with token p + 1
    features: Tensor  # [B, T, F]
    start: int = 0
    first: Tensor | None = None  # [B, T] if sequences are packed: the row at which the document of each row begins


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer: [B, T, G, E] for the context, [B, N, P, G, E] for own states."""

    keys: Tensor
    values: Tensor


class BranchMask(Protocol):
    """Which context rows each branch may attend to (drafters/attention.py has the implementation)."""

    def select_branches(self, branches: "int | Tensor") -> "BranchMask":
        """The mask of the first `branches` branches, or of those with these indices."""


@dataclass(frozen=True)
class DraftState:
    """The state of a draft between two stages.

    All branches share the context. A branch attends to it from the first row of its document to the row before its
    origin.
    """

    context: tuple[KV, ...]  # one per layer
    own: tuple[KV, ...] | None  # one per layer, for the branch's own states; None if it has none
    context_mask: BranchMask
    origin: Tensor  # [B, N] row of the anchor of the first stage
    first: Tensor  # [B, N] row at which the branch's document begins, its position 0
    position: Tensor  # [B, N] position of the anchor of the next stage, in its document
    # [B, N, W, D] hidden states of the last stage; for a chain before its first stage the projected features
    hidden: Tensor | None


@dataclass(frozen=True)
class DraftStage:
    """One drafting stage: k tokens per branch."""

    hidden: Tensor  # [B, N, W, D] the final layer's output, before the final norm
    predicts: slice  # the k slots whose hidden states predict the drafted tokens
    state: DraftState  # for the next stage
    tokens: Tensor | None = None  # [B, N, k] the tokens that `choose` returned between the passes (chains)


@dataclass(frozen=True)
class Labels:
    """The tokens that a stage should predict, slot by slot."""

    tokens: Tensor  # [B, N, k]
    teacher: Tensor  # [B, N, k, D] the target's post-norm hidden state one position earlier
    mask: Tensor  # [B, N, k] float, a contiguous prefix of ones inside the response


@dataclass(frozen=True)
class StageLoss:
    """A loss as a sum and its weight, so that it can be normalised over the whole optimiser step."""

    sum: Tensor
    weight: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Named sums and counts, reduced over ranks before they are divided."""


@dataclass(frozen=True)
class Round:
    """One round of decoding: draft, verify, commit. Decoding is reported from these values."""

    stages: int
    drafted: int
    accepted: int
    """Drafted tokens that the target accepted, including those after a stop token or the length limit.

    tau counts the last round completely.
    """
    emitted: int
    """Tokens that this round added to the text."""
    scores: tuple[float, ...]
    """Gate score of each stage: summed log-probability of its k tokens."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part: draft_first, draft_more, gate, verify, commit."""

    def drafted_by(self, tokens: int) -> list[int]:
        """The stage (from 1) that drafted each of the first `tokens` emitted tokens; 0 for the target's own token."""
        k = self.drafted // max(self.stages, 1)
        return [number // k + 1 if number < self.accepted else 0 for number in range(tokens)]
