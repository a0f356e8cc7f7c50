"""Tests of every drafter: unrolled stages equal decoded ones, no leaks, independent branches, files."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conftest import VARIANTS, Watch, make_drafter, settings_of, shape_of

from dloop_train.checkpoints.files import load_drafter, save_drafter
from dloop_train.config import CONF
from dloop_train.decoding.loop import draft_stage
from dloop_train.decoding.rules import GREEDY, SampleRng
from dloop_train.drafters import attention
from dloop_train.drafters.attention import ContextMask, context_in_blocks, context_in_parts, loop_attention
from dloop_train.drafters.base import select_branches
from dloop_train.drafters.sizes import Rope
from dloop_train.types import KV, Context

EXACT = dict(rtol=0, atol=1e-10)


def text_at(tokens, positions):
    return tokens.gather(1, positions.clamp(max=tokens.shape[1] - 1))


def whole_stages_of(drafter, tokens, features, origins, count, start=0):
    """`count` teacher-forced stages from origins [B, N]."""
    state, stages = drafter.begin(Context(tokens, features, start), origins), []
    for number in range(count):
        anchors = origins + number * drafter.k
        stages.append(
            drafter.stage(
                state, text_at(tokens, anchors), lambda step, _, anchors=anchors: text_at(tokens, anchors + step + 1)
            )
        )
        state = stages[-1].state
    return stages


def stages_of(*arguments, **more):
    """Hidden states of the same stages. list of [B, N, W, D]"""
    return [stage.hidden for stage in whole_stages_of(*arguments, **more)]


RULES = [(None, False), (None, True), (7, True), (7, False), (1, True), (200, False)]
"""(window, causal) of a layer."""


def attended(length=40, branches=9, slots=4, drafted=8, dtype=torch.float64, documents=True):
    """Random queries, context, own keys and values, and context mask; each row holds two documents by default."""
    generator = torch.Generator().manual_seed(3)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    queries, context, own = (
        make(2, branches, slots, 6, 16),
        KV(make(2, length, 2, 16), make(2, length, 2, 16)),
        KV(make(2, branches, drafted, 2, 16), make(2, branches, drafted, 2, 16)),
    )
    first = torch.where(torch.arange(branches) % 2 == 1, 17, 0).expand(2, -1) * documents
    origin = first + torch.randint(0, length - 17, (2, branches), generator=generator)
    origin[0, 0] = first[0, 0]  # the context of this branch is empty
    return queries, context, own, ContextMask(origin, first)


def attention_by_hand(queries, context, own, context_mask, window, causal):
    """Plain softmax over the rows that a branch may attend to, one branch at a time. [B, N, Q, H, E]"""
    drafted, slots, group = own.keys.shape[2], queries.shape[2], queries.shape[3] // context.keys.shape[2]
    out = []
    for row in range(len(queries)):
        for branch in range(queries.shape[1]):
            first, origin = int(context_mask.first[row, branch]), int(context_mask.origin[row, branch])
            keys, values = (
                torch.cat([shared[row, first:origin], mine[row, branch]]).repeat_interleave(group, 1)
                for shared, mine in ((context.keys, own.keys), (context.values, own.values))
            )
            at, place = origin + torch.arange(drafted - slots, drafted), torch.arange(first, origin + drafted)
            seen = in_sight(LayerWindow(window, causal), at, place)
            scores = torch.einsum("qhe,khe->hqk", queries[row, branch], keys) / 4
            out.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, float("-inf")).softmax(-1), values))
    return torch.stack(out).unflatten(0, queries.shape[:2])


@dataclass(frozen=True)
class LayerWindow:
    window: int | None
    causal: bool


@pytest.mark.parametrize("together", [3, 512])
@pytest.mark.parametrize("window, causal", RULES)
def test_attention_equals_plain_softmax_by_branch(window, causal, together, monkeypatch):
    """Outputs and gradients, with branches that have no context, computed one branch at a time and all at once."""
    monkeypatch.setattr(attention, "QUERIES", together)
    queries, context, own, context_mask = attended()
    inputs = (queries, context.keys, context.values, own.keys, own.values)
    ours, plain = (
        loop_attention(queries, context, own, context_mask, 0.25, window=window, causal=causal),
        attention_by_hand(queries, context, own, context_mask, window, causal),
    )
    torch.testing.assert_close(ours, plain, **EXACT)
    upstream = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(4))
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(plain, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 7])
def test_blocks_see_what_parts_see(window, dtype):
    """FlexAttention and the dense form give equal outputs and log-sum-exps.

    The block masks are also cut down to the branches that remain in later stages.
    """
    queries, context, _, context_mask = attended(length=200, branches=40, dtype=dtype)
    # FlexAttention has gradients only on a GPU; test_gpu.py tests them.
    grouped = queries.detach().unflatten(3, (2, 3)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
    shared = [rows.detach().transpose(1, 2) for rows in (context.keys, context.values)]
    for left in (40, 33):
        blocks = context_in_blocks(
            grouped[:, :, :left], *shared, context_mask.select_branches(left), range(4, 8), 0.25, window
        )
        parts = context_in_parts(
            grouped[:, :, :left], *shared, context_mask.select_branches(left), range(4, 8), 0.25, window
        )
        for a, b in zip(blocks, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert parts[1].isinf().any()  # some branch has no context


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)
def test_batches_and_stages_of_all_sizes_share_compiled_forms(monkeypatch):
    """Everything is traced as on a GPU, but no kernels are generated.

    Beyond torch's recompile limit FlexAttention would silently fall back to holding all scores in memory.
    """
    compiled = Counter()

    def compile_counted(function, **settings):
        def backend(module, examples):
            compiled[function.__name__] += 1
            return module.forward

        return compile_by_torch(function, backend=backend, **settings)

    compile_by_torch = torch.compile
    monkeypatch.setattr(torch, "compile", compile_counted)
    whole, flex = attention.flex_functions.__wrapped__(True), attention.flex
    monkeypatch.setattr(attention, "flex_functions", lambda compiled: whole)
    monkeypatch.setattr(attention, "flex", lambda compiled: flex(True))
    generator = np.random.default_rng(0)
    for _ in range(20):
        length, branches = int(generator.integers(60, 900)), int(generator.integers(3, 60))
        queries, context, _, context_mask = attended(length=length, branches=branches, dtype=torch.float32)
        grouped = queries.detach().unflatten(3, (2, 3)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
        for left in dict.fromkeys((branches, branches * 2 // 3, branches // 3)):
            context_in_blocks(
                grouped[:, :, :left],
                context.keys.detach().transpose(1, 2),
                context.values.detach().transpose(1, 2),
                context_mask.select_branches(left),
                range(4, 8),
                0.25,
                None,
            )
    assert 8 < compiled["flex_attention"] < attention.FORMS / 4 and compiled["create_block_mask"] < attention.FORMS / 4


def test_autograds_thread_may_compile_as_many_forms():
    """torch's compile settings are per thread.

    On a GPU a backward pass runs in threads of its own, and recomputation of stages happens there.
    """
    attention.flex(True)
    with ThreadPoolExecutor(1) as other:
        assert (
            other.submit(lambda: attention.flex(True) and torch._dynamo.config.recompile_limit).result()
            == attention.FORMS
        )


def allocated(length, branches, drafted):
    """Number of elements that attention allocates in the forward and backward pass."""
    queries, context, own, context_mask = attended(length, branches, 4, drafted, documents=False)
    with Watch() as watch:
        loop_attention(queries, context, own, context_mask, 0.25, causal=True).sum().backward()
    return watch.elements


def test_attention_grows_linearly_with_branches_and_drafted_tokens():
    """The number of allocated elements, which bounds time and memory, is linear in branches and in own rows."""
    few, more, most = (allocated(60, branches, 8) for branches in (64, 128, 192))
    assert most - more == pytest.approx(more - few, rel=0.05) and more < 2 * few
    few, more, most = (allocated(60, 64, drafted) for drafted in (8, 16, 24))
    assert most - more == pytest.approx(more - few, rel=0.05) and more < 2 * few


def test_every_drafter_yaml_has_a_variant():
    assert {path.stem for path in (CONF / "drafter").glob("*.yaml")} == {family for family, *_ in VARIANTS.values()}


def test_unrolled_equals_one_branch_at_a_time(drafter, text):
    """Branches computed together, some with origins closer than k, equal each branch computed alone."""
    tokens, features, _ = text
    origins = torch.tensor([[3, 4, 5, 12], [2, 9, 10, 1]])
    together = stages_of(drafter, tokens, features, origins, 3)
    for row in range(2):
        for branch in range(4):
            alone = stages_of(
                drafter, tokens[row : row + 1], features[row : row + 1], origins[row : row + 1, branch : branch + 1], 3
            )
            for a, b in zip(together, alone, strict=True):
                torch.testing.assert_close(a[row, branch], b[0, 0], **EXACT)


def test_context_cut_at_the_origin_changes_nothing(drafter, text):
    """Decoding has features only for positions before the origin; training masks the rest."""
    tokens, features, _ = text
    masked = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[7]]), 3)
    state, cut = drafter.begin(Context(tokens[:1, :8], features[:1, :7]), torch.tensor([[7]])), []
    for number in range(3):
        anchor = tokens[:1, 7 + number * drafter.k]
        stage = drafter.stage(
            state, anchor[None], lambda step, _, number=number: tokens[:1, 7 + number * drafter.k + step + 1][None]
        )
        cut.append(stage.hidden)
        state = stage.state
    for a, b in zip(masked, cut, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_no_feature_at_or_after_the_origin_is_seen(drafter, text):
    """Leak test with origins closer than k: all features from the first origin's position on are changed."""
    tokens, features, _ = text
    origins = torch.tensor([[6, 7, 8]])
    before = stages_of(drafter, tokens[:1], features[:1], origins, 3)
    changed = features[:1].clone()
    changed[:, 6:] += 1
    after = stages_of(drafter, tokens[:1], changed, origins, 3)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, 0], b[:, 0])
        assert not torch.allclose(a[:, 1], b[:, 1])  # its context includes the feature at 6


def test_own_and_previous_features_are_seen(drafter, text):
    tokens, features, _ = text
    origins = torch.tensor([[6]])
    before = stages_of(drafter, tokens[:1], features[:1], origins, 2)
    changed = features[:1].clone()
    changed[:, 5] += 1  # the last row before the origin
    after = stages_of(drafter, tokens[:1], changed, origins, 2)
    assert all(not torch.allclose(a, b) for a, b in zip(before, after, strict=True))


def test_tokens_seen_are_the_anchors_and_those_fed(drafter, text):
    """A block drafter reads only the anchors; a chain drafter reads the text up to the input of its last pass."""
    tokens, features, _ = text
    origin, k = 6, drafter.k
    before = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[origin]]), 2)
    for position in range(origin + 1, origin + 2 * k + 1):
        changed = tokens[:1].clone()
        changed[:, position] = 59
        after = stages_of(drafter, changed, features[:1], torch.tensor([[origin]]), 2)
        if drafter.stage.__qualname__.startswith("Block"):
            assert torch.equal(before[0], after[0])
            assert torch.equal(before[1], after[1]) == (position != origin + k)
            continue
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            for step in range(k):
                fed = origin + number * k + step
                assert torch.equal(a[:, :, step], b[:, :, step]) == (position > fed)


def test_commit_equals_fresh_context(drafter, text):
    tokens, features, _ = text
    state = drafter.begin(Context(tokens[:1, :7], features[:1, :6]), torch.tensor([[6]]))
    state = drafter.stage(state, tokens[:1, 6:7], lambda step, _: tokens[:1, 7 + step][None]).state
    state = drafter.commit(state, Context(tokens[:1, 6:12], features[:1, 6:11], start=6))
    cached = drafter.stage(state, tokens[:1, 11:12], lambda step, _: tokens[:1, 12 + step][None]).hidden
    fresh = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[11]]), 1)[0]
    torch.testing.assert_close(cached, fresh, **EXACT)


def test_taken_branches_equal_the_first_of_all(drafter, text):
    tokens, features, _ = text
    origins = torch.tensor([[3, 8, 12]])
    state = drafter.begin(Context(tokens[:1], features[:1]), origins)
    first = drafter.stage(
        state, tokens[:1].gather(1, origins), lambda step, _: tokens[:1].gather(1, origins + step + 1)
    )
    anchors = tokens[:1].gather(1, origins + drafter.k)

    def feed(count):
        return lambda step, _: tokens[:1].gather(1, origins + drafter.k + step + 1)[:, :count]

    every = drafter.stage(first.state, anchors, feed(3)).hidden
    two = drafter.stage(select_branches(first.state, 2), anchors[:, :2], feed(2)).hidden
    torch.testing.assert_close(two, every[:, :2], **EXACT)


def test_decoded_stage_equals_unrolled(drafter, text):
    """The logits of drafted stages equal those of stages unrolled over the drafted tokens as text."""
    tokens, features, _ = text
    state, anchor, drafted, logits = (
        drafter.begin(Context(tokens[:1, :8], features[:1, :7]), torch.tensor([[7]])),
        int(tokens[0, 7]),
        [],
        [],
    )
    for _ in range(3):
        stage = draft_stage(drafter, GREEDY, SampleRng(), state, anchor)
        drafted, state, anchor = drafted + stage.tokens, stage.state, stage.tokens[-1]
        logits.append(stage.logits)
    written = torch.cat([tokens[:1, :8], torch.tensor([drafted])], dim=1)
    filler = torch.zeros(1, written.shape[1] - 1 - 7, features.shape[-1], dtype=features.dtype)
    unrolled = whole_stages_of(drafter, written, torch.cat([features[:1, :7], filler], dim=1), torch.tensor([[7]]), 3)
    for number, (decoded, stage) in enumerate(zip(logits, unrolled, strict=True)):
        start = 7 + number * drafter.k
        again = drafter.rescore(
            stage, written[:, start : start + 1], written[:, None, start + 1 : start + 1 + drafter.k]
        )
        torch.testing.assert_close(again[0, 0], decoded, **EXACT)


def test_rescoring_a_whole_stage_equals_speaking_token_by_token(drafter, text):
    """Teacher-forced logits equal the logits from which a token head drafts each token; branches are independent."""
    tokens, features, _ = text
    origins = torch.tensor([[4, 9, 10]])
    stage = whole_stages_of(drafter, tokens[:1], features[:1], origins, 1)[0]
    if stage.tokens is not None:
        pytest.skip("a chain has no token head")
    anchors, said, seen = (
        text_at(tokens[:1], origins),
        torch.randint(60, 240, (1, 3, drafter.k), generator=torch.Generator().manual_seed(2)),
        [],
    )

    def dictate(logits):
        seen.append(logits if logits.dim() == 4 else logits[:, :, None])
        return said if logits.dim() == 4 else said[:, :, len(seen) - 1]

    assert torch.equal(drafter.draft_tokens(stage, anchors, dictate), said)
    torch.testing.assert_close(torch.cat(seen, dim=2), drafter.rescore(stage, anchors, said), **EXACT)


def test_a_head_hears_only_the_tokens_before(drafter, text):
    """Changing token j changes the logits of exactly the later slots that the token head computes from it.

    A confidence head that reads the Markov embedding changes in slot j + 1 only.
    """
    tokens, features, _ = text
    stage = whole_stages_of(drafter, tokens[:1], features[:1], torch.tensor([[6]]), 1)[0]
    if not hasattr(drafter, "codes"):
        pytest.skip("no token head")
    anchors, said = tokens[:1, 6:7], tokens[:1, None, 7 : 7 + drafter.k]
    before, trust = drafter.rescore(stage, anchors, said), drafter.confidence(stage, anchors, said)
    for changed in range(drafter.k):
        other = said.clone()
        other[..., changed] = 59
        after = drafter.rescore(stage, anchors, other)
        hears = {"vanilla": 1, "gated": 1}.get(
            getattr(drafter.shape, "markov_head_type", ""), drafter.k
        )  # how many previous tokens a slot depends on
        for slot in range(drafter.k):
            differs = changed < slot <= changed + hears and slot >= getattr(drafter.shape, "pure_draft_prefix_len", 0)
            assert torch.equal(before[:, :, slot], after[:, :, slot]) != differs
            if trust is not None and drafter.shape.confidence_with_markov:
                assert torch.equal(trust[..., slot], drafter.confidence(stage, anchors, other)[..., slot]) == (
                    slot != changed + 1
                )


def test_save_load_identical(variant, tiny_target, text, tmp_path):
    tokens, features, _ = text
    drafter = make_drafter(variant, tiny_target)
    save_drafter(
        drafter,
        tmp_path,
        section={"state": drafter.shape.state, "slot": drafter.shape.slot},
        target=tiny_target.spec,
        dtype=torch.float64,
    )
    again = load_drafter(tmp_path, settings_of(variant), drafter.head, dtype=torch.float64)
    assert again.shape == drafter.shape
    origins = torch.tensor([[3, 9]])
    for a, b in zip(
        stages_of(drafter, tokens[:1], features[:1], origins, 2),
        stages_of(again, tokens[:1], features[:1], origins, 2),
        strict=True,
    ):
        assert torch.equal(a, b)


# Eq. 3 of the DLoop paper, recomputed without caches, branches or shared code: one origin, plain loops over layers.


def rms(rows, eps, gain=1.0):
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def gain(w, name, sizes):
    """Scale factors of a norm; Qwen3.5 stores them minus one."""
    return w[f"{name}.weight"] + (1.0 if sizes.architecture == "qwen3_5" else 0.0)


def rotated(heads, positions, rope):
    size = heads.shape[-1]
    turned = int(size * rope.part) if rope.kind == "default" else size
    frequencies = rope.theta ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    if rope.kind == "proportional":
        frequencies[int(rope.part * size / 2) :] = 0
    angle = positions.double()[:, None] * frequencies
    cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    a, b = heads[..., : turned // 2], heads[..., turned // 2 : turned]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, heads[..., turned:]], dim=-1)


def embedded_by_hand(drafter, ids):
    """Embeddings of the target, multiplied by its embedding scale. [T] -> [T, D]"""
    scale, _ = drafter.shape.head_scales or (1.0, None)
    return drafter.head.embed_weight[ids] * scale


def projected(w, name, rows):
    return rows @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def keys_and_values(w, prefix, sizes, rows, positions):
    """Keys and values of an attention layer, as its architecture computes them. [K, G, E] twice"""

    def heads(name):
        return projected(w, f"{prefix}.{name}_proj", rows).view(len(rows), sizes.num_key_value_heads, sizes.head_dim)

    k = heads("k")
    v = k if sizes.keys_are_values else heads("v")
    if sizes.architecture == "gemma4":
        v = rms(v, sizes.rms_norm_eps)
    if sizes.architecture != "llama":
        k = rms(k, sizes.rms_norm_eps, gain(w, f"{prefix}.k_norm", sizes))
    return rotated(k, positions, sizes.rope), v


def mix(w, prefix, sizes, query_rows, query_positions, k, v, seen):
    """Plain softmax attention, one query and head at a time; seen [Q, K] is True where a query may attend to a key."""
    q = projected(w, f"{prefix}.q_proj", query_rows).view(len(query_rows), sizes.num_attention_heads, -1)
    q, gate = (
        (q[..., : sizes.head_dim], torch.sigmoid(q[..., sizes.head_dim :]))
        if sizes.architecture == "qwen3_5"
        else (q, 1.0)
    )
    if sizes.architecture != "llama":
        q = rms(q, sizes.rms_norm_eps, gain(w, f"{prefix}.q_norm", sizes))
    q = rotated(q, query_positions, sizes.rope)
    scale = 1.0 if sizes.architecture == "gemma4" else sizes.head_dim**-0.5
    group = sizes.num_attention_heads // sizes.num_key_value_heads
    out = torch.zeros_like(q)
    for query in range(len(q)):
        for h in range(sizes.num_attention_heads):
            keys = k[seen[query], h // group]
            out[query, h] = torch.softmax(keys @ q[query, h] * scale, -1) @ v[seen[query], h // group]
    return projected(w, f"{prefix}.o_proj", (out * gate).flatten(1))


def finished(w, layer, sizes, rows, mixed):
    """Residual stream after attention and MLP."""

    def mlp(rows):
        inner = rows @ w[f"{layer}.mlp.gate_proj.weight"].T
        inner = (
            torch.nn.functional.gelu(inner, approximate="tanh")
            if sizes.architecture == "gemma4"
            else inner * torch.sigmoid(inner)
        )
        return (inner * (rows @ w[f"{layer}.mlp.up_proj.weight"].T)) @ w[f"{layer}.mlp.down_proj.weight"].T

    def norm(name, rows):
        return rms(rows, sizes.rms_norm_eps, gain(w, f"{layer}.{name}", sizes))

    if sizes.architecture != "gemma4":
        rows = rows + mixed
        return rows + mlp(norm("post_attention_layernorm", rows))
    rows = rows + norm("post_attention_layernorm", mixed)
    return (rows + norm("post_feedforward_layernorm", mlp(norm("pre_feedforward_layernorm", rows)))) * w[
        f"{layer}.layer_scalar"
    ]


def in_sight(sizes, query_positions, key_positions):
    """Mask of the keys, context and own alike, that a layer's queries may attend to. [Q, K]"""
    behind = query_positions[:, None] - key_positions[None]
    seen = torch.ones_like(behind, dtype=torch.bool)
    if sizes.causal:
        seen &= behind >= 0
    return seen if sizes.window is None else seen & (behind.abs() < sizes.window)


def plain_block_stages(drafter, tokens, features, origin, count, *, shift=0, norm="as configured", use_feature=False):
    """Final-layer states of a block drafter's stages from one origin. tokens [T], features [T, L D] -> list of [W, D]

    The slots of a stage are its anchor and masks; they attend to h_{1:t-1} || own states and to each other.
    """
    w, shape, first = drafter.state_dict(), drafter.shape, drafter.shape.layers[0]
    norms = {"context_norm": "hidden_norm", "post_norm": "norm", "raw": None}
    name = norms[shape.state if norm == "as configured" else norm]
    fused = rms(features @ w["fc.weight"].T, first.rms_norm_eps, gain(w, "hidden_norm", first))
    entries, positions, out = [fused[:origin]], [torch.arange(origin)], []
    own = slice(1, 1 + drafter.k) if shape.alignment == "fill_in" and shape.slot == "next" else slice(0, drafter.k)
    for number in range(count):
        anchor = origin + number * drafter.k
        ids = torch.tensor([int(tokens[anchor])] + [shape.mask_token_id] * (shape.width - 1))
        rows, at = embedded_by_hand(drafter, ids), anchor + torch.arange(shape.width)
        for index, sizes in enumerate(shape.layers):
            layer = f"layers.{index}"
            normed = rms(rows, sizes.rms_norm_eps, gain(w, f"{layer}.input_layernorm", sizes))
            where = torch.cat([*positions, at])
            keys = keys_and_values(w, f"{layer}.self_attn", sizes, torch.cat([*entries, normed]), where)
            rows = finished(
                w,
                layer,
                sizes,
                rows,
                mix(w, f"{layer}.self_attn", sizes, normed, at, *keys, in_sight(sizes, at, where)),
            )
        out.append(rows)
        state = rows[own] if name is None else rms(rows[own], first.rms_norm_eps, gain(w, name, first))
        entries.append(fused[anchor : anchor + drafter.k] if use_feature else state.roll(shift, 0))
        positions.append(anchor + torch.arange(drafter.k))
    return out


def plain_chain_stages(drafter, tokens, features, origin, count, *, other_norm=False, use_feature=False, shift=0):
    """Stages of EAGLE-3 or Qwen3.5's MTP from one origin, every row recomputed from its inputs. list of [k, D]"""
    w, sizes, layer = drafter.state_dict(), drafter.shape.layers[0], "layers.0"
    embedded = embedded_by_hand(drafter, tokens)

    def normed(name, row):
        return rms(row, sizes.rms_norm_eps, gain(w, name, sizes))

    if hasattr(drafter, "pre_fc_norm_hidden"):
        fused, feed = features, lambda row: row if other_norm else normed("norm", row)

        def pair(token, hidden):
            residual = (
                torch.cat([normed("pre_fc_norm_embedding", token), normed("pre_fc_norm_hidden", hidden)])
                @ w["fc.weight"].T
            )
            return residual, normed(f"{layer}.input_layernorm", residual)
    else:
        if drafter.fc_norm is not None:
            parts = features.chunk(len(drafter.fc_norm), dim=-1)
            features = torch.cat([normed(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        fused, feed = features @ w["fc.weight"].T, lambda row: normed("norm", row) if other_norm else row

        def pair(token, hidden):
            return hidden, torch.cat(
                [normed(f"{layer}.input_layernorm", token), normed(f"{layer}.hidden_norm", hidden)]
            )

    hidden, inputs, out = list(fused[:origin]), [], []  # hidden[p] is paired with token p + 1
    for step in range(count * drafter.k):
        row = origin - 1 + step
        inputs += [pair(embedded[p + 1], hidden[p]) for p in range(len(inputs), row + 1)]
        keys = keys_and_values(
            w, f"{layer}.self_attn", sizes, torch.stack([entering for _, entering in inputs]), torch.arange(row + 1)
        )
        seen = in_sight(sizes, torch.tensor([row]), torch.arange(row + 1))
        mixed = mix(w, f"{layer}.self_attn", sizes, inputs[row][1][None], torch.tensor([row + shift]), *keys, seen)
        out.append(finished(w, layer, sizes, inputs[row][0][None], mixed)[0])
        hidden.append(fused[row + 1] if use_feature else feed(out[-1]))
    return [torch.stack(out[s * drafter.k : (s + 1) * drafter.k]) for s in range(count)]


def plain_assistant_stages(drafter, tokens, features, origin, count, *, other_norm=False, use_feature=False, shift=0):
    """Stages of Gemma 4's assistant from one origin. list of [k, D]

    All passes read the same keys and values of the target, at the same position.
    """
    w, shape = drafter.state_dict(), drafter.shape
    embedded, width = embedded_by_hand(drafter, tokens), shape.target_hidden_size
    (groups, size, _), _ = shape.shared_kv
    target_kv = [part.view(-1, groups, size)[:origin] for part in features[:, :-width].chunk(4, dim=-1)]
    fed, at, out = (
        features[origin - 1, -width:],
        torch.tensor([(origin - 1 if drafter.position == "last_kv" else origin) + shift]),
        [],
    )
    for step in range(count * drafter.k):
        rows = (torch.cat([embedded[origin + step], fed]) @ w["pre_projection.weight"].T)[None]
        for index, sizes in enumerate(shape.layers):
            layer = f"layers.{index}"
            normed = rms(rows, sizes.rms_norm_eps, gain(w, f"{layer}.input_layernorm", sizes))
            seen = (origin - 1 - torch.arange(origin) < (sizes.window or origin))[None]
            keys = target_kv[:2] if sizes.window is not None else target_kv[2:]
            rows = finished(w, layer, sizes, rows, mix(w, f"{layer}.self_attn", sizes, normed, at, *keys, seen))
        out.append(rows[0])
        normed = rows[0] if other_norm else rms(rows[0], shape.layers[0].rms_norm_eps, gain(w, "norm", shape.layers[0]))
        fed = features[origin + step, -width:] if use_feature else normed @ w["post_projection.weight"].T
    return [torch.stack(out[s * drafter.k : (s + 1) * drafter.k]) for s in range(count)]


def plain_stages(drafter, *arguments, **mutation):
    plain = (
        plain_block_stages
        if hasattr(drafter, "absorb")
        else plain_assistant_stages
        if hasattr(drafter, "post_projection")
        else plain_chain_stages
    )
    return plain(drafter, *arguments, **mutation)


def test_stages_equal_the_papers_equation(drafter, text):
    tokens, features, _ = text
    ours = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[6]]), 3)
    plain = plain_stages(drafter, tokens[0], features[0], 6, 3)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a[0, 0], b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mutation", [{"shift": 1}, {"other norm": True}, {"use_feature": True}], ids=str)
def test_a_wrong_equation_is_told_apart(drafter, text, mutation):
    """Each wrong variant must differ in stages 2 and 3, so the test above would notice it.

    The variants shift own states (or positions) by one, exchange the states before and after a norm, and use
    target features in place of own states.
    """
    tokens, features, _ = text
    if "other norm" in mutation:
        mutation = {"norm": "raw"} if hasattr(drafter, "absorb") else {"other_norm": True}
    ours = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[6]]), 3)
    plain = plain_stages(drafter, tokens[0], features[0], 6, 3, **mutation)
    for a, b in list(zip(ours, plain, strict=True))[1:]:
        assert (a[0, 0] - b).abs().max() > 1e-3


def gru(w, memory, row):
    """One step of torch's GRU: reset, update, new."""
    (reset, update, new), (past_reset, past_update, past_new) = (
        (w["prefix_gru.weight_ih_l0"] @ row).chunk(3),
        (w["prefix_gru.weight_hh_l0"] @ memory).chunk(3),
    )
    kept = torch.sigmoid(update + past_update)
    return kept * memory + (1 - kept) * torch.tanh(new + torch.sigmoid(reset + past_reset) * past_new)


def plain_correction(drafter, normed, anchor, said):
    """What a token head adds to the logits of each slot; the token before slot 0 is the anchor. [k, D] -> [k, V]"""
    w, shape, out = drafter.state_dict(), drafter.shape, []
    memory = torch.zeros(getattr(shape, "gru_hidden_dim", None) or shape.markov_rank, dtype=normed.dtype)
    for slot, (row, token) in enumerate(zip(normed, [anchor, *said], strict=False)):
        if hasattr(shape, "gru_hidden_dim"):
            memory = gru(w, memory, embedded_by_hand(drafter, torch.tensor(token)))
            inner = w["embed_proj.0.weight"] @ torch.cat([row, memory])
            out.append(
                w["embed_proj.2.weight"] @ (inner * torch.sigmoid(inner)) * (slot >= shape.pure_draft_prefix_len)
            )
            continue
        code = embedded = w["markov_head.markov_w1.weight"][token]
        if shape.markov_head_type == "gated":
            code = embedded * torch.sigmoid(
                w["markov_head.gate_proj.weight"] @ torch.cat([row, embedded]) + w["markov_head.gate_proj.bias"]
            )
        if shape.markov_head_type == "rnn":
            joint = (
                w["markov_head.joint_proj.weight"] @ torch.cat([memory, embedded, row])
                + w["markov_head.joint_proj.bias"]
            )
            gate, candidate, said_now = joint.chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            code = torch.tanh(said_now)
        out.append(w["markov_head.markov_w2.weight"] @ code)
    return torch.stack(out)


def plain_head(drafter, rows, anchor, said):
    """Logits [k, V] and confidence [k], or None, of a stage with final states [W, D] and drafted tokens `said`."""
    w, shape, first = drafter.state_dict(), drafter.shape, drafter.shape.layers[0]
    if shape.alignment:
        rows = rows[1 : 1 + drafter.k] if shape.alignment == "fill_in" else rows[: drafter.k]
    normed = rms(rows, first.rms_norm_eps, gain(w, "norm", first))
    kept = slice(None) if drafter.kept_ids() is None else drafter.kept_ids()
    logits = normed @ w.get("lm_head.weight", w.get("embed_tokens.weight", drafter.head.lm_head_weight[kept])).T
    _, cap = shape.head_scales or (1.0, None)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if hasattr(drafter, "codes"):
        logits = logits + plain_correction(drafter, normed, anchor, said)  # after the softcap
    if "confidence_head.proj.weight" not in w:
        return logits, None
    inputs = (
        torch.cat([normed, w["markov_head.markov_w1.weight"][[anchor, *said[:-1]]]], dim=-1)
        if shape.confidence_with_markov
        else normed
    )
    return logits, (inputs @ w["confidence_head.proj.weight"].T + w["confidence_head.proj.bias"])[:, 0]


def assert_heads_equal(drafter, tokens, features, origin):
    stage = whole_stages_of(drafter, tokens[:1], features[:1], torch.tensor([[origin]]), 1)[0]
    said = torch.randint(60, 240, (1, 1, drafter.k), generator=torch.Generator().manual_seed(4))
    logits, confidence = plain_head(drafter, stage.hidden[0, 0], int(tokens[0, origin]), said[0, 0].tolist())
    torch.testing.assert_close(
        drafter.rescore(stage, tokens[:1, origin : origin + 1], said)[0, 0], logits, rtol=0, atol=1e-6
    )
    trust = drafter.confidence(stage, tokens[:1, origin : origin + 1], said)
    assert (trust is None) == (confidence is None)
    if trust is not None:
        torch.testing.assert_close(trust[0, 0], confidence, rtol=0, atol=1e-6)


def test_logits_equal_a_plain_recomputation(drafter, text):
    """Final norm, lm_head, softcap, the token head's correction and the confidence, computed slot by slot."""
    tokens, features, _ = text
    assert_heads_equal(drafter, tokens, features, 6)


def heads(count, groups, size, layers=None, **more):
    """Function that gives the first `layers` layers of a shape other attention sizes."""
    changed = dict(num_attention_heads=count, num_key_value_heads=groups, head_dim=size) | more
    return lambda shape: replace(shape, layers=tuple(replace(layer, **changed) for layer in shape.layers[:layers]))


def sliding(window, causal, **more):
    return lambda shape: replace(
        shape, layers=tuple(replace(layer, window=window, causal=causal, **more) for layer in shape.layers)
    )


def mixed_gemma4(shape):
    """A sliding-window layer before a full one, with different heads and rotary positions."""
    slides = replace(
        shape.layers[0],
        window=3,
        causal=True,
        keys_are_values=False,
        head_dim=8,
        num_key_value_heads=2,
        rope=Rope(500.0),
    )
    return replace(shape, layers=(slides, *shape.layers[1:]))


@pytest.mark.parametrize(
    "variant, change",
    [
        ("dflash-fill_in", heads(3, 1, 6)),
        ("dflash-shifted", heads(5, 5, 10, layers=1)),
        ("dflash-shifted", heads(6, 2, 4, attention_bias=True)),
        ("dflash-fill_in", sliding(2, True)),
        ("dflash-fill_in", sliding(2, False)),
        ("dflash-shifted", sliding(1, True)),
        ("dflash-shifted", sliding(100, True)),
        (
            "dflash-fill_in",
            lambda shape: replace(shape, layers=tuple(replace(layer, causal=True) for layer in shape.layers)),
        ),
        ("dflash-gemma4", heads(3, 3, 12, keys_are_values=False)),
        ("dspark-gemma4", mixed_gemma4),
        ("domino-shifted", lambda shape: replace(shape, pure_draft_prefix_len=0)),
        ("domino-fill_in", lambda shape: replace(shape, pure_draft_prefix_len=2)),
        ("domino-shifted", lambda shape: replace(shape, pure_draft_prefix_len=9)),
        ("domino-fill_in", lambda shape: replace(shape, num_draft_tokens=2, emb_dim=5, gru_hidden_dim=3)),
        ("dspark-rnn", lambda shape: replace(shape, markov_rank=5)),
        ("dspark-gated", lambda shape: replace(shape, markov_rank=1)),
        ("dspark-vanilla", lambda shape: replace(shape, alignment="fill_in")),
        ("eagle3-deepspec", heads(5, 1, 6)),
        ("eagle3-deepspec", sliding(3, True)),
        ("eagle3-gemma4", heads(2, 2, 24, keys_are_values=False)),
        ("mtp", heads(3, 1, 16, rope=Rope(1e7, part=0.25))),
        ("mtp_assistant", sliding(2, True)),
        ("mtp_assistant-bonus", lambda shape: shape),
        ("mtp_assistant-bonus", lambda shape: replace(shape, layers=shape.layers[1:2])),
    ],
)
def test_other_sizes_obey_the_same_laws(variant, change, tiny_target, tmp_path):
    """Heads that do not divide D, one key head, windows smaller than a block or larger than the text, other ranks."""
    shape, generator = change(shape_of(variant, tiny_target)), torch.Generator().manual_seed(1)
    drafter = make_drafter(variant, tiny_target, shape=shape)
    tokens = torch.randint(60, 240, (1, 25), generator=generator)
    read = tiny_target.read(tokens[:, :-1], feature_spec=shape.feature_spec).features
    features = torch.randn(
        read.shape, generator=generator, dtype=read.dtype
    )  # the tiny target gives the same layer's keys twice, which would hide a mix-up
    ours = stages_of(drafter, tokens, features, torch.tensor([[6]]), 3)
    for a, b in zip(ours, plain_stages(drafter, tokens[0], features[0], 6, 3), strict=True):
        torch.testing.assert_close(a[0, 0], b, rtol=0, atol=1e-6)
    together = stages_of(
        drafter, tokens, features, torch.tensor([[9, 6]]), 3
    )  # two branches do not take the shortcut for one branch
    for a, b in zip(ours, together, strict=True):
        torch.testing.assert_close(a[0, 0], b[0, 1], **EXACT)
    assert_heads_equal(drafter, tokens, features, 6)
    save_drafter(
        drafter, tmp_path, section={"state": shape.state, "slot": shape.slot}, target=None, dtype=torch.float64
    )
    settings = settings_of(variant)
    settings = replace(settings, alignment=shape.alignment) if shape.alignment else settings
    again = load_drafter(tmp_path, settings, drafter.head, dtype=torch.float64)
    assert again.shape == shape and all(
        torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items()
    )


def test_ids_of_the_draft_vocabulary_are_those_kept_of_the_targets(drafter):
    """Column i of the logits is the i-th kept token, for drafted tokens and for the target's distribution."""
    rows = torch.arange(
        drafter.shape.draft_vocab_size if hasattr(drafter.shape, "draft_vocab_size") else drafter.shape.vocab_size
    )
    reduced = getattr(drafter, "t2d", None) is not None
    kept = torch.arange(50, 250) if reduced else rows  # the ids that make_drafter keeps
    assert torch.equal(drafter.token_ids(rows), kept) and torch.equal(drafter.token_ids(rows.flip(0)), kept.flip(0))
    if reduced:
        assert torch.equal(drafter.kept_ids(), kept) and torch.equal(drafter.t2d.nonzero()[:, 0], kept)
