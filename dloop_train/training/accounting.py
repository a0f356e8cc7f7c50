"""Accounting: FLOPs, bytes and peak memory of one training step, term by term, from the settings and the drafter's sizes."""

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
"""Of AdamW for one number: two moments, their corrections, a root, a division, the decay. Not products, and next to nothing."""
UPDATE_BYTES = 28
"""Read and written for one number: weight and two moments in fp32 both ways and the gradient (or for bf16 the gradient and the rounded weight)."""


@dataclass(frozen=True)
class Term:
    """One line of an account: what one rank does and holds in one optimiser step."""

    name: str
    stage: int = 0
    """The stage that it belongs to, from 1; 0 for what belongs to none."""
    forward: float = 0.0
    """FLOPs."""
    backward: float = 0.0
    """FLOPs, with the forward that is run again."""
    held: float = 0.0
    """Bytes in the accelerator's memory when most is held."""
    moved: float = 0.0
    """Bytes that must cross a border: features from disk, states through the optimiser, gradients and weights between ranks."""

    @property
    def flops(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class StepCost:
    """The account of one rank's optimiser step."""

    terms: tuple[Term, ...]

    @property
    def flops(self) -> float:
        """Products and update, forward and backward."""
        return sum(term.flops for term in self.terms)

    @property
    def peak(self) -> float:
        """Bytes. A little more than is ever held at once: gradients and graph are counted whole."""
        return sum(term.held for term in self.terms)

    @property
    def moved(self) -> float:
        """Bytes."""
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
    """What a rank does in a step of so many micro-batches, each as large as `counts`.

    `row_bytes` is what a token's features have on disk; `target_flops` what the target does for a micro-batch where it runs inside the step, and `target_bytes` its weights;
    `head_matrices` how many of embedding and head are held beside them; `validating_bytes` the weights of a target that comes for validations.
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
    """Weights, gradients and optimiser of a rank. What comes before and after the graph [bytes] of a micro-batch takes the place that it leaves."""
    numbers = sum(parameter.numel() for parameter in drafter.parameters())
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    states = states_of(
        numbers, trained, precision=precision, deepspeed=deepspeed, ranks=ranks, micro_batches=micro_batches
    )
    element, updated = 2 if precision == "bfloat16" else 4, trained / (ranks if deepspeed.stage >= 1 else 1)
    # Gradients are reduced to their owners and weights gathered from theirs, in one go under stage 0; stage 3 gathers twice a micro-batch.
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
    """Bytes that weights, gradients and optimiser take of a rank's accelerator, as DeepSpeed's optimisers hold them."""

    weights: float
    gathered: float = 0.0
    """Whole weights while the layers compute, where each rank has a part of them."""
    arriving: float = 0.0
    """Their copies on the way, when there is no graph yet."""
    optimiser: float
    """Two moments in fp32, and the fp32 weights that it moves."""
    gradients: float
    """While the graph of the last micro-batch stands: what is there between steps too, and what the micro-batches before have left."""
    bucket: float = 0.0
    """Gradients that wait to be reduced together."""
    late: float
    """More when that graph is gone: the last micro-batch's gradients, and what reducing them or the update needs, whichever is more."""


def states_of(
    numbers: int, trained: int, *, precision: str, deepspeed: DeepSpeedConfig, ranks: int, micro_batches: int
) -> States:
    """Of so many parameters. ZeRO shares out the optimiser from stage 1, gradients from 2, weights from 3.

    A case for each optimiser that DeepSpeed takes. With offload, gradients are counted as if they waited here.
    """
    stage, low, one = deepspeed.stage, precision == "bfloat16", micro_batches == 1
    element, part, bucket = 2 if low else 4, trained / ranks, bucket_of(trained)
    optimiser = 0.0 if deepspeed.offload else (12 if low or stage else 8) * (part if stage else trained)
    root = (
        0.0 if deepspeed.offload else 4 * (part if stage else trained)
    )  # AdamW takes the root of all second moments at once
    if stage == 0:
        copies = 4 * trained if low else 0  # of bf16 gradients in fp32, beside them
        return States(
            weights=element * numbers,
            optimiser=optimiser,
            gradients=0 if one else element * trained,
            late=element * trained * one + max(element * min(trained, REDUCED), copies + root),
        )
    if stage == 1 and low and not deepspeed.offload:  # adds up in fp32, sends in bf16
        return States(
            weights=2 * numbers,
            optimiser=optimiser,
            gradients=(4 if one else 6) * trained,
            late=2 * trained * one + max(2 * trained, root),
        )
    if stage == 1:
        waiting = 4 * bucket  # gone before the update
        return States(
            weights=element * numbers,
            optimiser=optimiser,
            gradients=0 if one else 4 * trained,
            bucket=waiting,
            late=4 * trained * one + max(0.0, 4 * part - waiting),
        )
    if stage == 2:
        waiting = 2 * element * bucket  # copied to be sent; gone before the update
        copies = 0 if low else 4 * part  # in fp32 the sum is made anew, instead of added to
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
        late=2 * root,
    )  # and a copy of the gradients


REDUCED, FETCHED, GATHERED = 5 * 10**8, 5 * 10**7, 10**9
"""Numbers that DeepSpeed reduces in one go at stage 0; that it fetches in one go, and keeps gathered, at stage 3: its defaults."""


def online_flops(model: torch.nn.Module, text_config: dict, *, tokens: float, length: float) -> float:
    """The target's own pass over so many tokens, in sequences of `length`, where features are read inside the training step.

    Linear layers, and causal scores in layers of softmax attention; the recurrences of linear attention are left out.
    """
    kinds = text_config.get("layer_types") or ["full_attention"] * text_config["num_hidden_layers"]
    size = text_config.get("head_dim") or text_config["hidden_size"] // text_config["num_attention_heads"]
    attending = sum(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds)
    return tokens * (linear_flops(model) + attending * 4 * text_config["num_attention_heads"] * size * length / 2)


# What is counted


@dataclass(frozen=True)
class StepCounts:
    """How many of everything a micro-batch computes with, padding included: what is padded is multiplied too."""

    sequences: int
    length: float
    """Tokens of a sequence."""
    branches: tuple[float, ...]
    """Branches that run each stage, over all sequences."""
    looks: tuple[tuple[float, ...], ...]
    """Of each stage, of each layer: queries times rows of the context that they are multiplied with, seen or hidden."""
    rows: tuple[float, ...]
    """Supervised slots of each stage; 0 where it carries no loss."""


def expected_counts(drafter: Drafter, terms: Terms, *, sequences: int, length: float, origins: int) -> StepCounts:
    """Of a micro-batch whose sequences have all the origins asked for, each with room for every stage.

    Short responses have fewer of both, so this is the most, on average over the draws of S. A stage runs as many branches
    of each sequence as the one with most of them has.
    Origins are taken to lie evenly over a sequence: branches that look at the context together see it up to the last of theirs.
    """
    flops = drafter.flops()
    depths, stages = depths_of(terms), range(1, terms.depth_exposure + 2)
    reached = [sum(depth >= stage for depth in depths) / len(depths) for stage in stages]
    branches = tuple(sequences * max(1.0, most_of(sequences, origins, share)) for share in reached)
    together = max(1, QUERIES * flops.passes // flops.queries)
    groups = max(1.0, origins / len(depths) / together)  # branches are sorted by depth, and then by place
    looks = []
    for count in branches:
        rows = length * (groups + 1) / (2 * groups) * count / (count + 1)  # the last of so many places
        looks.append(tuple(count * flops.queries * min(rows, layer.window or rows) for layer in drafter.shape.layers))
    return StepCounts(
        sequences,
        length,
        branches,
        tuple(looks),
        tuple(sequences * origins * drafter.k * count / len(depths) for count in supervised_depths(terms)),
    )


def counts_of(drafter: Drafter, batch: TextBatch, origins: Origins, terms: Terms) -> StepCounts:
    """Of a micro-batch at hand, where masks are dense; FlexAttention's blocks are finer."""
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
        # A stage that carries loss and has no supervised slot runs one of weight zero.
        rows.append(max(float(picked.sum()), 1.0) if terms.of_stage(stage) else 0.0)
    return StepCounts(sequences, length, tuple(branches), tuple(looks), tuple(rows))


def rows_ahead(flops: Flops, k: int, stage: int) -> list[list[int]]:
    """How far ahead of the origin the queries of each pass of a stage stand."""
    slots = flops.queries // flops.passes
    if not flops.has_own:
        return [[-1] * slots] * flops.passes
    return [
        list(range((stage - 1) * k + number * slots, (stage - 1) * k + (number + 1) * slots))
        for number in range(flops.passes)
    ]


def looked_at(context_mask: ContextMask, branches: int, ahead: list[int], window: int | None) -> int:
    """Queries of one sequence times rows of the context, group by group of branches."""
    return sum(
        len(range(branches)[part.branches]) * len(ahead) * (part.rows.stop - part.rows.start)
        for part in context_mask.parts(ahead, window)
    )


def most_of(sequences: int, origins: int, share: float) -> float:
    """The largest, on average, of as many draws as there are sequences, each of how many origins out of all have a chance of `share`."""
    if share in (0.0, 1.0):
        return origins * share
    below, most = 0.0, 0.0
    for count in range(origins):
        ways = (
            lgamma(origins + 1) - lgamma(count + 1) - lgamma(origins - count + 1)
        )  # as a logarithm: of thousands of origins they are more than a float holds
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
    """S on average. Responses too short for S stages make it less."""
    depths = depths_of(terms)
    return sum(depths) / len(depths)


def mean_logit_passes(terms: Terms) -> float:
    """Stages of a branch that carry loss, on average."""
    return sum(supervised_depths(terms)) / len(depths_of(terms))


# Products


@dataclass(frozen=True)
class Again:
    """What of the forward the backward pass runs once more, instead of holding it."""

    stages: bool = False
    rows: bool = False
    """Logits of a trained head, which ZeRO-3 must gather again."""


def forward_backward(drafter: Drafter, counts: StepCounts, again: Again = Again()) -> dict[tuple[str, int], Work]:  # noqa: B008 a frozen value
    """The products of a micro-batch by (term, stage).

    Nearly exact: what the last stage leaves behind and nobody reads has no backward, which is not taken off. The loss takes
    the rows' gradient while their logits exist, but it stands under backward.
    """
    flops, k = drafter.flops(), drafter.k
    terms = {("context K/V", 0): counts.sequences * counts.length * flops.context}
    pairs = [
        2 * layer.num_attention_heads * layer.head_dim for layer in drafter.shape.layers
    ]  # one product of a query with a key, in every head
    for stage, (branches, rows) in enumerate(zip(counts.branches, counts.rows, strict=True), 1):
        terms["layers", stage] = branches * with_forward(flops.stage, again.stages)
        # Scores over the context are computed again in the backward pass, instead of held.
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
    """Queries times own states that they are multiplied with, in one branch's stage (from 1): those of earlier stages and of the passes so far."""
    queries = flops.queries // flops.passes
    return sum(queries * ((stage - 1) * k + (number + 1) * queries) for number in range(flops.passes))


def with_forward(work: Work, again: bool) -> Work:
    """With the forward that the backward pass runs once more."""
    return Work(work.forward, work.backward + work.forward) if again else work


def trained_head(flops: Flops) -> float:
    """Numbers of the matrices with V rows that are trained: the row's own gradient costs as much as its forward, theirs as much again."""
    return (flops.row.backward - flops.row.forward) / 2


# Memory


def held_for_backward(
    drafter: Drafter, counts: StepCounts, element: int, again: Again = Again()
) -> dict[tuple[str, int], float]:  # noqa: B008 a frozen value
    """Bytes that a micro-batch's graph keeps until its backward pass, by (term, stage).

    Counted are the tensors that autograd saves in eager mode; small ones (positions, masks, tables of rotary positions)
    are left out. `element` is the size of a number in training's precision.
    """
    flops, k, layers, shape = drafter.flops(), drafter.k, list(drafter.layers), drafter.shape
    keys, norm = sum(key_bytes(layer, element) for layer in layers if flops.has_own), norm_bytes(drafter.norm, element)
    # Of a query's score for an own state in every head: before and behind the softmax in fp32, and a copy that multiplies the values.
    score = sum(layer.self_attn.heads for layer in layers) * (8 + element % 4)
    kept = sum(2 * layer.self_attn.groups * layer.self_attn.size * element for layer in layers)
    row = sum(layer_bytes(layer, element) for layer in layers) + pairing_bytes(drafter, element)
    terms = {("context K/V", 0): counts.sequences * counts.length * (norm + keys) if flops.has_own else 0.0}
    for stage, (branches, rows) in enumerate(zip(counts.branches, counts.rows, strict=True), 1):
        own = own_pairs(flops, k, stage) if flops.has_own else 0
        terms["layers", stage] = branches * flops.queries * row
        # Every pass keeps a copy of its own of the keys and values behind it.
        terms["attention to own states", stage] = branches * own * (score + kept * flops.passes / flops.queries)
        terms["own states' K/V", stage] = branches * k * (norm + keys) if flops.own.total and stage > 1 else 0.0
        if again.stages:  # kept are the stage's output and its own states; one stage at a time has its graph again
            whole = {
                name: terms.pop((name, stage), 0.0) for name in ("layers", "attention to own states", "own states' K/V")
            }
            terms["layers", stage] = branches * (flops.queries * shape.hidden_size * element + k * kept)
            terms["a stage computed again", 0] = max(terms.get(("a stage computed again", 0), 0.0), sum(whole.values()))
        # The rows' gradient waits for the backward pass, and so does that of a trained head.
        terms["logits", stage] = (
            (branches * k * norm + rows * 2 * shape.hidden_size * element + trained_head(flops) * element)
            if rows
            else 0.0
        )
    return {name: held for name, held in terms.items() if held}


def norm_bytes(norm: RMSNorm, element: int) -> int:
    """Of a row through a norm: its fp32 copy (for fp32 the row itself), what the weight multiplies, and what the next product reads."""
    return len(norm.weight) * (4 + (element if norm.form == "plain" else 4) + element)


def layer_bytes(layer: DecoderLayer, element: int) -> int:
    """Of a row through a layer, scores left out: norms, queries before and behind norm and rotation, values mixed from context and own states, four tensors of the MLP."""
    attention = layer.self_attn
    norms = sum(norm_bytes(part, element) for part in layer.children() if isinstance(part, RMSNorm))
    queries = attention.heads * (
        attention.size * (4 + 3 * attention.gated) * element + head_norm_bytes(attention, element)
    )
    return norms + queries + key_bytes(layer, element) + 4 * layer.mlp.gate_proj.out_features * element


def key_bytes(layer: DecoderLayer, element: int) -> int:
    """Of a row's keys and values."""
    attention = layer.self_attn
    return (
        attention.groups * (2 * attention.size * element + head_norm_bytes(attention, element))
        if hasattr(attention, "k_proj")
        else 0
    )


def head_norm_bytes(attention: torch.nn.Module, element: int) -> int:
    """Of one head's norm, where heads have one."""
    return norm_bytes(attention.q_norm, element) if isinstance(attention.q_norm, RMSNorm) else 0


def pairing_bytes(drafter: Drafter, element: int) -> int:
    """Of a pass that pairs a token with a hidden state before its layers: both halves as the products read them, and the norms of the drafter itself."""
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
    """What comes and goes on top of the graph when most is held: a stage's chunk of logits, or a pass's scores, whichever is more.

    A stage's loss comes when the graph of later stages is not there yet, or no more.
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
    """A chunk of the loss at work: logits and probabilities, with a teacher also its, in fp32; and a trained head's gradient, by itself and in the sum."""
    vocabulary, taught = draft_vocabulary(drafter), flops.teacher.total > 0
    # With a reduced vocabulary the target's logits are taken whole, and its columns copied out of them.
    whole = rows * drafter.teacher_vocabulary * element if taught and vocabulary < drafter.teacher_vocabulary else 0
    wide = 16 if taught else 8 + element % 4  # bf16 logits stand beside the fp32 ones
    return (
        max(rows * vocabulary * wide + trained_head(flops) * (element + 4), rows * vocabulary * 2 * element + whole)
        if rows
        else 0.0
    )


def draft_vocabulary(drafter: Drafter) -> int:
    return drafter.shape.draft_vocab_size
