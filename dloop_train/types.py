"""The values that travel between the parts, and the letters of their shapes.

B  sequences of a batch          T  tokens of a sequence        L  tapped target layers
N  branches: in training and replay the origins of a sequence, in decoding the round being drafted
D  hidden size                   V  vocabulary                  H  heads, G key/value heads, E head size
F  width of a feature row: L * D for taps, other layouts in Reads
W  slots of one drafter pass     k  tokens drafted per stage    P  tokens a branch has drafted so far
R  rows picked out of [B, N, k]
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FeatureSpec:
    """Which of the target's states a drafter reads. A feature row holds them side by side, in this order."""

    taps: tuple[int, ...] = ()
    """Outputs of these decoder layers."""
    shared_kv: bool = False
    """Keys and values, behind their norms and RoPE, of the target's last sliding layer and of its last full one."""
    last_hidden: bool = False
    """What the lm_head reads (after the final norm)."""

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
    """Tokens that a query sees, itself included; None in a layer of full attention."""


@dataclass(frozen=True)
class TargetSpec:
    """What others must know of a target: sizes, special ids and where its features come from."""

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
    """The last sliding and the last full layer; the last full layer twice where no layer slides."""
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
    last_hidden: Tensor  # [T, D] what the target's lm_head reads (after the final norm)


@dataclass(frozen=True)
class Context:
    """What a drafter may read of the target: rows [start, start + T) of the text."""

    tokens: Tensor  # [B, T + 1] ids of these positions and of the one after them (a chain pairs row p with token p + 1)
    features: Tensor  # [B, T, F]
    start: int = 0
    first: Tensor | None = None  # [B, T] where several documents stand in one row: the row that each one's begins at


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer: [B, T, G, E] for the context, [B, N, P, G, E] for own states."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class DraftState:
    """A draft under way. The context is shared by the branches; a branch sees it from its document's first row to the one before its origin."""

    context: tuple[KV, ...]  # one a layer
    own: tuple[KV, ...] | None  # one a layer; what the branch drafted itself
    context_mask: Any  # the branches' attention.Sight
    origin: Tensor  # [B, N] row of the anchor of the first stage
    first: Tensor  # [B, N] row of the branch's document at which positions begin to count
    position: Tensor  # [B, N] position of the anchor of the next stage, in its document
    hidden: (
        Tensor | None
    )  # [B, N, W, D] hidden states of the last stage; for a chain before its first stage the projected features


@dataclass(frozen=True)
class DraftStage:
    """One drafting stage: k tokens a branch."""

    hidden: Tensor  # [B, N, W, D] the final layer's output, before the final norm
    predicts: slice  # the k slots whose hidden states say the drafted tokens
    state: DraftState  # for the next stage
    tokens: Tensor | None = None  # [B, N, k] what `choose` said on the way (chains)


@dataclass(frozen=True)
class Labels:
    """What a stage should have said, slot by slot."""

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
    """One draft - verify - commit of decoding; a report is made of nothing but these."""

    stages: int
    drafted: int
    accepted: int
    """Drafted tokens that the target confirmed, also past a stop token or the length limit (tau counts the last round whole)."""
    emitted: int
    """Tokens that this round added to the text."""
    scores: tuple[float, ...]
    """Gate score of each stage: summed log-probability of its k tokens."""
    seconds: dict[str, float] = field(default_factory=dict)
    """draft_first, draft_more, gate, verify, commit."""

    def drafted_by(self, tokens: int) -> list[int]:
        """The stage (from 1) that drafted each of so many emitted tokens; 0 for the target's own, a corrected one or a bonus."""
        k = self.drafted // max(self.stages, 1)
        return [number // k + 1 if number < self.accepted else 0 for number in range(tokens)]
