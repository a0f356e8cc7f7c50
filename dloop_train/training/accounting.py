"""Accounting: estimates FLOPs, memory and data transfers of one training step, term by term."""

from dataclasses import dataclass
from math import exp, lgamma, log, log1p

import torch

from dloop_train.config import DeepSpeedConfig, TrainConfig
from dloop_train.data.batches import TextBatch
from dloop_train.drafters.attention import QUERIES, ContextMask
from dloop_train.drafters.base import Drafter, Flops, Work, linear_flops
from dloop_train.drafters.layers import DecoderLayer, RMSNorm
from dloop_train.training.anchors import Origins, supervised
from dloop_train.training.engine import bucket_of
from dloop_train.training.unroll import Terms
from dloop_train.types import TargetSpec

UPDATE_FLOPS = 16
"""FLOPs of AdamW per parameter: two moments, their corrections, a root, a division, the decay.

These are no matrix products, and their share is negligible.
"""
UPDATE_BYTES = 28
"""Bytes read and written per parameter in an update.

The fp32 weight and two fp32 moments are read and written, and the gradient is read.
In bf16 the gradient and the rounded weight, both in bf16, take the place of the fp32 gradient.
"""


@dataclass(frozen=True)
class Term:
    """One line of the accounting: FLOPs and bytes of one rank in one optimiser step."""

    name: str
    stage: int = 0
    """The stage that the term belongs to, from 1; 0 if it belongs to no stage."""
    forward: float = 0.0
    """FLOPs."""
    backward: float = 0.0
    """FLOPs, including a forward pass that is recomputed."""
    held: float = 0.0
    """Bytes in the accelerator's memory at the peak."""
    moved: float = 0.0
    """Bytes transferred.

    These are features read from disk, states that the optimiser reads and writes,
    and gradients and weights sent between ranks.
    """

    @property
    def flops(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class StepCost:
    """FLOPs, memory and transfers of one rank's optimiser step."""

    terms: tuple[Term, ...]

    @property
    def flops(self) -> float:
        """FLOPs of forward pass, backward pass and update."""
        return sum(term.flops for term in self.terms)

    @property
    def peak(self) -> float:
        """Bytes. A slight overestimate, since gradients and graph are both counted at their full size."""
        return sum(term.held for term in self.terms)

    @property
    def moved(self) -> float:
        """Bytes transferred."""
        return sum(term.moved for term in self.terms)


def step_cost(
    drafter: Drafter,
    target: TargetSpec,
    counts: "StepCounts",
    train: TrainConfig,
    deepspeed: DeepSpeedConfig,
    *,
    ranks: int = 1,
    micro_batches: int = 1,
    row_bytes: float = 0.0,
    target_flops: float = 0.0,
    target_bytes: float = 0.0,
    head_matrices: int = 2,
    validating_bytes: float = 0.0,
) -> StepCost:
    """The cost of a step for one rank, which runs `micro_batches` micro-batches of size `counts`.

    `row_bytes` is the size on disk of one token's features.
    `target_flops` are the target's FLOPs per micro-batch and `target_bytes` its weights, if it runs inside the step.
    `head_matrices` counts the matrices (embedding, head) that are held in addition to these weights.
    `validating_bytes` are the weights of a target that is loaded only for validations.
    """
    element = 2 if train.precision == "bfloat16" else 4
    again = Again(stages=train.recompute, rows=deepspeed.stage == 3 and trained_head(drafter.flops()) > 0)
    work, held = forward_backward(drafter, counts, again), held_for_backward(drafter, counts, element, again)
    tokens = counts.sequences * counts.length
    inputs = tokens * (drafter.shape.feature_spec.width(target) + target.hidden_size) * element
    terms = [
        Term(
            "target features",
            forward=micro_batches * target_flops,
            held=inputs + target_bytes,
            moved=micro_batches * tokens * row_bytes,
        )
    ]
    terms += [
        Term(
            name,
            stage,
            micro_batches * work.get((name, stage), Work()).forward,
            micro_batches * work.get((name, stage), Work()).backward,
            held.get((name, stage), 0.0),
        )
        for name, stage in dict.fromkeys([*work, *held])
    ]
    working = working_space(drafter, counts, held, train.loss_rows, element)
    terms += [
        Term("working space", held=working),
        Term("target's embedding and head", held=head_matrices * target.vocab_size * target.hidden_size * element),
    ]
    terms += [Term("validation's target", held=validating_bytes)] if validating_bytes else []
    return StepCost(
        (
            *terms,
            *state_terms(drafter, train.precision, deepspeed, ranks, micro_batches, graph=sum(held.values()) + working),
        )
    )


def state_terms(
    drafter: Drafter, precision: str, deepspeed: DeepSpeedConfig, ranks: int, micro_batches: int, *, graph: float
) -> list[Term]:
    """Terms for weights, gradients and optimiser of a rank.

    `graph` is the size in bytes of a micro-batch's graph.
    Memory that is needed only before or only after the graph exists is counted as far as it exceeds the graph.
    """
    numbers = sum(parameter.numel() for parameter in drafter.parameters())
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    states = states_of(
        numbers, trained, precision=precision, deepspeed=deepspeed, ranks=ranks, micro_batches=micro_batches
    )
    element, updated = 2 if precision == "bfloat16" else 4, trained / (ranks if deepspeed.stage >= 1 else 1)
    # Gradients are reduced to the ranks that own them, and weights are gathered from their owners.
    # Stage 0 does both in one all-reduce. Stage 3 gathers the weights twice per micro-batch.
    travels = (ranks - 1) / ranks * trained * element
    gathered = travels * (2 * micro_batches if deepspeed.stage == 3 else 1)
    early = max(0.0, states.arriving - graph)
    late = max(0.0, states.late - graph - states.gathered - early)
    return [
        Term("weights", held=states.weights + states.gathered + early, moved=gathered),
        Term("gradients", held=states.gradients + late, moved=travels * (micro_batches if deepspeed.stage >= 2 else 1)),
        Term("gradients' bucket", held=states.bucket),
        Term("optimiser", forward=UPDATE_FLOPS * updated, held=states.optimiser, moved=UPDATE_BYTES * updated),
    ]


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of weights, gradients and optimiser on a rank's accelerator, as DeepSpeed's optimisers hold them."""

    weights: float
    gathered: float = 0.0
    """Whole weights during the computation of the layers, if the weights are divided over ranks or offloaded."""
    arriving: float = 0.0
    """Copies of weights that are being fetched, before a graph exists."""
    optimiser: float
    """Two moments in fp32, and the fp32 weights if they are separate from the weights above."""
    gradients: float
    """While the graph of the last micro-batch exists.

    These are buffers that also exist between steps, and gradients of earlier micro-batches.
    """
    bucket: float = 0.0
    """Gradients that are collected to be reduced together."""
    late: float
    """Additional bytes after that graph is freed.

    These are the last micro-batch's gradients, and the larger of the needs of their reduction and of the update.
    """


def states_of(
    numbers: int, trained: int, *, precision: str, deepspeed: DeepSpeedConfig, ranks: int, micro_batches: int
) -> States:
    """The states of `numbers` parameters, of which `trained` are trained.

    ZeRO divides the optimiser over ranks from stage 1 on, gradients from 2, weights from 3.
    There is one case per optimiser class that DeepSpeed chooses.
    With offload, gradients are counted as if they stayed in the accelerator's memory.
    """
    stage, low, one = deepspeed.stage, precision == "bfloat16", micro_batches == 1
    element, part, bucket = 2 if low else 4, trained / ranks, bucket_of(trained)
    optimiser = 0.0 if deepspeed.offload else (12 if low or stage else 8) * (part if stage else trained)
    # AdamW computes the square root of all second moments at once.
    root = 0.0 if deepspeed.offload else 4 * (part if stage else trained)
    if stage == 0:
        copies = 4 * trained if low else 0  # fp32 copies of the bf16 gradients, in addition to them
        return States(
            weights=element * numbers,
            optimiser=optimiser,
            gradients=0 if one else element * trained,
            late=element * trained * one + max(element * min(trained, REDUCED), copies + root),
        )
    if stage == 1 and low and not deepspeed.offload:  # accumulates in fp32, reduces in bf16
        return States(
            weights=2 * numbers,
            optimiser=optimiser,
            gradients=(4 if one else 6) * trained,
            late=2 * trained * one + max(2 * trained, root),
        )
    if stage == 1:
        waiting = 4 * bucket  # freed before the update
        return States(
            weights=element * numbers,
            optimiser=optimiser,
            gradients=0 if one else 4 * trained,
            bucket=waiting,
            late=4 * trained * one + max(0.0, 4 * part - waiting),
        )
    if stage == 2:
        waiting = 2 * element * bucket  # copied for the reduction; freed before the update
        copies = 0 if low else 4 * part  # in fp32 the sum is a new tensor, not accumulated in place
        return States(
            weights=element * numbers,
            optimiser=optimiser,
            gradients=0 if one and not low else 4 * part,
            bucket=waiting,
            late=max(0.0, copies + root - waiting),
        )
    gathered, arriving = (
        element * min(numbers, most) if ranks > 1 or deepspeed.offload else 0.0 for most in (GATHERED, FETCHED)
    )
    return States(
        weights=0.0 if deepspeed.offload else element * numbers / ranks,
        gathered=gathered,
        arriving=arriving,
        optimiser=optimiser,
        gradients=4 * part,
        bucket=element * bucket,
        late=2 * root,  # the square roots and a copy of the gradients
    )


REDUCED, FETCHED, GATHERED = 5 * 10**8, 5 * 10**7, 10**9
"""DeepSpeed's defaults, in parameters: reduced at once at stage 0; fetched at once and kept gathered at stage 3."""


def online_flops(model: torch.nn.Module, text_config: dict, *, tokens: float, length: float) -> float:
    """FLOPs of the target's forward pass over `tokens` tokens in sequences of `length` tokens.

    Needed if features are computed inside the training step.
    Counted are linear layers and the causal scores of softmax attention.
    The recurrences of linear attention are left out.
    """
    kinds = text_config.get("layer_types") or ["full_attention"] * text_config["num_hidden_layers"]
    size = text_config.get("head_dim") or text_config["hidden_size"] // text_config["num_attention_heads"]
    attending = sum(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds)
    return tokens * (linear_flops(model) + attending * 4 * text_config["num_attention_heads"] * size * length / 2)


# Counts


@dataclass(frozen=True)
class StepCounts:
    """Sizes of a micro-batch. Padding is included, since it is computed too."""

    sequences: int
    length: float
    """Tokens per sequence."""
    branches: tuple[float, ...]
    """Branches that run each stage, summed over the sequences."""
    looks: tuple[tuple[float, ...], ...]
    """For each stage and layer: queries times the context rows they are multiplied with, masked rows included."""
    rows: tuple[float, ...]
    """Supervised slots of each stage; 0 if the stage carries no loss."""


def expected_counts(drafter: Drafter, terms: Terms, *, sequences: int, length: float, origins: int) -> StepCounts:
    """Expected counts of a micro-batch whose sequences all have `origins` origins, with room for every stage.

    The expectation is over the draws of S. Short responses have fewer origins and stages, hence lower counts.
    In a stage every sequence runs as many branches as the sequence with the most.
    Origins are assumed to be spread evenly over a sequence.
    Branches that share a mask attend to context rows up to the last of their origins.
    """
    flops = drafter.flops()
    depths, stages = depths_of(terms), range(1, terms.depth_exposure + 2)
    reached = [sum(depth >= stage for depth in depths) / len(depths) for stage in stages]
    branches = tuple(sequences * max(1.0, most_of(sequences, origins, share)) for share in reached)
    together = max(1, QUERIES * flops.passes // flops.queries)
    groups = max(1.0, origins / len(depths) / together)  # branches are sorted by depth, then by position
    looks = []
    for count in branches:
        # Expected last origin of a group, averaged over the groups.
        rows = length * (groups + 1) / (2 * groups) * count / (count + 1)
        looks.append(tuple(count * flops.queries * min(rows, layer.window or rows) for layer in drafter.shape.layers))
    return StepCounts(
        sequences,
        length,
        branches,
        tuple(looks),
        tuple(sequences * origins * drafter.k * count / len(depths) for count in supervised_depths(terms)),
    )


def counts_of(drafter: Drafter, batch: TextBatch, origins: Origins, terms: Terms) -> StepCounts:
    """Counts of a given micro-batch with dense masks. FlexAttention's blocks are finer."""
    sequences, length = batch.features.shape[:2]
    first = torch.zeros_like(origins.position) if batch.first is None else batch.first.gather(1, origins.position)
    context_mask, flops, branches, looks, rows = (
        ContextMask(origins.position - drafter.lag, first),
        drafter.flops(),
        [],
        [],
        [],
    )
    for stage in range(1, terms.depth_exposure + 2):
        alive = origins.alive(stage)
        branches.append(float(sequences * alive))
        seen = context_mask.select_branches(alive)
        looks.append(
            tuple(
                float(
                    sequences
                    * sum(looked_at(seen, alive, ahead, layer.window) for ahead in rows_ahead(flops, drafter.k, stage))
                )
                for layer in drafter.shape.layers
            )
        )
        picked = supervised(batch, origins.position, stage, drafter.k) * terms.branches(stage, origins.depth)[..., None]
        # A stage that carries loss but has no supervised slot computes one slot of weight zero.
        rows.append(max(float(picked.sum()), 1.0) if terms.of_stage(stage) else 0.0)
    return StepCounts(sequences, length, tuple(branches), tuple(looks), tuple(rows))


def rows_ahead(flops: Flops, k: int, stage: int) -> list[list[int]]:
    """For each pass of a stage, the rows of its queries relative to the origin (-1: the row before it)."""
    slots = flops.queries // flops.passes
    if not flops.has_own:  # all queries are at the last context row
        return [[-1] * slots] * flops.passes
    return [
        list(range((stage - 1) * k + number * slots, (stage - 1) * k + (number + 1) * slots))
        for number in range(flops.passes)
    ]


def looked_at(context_mask: ContextMask, branches: int, ahead: list[int], window: int | None) -> int:
    """Queries of one sequence times context rows, summed over the groups of branches that share a mask."""
    return sum(
        len(range(branches)[part.branches]) * len(ahead) * (part.rows.stop - part.rows.start)
        for part in context_mask.parts(ahead, window)
    )


def most_of(sequences: int, origins: int, share: float) -> float:
    """Expected maximum of `sequences` draws from a binomial distribution: `origins` trials of probability `share`."""
    if share in (0.0, 1.0):
        return origins * share
    below, most = 0.0, 0.0
    for count in range(origins):
        # As a logarithm, since the binomial coefficient of thousands of origins overflows a float.
        ways = lgamma(origins + 1) - lgamma(count + 1) - lgamma(origins - count + 1)
        below += exp(ways + count * log(share) + (origins - count) * log1p(-share))
        most += 1 - min(below, 1.0) ** sequences
    return most


def depths_of(terms: Terms) -> list[int]:
    """Depths that are equally likely: S - 1 ~ U{1..N}, or S = 1 for N = 0."""
    return list(range(2, terms.depth_exposure + 2)) or [1]


def supervised_depths(terms: Terms) -> list[int]:
    """How many of the depths carry loss in each stage."""
    return [
        sum(
            terms.of_stage(stage) is not None and stage <= depth and bool(terms.branches(stage, torch.tensor(depth)))
            for depth in depths_of(terms)
        )
        for stage in range(1, terms.depth_exposure + 2)
    ]


def mean_stages(terms: Terms) -> float:
    """Mean of S. Responses that are too short for S stages lower it."""
    depths = depths_of(terms)
    return sum(depths) / len(depths)


def mean_logit_passes(terms: Terms) -> float:
    """Mean number of stages per branch that carry loss."""
    return sum(supervised_depths(terms)) / len(depths_of(terms))


# FLOPs


@dataclass(frozen=True)
class Again:
    """Parts of the forward pass that are recomputed in the backward pass instead of held."""

    stages: bool = False
    rows: bool = False
    """Logits of a trained head, if ZeRO-3 divides the head: it is whole only while the logits are computed."""


def forward_backward(
    drafter: Drafter,
    counts: StepCounts,
    again: Again = Again(),
) -> dict[tuple[str, int], Work]:
    """FLOPs of a micro-batch's matrix products, by (term, stage).

    Nearly exact. Unused outputs of the last stage have no backward pass, but it is not subtracted.
    The loss computes the gradient of its rows during the forward pass, while their logits exist.
    That gradient is counted as backward.
    """
    flops, k = drafter.flops(), drafter.k
    terms = {("context K/V", 0): counts.sequences * counts.length * flops.context}
    # One query times one key, in every head.
    pairs = [2 * layer.num_attention_heads * layer.head_dim for layer in drafter.shape.layers]
    for stage, (branches, rows) in enumerate(zip(counts.branches, counts.rows, strict=True), 1):
        terms["layers", stage] = branches * with_forward(flops.stage, again.stages)
        # Scores over the context are recomputed in the backward pass instead of held.
        terms["attention to context", stage] = sum(
            looks * pair for looks, pair in zip(counts.looks[stage - 1], pairs, strict=True)
        ) * with_forward(Work(2, 5), again.stages)
        terms["attention to own states", stage] = (
            branches
            * (own_pairs(flops, k, stage) if flops.has_own else 0)
            * sum(pairs)
            * with_forward(Work(2, 4), again.stages)
        )
        terms["own states' K/V", stage] = (branches * k if stage > 1 else 0) * with_forward(flops.own, again.stages)
        terms["token heads", stage] = (branches if rows else 0) * flops.slots
        terms["logits", stage] = rows * with_forward(flops.row, again.rows)
        terms["teacher's logits", stage] = rows * with_forward(flops.teacher, again.rows)
    return {name: work for name, work in terms.items() if work.total}


def own_pairs(flops: Flops, k: int, stage: int) -> int:
    """Queries times the own states they are multiplied with, in one stage (from 1) of one branch.

    These are the own states of earlier stages and of the passes so far, the current one included.
    """
    queries = flops.queries // flops.passes
    return sum(queries * ((stage - 1) * k + (number + 1) * queries) for number in range(flops.passes))


def with_forward(work: Work, again: bool) -> Work:
    """`work`, with the forward pass added to the backward pass if it is recomputed there."""
    return Work(work.forward, work.backward + work.forward) if again else work


def trained_head(flops: Flops) -> float:
    """Parameters of the trained matrices with V rows, derived from the FLOPs of a supervised slot.

    The gradient of the slot's state costs as much as the forward pass; the gradient of trained matrices as much again.
    """
    return (flops.row.backward - flops.row.forward) / 2


# Memory


def held_for_backward(
    drafter: Drafter,
    counts: StepCounts,
    element: int,
    again: Again = Again(),
) -> dict[tuple[str, int], float]:
    """Bytes that a micro-batch's graph keeps until its backward pass, by (term, stage).

    Counted are the tensors that autograd saves in eager mode.
    Small ones (positions, masks, tables of rotary positions) are left out.
    `element` is the size in bytes of a number in the training's precision.
    """
    flops, k, layers, shape = drafter.flops(), drafter.k, list(drafter.layers), drafter.shape
    keys, norm = sum(key_bytes(layer, element) for layer in layers if flops.has_own), norm_bytes(drafter.norm, element)
    # Bytes of the scores of one query and one own state, in all heads: before and after the softmax in fp32,
    # and in bf16 a copy that multiplies the values.
    score = sum(layer.self_attn.heads for layer in layers) * (8 + element % 4)
    kept = sum(2 * layer.self_attn.groups * layer.self_attn.size * element for layer in layers)
    row = sum(layer_bytes(layer, element) for layer in layers) + pairing_bytes(drafter, element)
    terms = {("context K/V", 0): counts.sequences * counts.length * (norm + keys) if flops.has_own else 0.0}
    for stage, (branches, rows) in enumerate(zip(counts.branches, counts.rows, strict=True), 1):
        own = own_pairs(flops, k, stage) if flops.has_own else 0
        terms["layers", stage] = branches * flops.queries * row
        # Every pass keeps its own copy of all own keys and values so far.
        terms["attention to own states", stage] = branches * own * (score + kept * flops.passes / flops.queries)
        terms["own states' K/V", stage] = branches * k * (norm + keys) if flops.own.total and stage > 1 else 0.0
        # With recomputation a stage keeps its output and its own states; one stage's graph at a time is built again.
        if again.stages:
            whole = {
                name: terms.pop((name, stage), 0.0) for name in ("layers", "attention to own states", "own states' K/V")
            }
            terms["layers", stage] = branches * (flops.queries * shape.hidden_size * element + k * kept)
            terms["a stage computed again", 0] = max(terms.get(("a stage computed again", 0), 0.0), sum(whole.values()))
        # The gradients of the rows and of a trained head are computed with the loss and held until the backward pass.
        terms["logits", stage] = (
            (branches * k * norm + rows * 2 * shape.hidden_size * element + trained_head(flops) * element)
            if rows
            else 0.0
        )
    return {name: held for name, held in terms.items() if held}


def norm_bytes(norm: RMSNorm, element: int) -> int:
    """Bytes that a norm keeps per row.

    These are its fp32 copy (in fp32 the row itself), the factor of the weight, and the input of the next product.
    """
    return len(norm.weight) * (4 + (element if norm.form == "plain" else 4) + element)


def layer_bytes(layer: DecoderLayer, element: int) -> int:
    """Bytes that a layer keeps per row, without scores.

    These are norms, queries before and after norm and rotation, the attention outputs over context and own states,
    and four tensors of the MLP.
    """
    attention = layer.self_attn
    norms = sum(norm_bytes(part, element) for part in layer.children() if isinstance(part, RMSNorm))
    queries = attention.heads * (
        attention.size * (4 + 3 * attention.gated) * element + head_norm_bytes(attention, element)
    )
    return norms + queries + key_bytes(layer, element) + 4 * layer.mlp.gate_proj.out_features * element


def key_bytes(layer: DecoderLayer, element: int) -> int:
    """Bytes that the keys and values of a layer keep per row; 0 if the layer computes none."""
    attention = layer.self_attn
    return (
        attention.groups * (2 * attention.size * element + head_norm_bytes(attention, element))
        if hasattr(attention, "k_proj")
        else 0
    )


def head_norm_bytes(attention: torch.nn.Module, element: int) -> int:
    """Bytes that the norm of one head keeps per row; 0 if heads have no norm."""
    return norm_bytes(attention.q_norm, element) if isinstance(attention.q_norm, RMSNorm) else 0


def pairing_bytes(drafter: Drafter, element: int) -> int:
    """Bytes kept per row if each pass pairs a token with a hidden state before the layers; 0 for block drafters.

    These are both halves as inputs of the products, and the drafter's own norms.
    """
    passes_on = drafter.flops().passes > 1
    norms = [part for part in drafter.children() if isinstance(part, RMSNorm) and part is not drafter.norm]
    return (
        (2 * drafter.shape.target_hidden_size * element + sum(norm_bytes(norm, element) for norm in norms))
        if passes_on
        else 0
    )


def working_space(
    drafter: Drafter, counts: StepCounts, held: dict[tuple[str, int], float], loss_rows: int, element: int
) -> float:
    """Temporary bytes on top of the graph at the peak: a stage's chunk of logits or a pass's scores, the larger one.

    A stage's loss runs while the graph of later stages does not exist yet, or no longer exists.
    """
    flops, heads = drafter.flops(), max(layer.self_attn.heads for layer in drafter.layers)
    most = 0.0
    for stage, (branches, rows) in enumerate(zip(counts.branches, counts.rows, strict=True), 1):
        so_far = sum(size for (_, of_stage), size in held.items() if of_stage <= stage) - (
            trained_head(flops) * element if rows else 0
        )
        scores = (
            counts.sequences
            * min(QUERIES, branches / counts.sequences * flops.queries / flops.passes)
            * heads
            * counts.length
            * (8 + element)
        )
        most = max(most, so_far + max(scores, chunk_bytes(drafter, flops, min(loss_rows, rows), element)))
    return max(0.0, most - sum(held.values()))


def chunk_bytes(drafter: Drafter, flops: Flops, rows: float, element: int) -> float:
    """Temporary bytes of one chunk of the loss.

    These are logits and probabilities in fp32, with a teacher also the teacher's,
    and the gradient of a trained head, of this chunk and summed.
    """
    vocabulary, taught = draft_vocabulary(drafter), flops.teacher.total > 0
    # With a reduced vocabulary the target's logits are computed for all ids, then the kept columns are copied.
    whole = rows * drafter.teacher_vocabulary * element if taught and vocabulary < drafter.teacher_vocabulary else 0
    wide = 16 if taught else 8 + element % 4  # bf16 logits exist beside the fp32 ones
    return (
        max(rows * vocabulary * wide + trained_head(flops) * (element + 4), rows * vocabulary * 2 * element + whole)
        if rows
        else 0.0
    )


def draft_vocabulary(drafter: Drafter) -> int:
    return drafter.shape.draft_vocab_size
