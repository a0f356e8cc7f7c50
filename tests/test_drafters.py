"""Laws of every drafter: unrolled training is stage-by-stage decoding, nothing leaks, branches are independent, files round-trip."""

import pytest
import torch
from conftest import TAPS, VARIANTS, make_drafter

from dloop_train.checkpoints.files import load_drafter, save_drafter
from dloop_train.config import CONF
from dloop_train.decoding.loop import draft_stage
from dloop_train.drafters.base import take
from dloop_train.types import Context

EXACT = dict(rtol=0, atol=1e-10)


def stages_of(drafter, tokens, features, origins, count, start=0):
    """Hidden states of `count` teacher-forced stages. origins [B, N] -> list of [B, N, W, D]"""
    state, hidden = drafter.begin(Context(tokens, features, start), origins), []
    for number in range(count):
        at = lambda offset, number=number: tokens.gather(1, (origins + number * drafter.k + offset).clamp(max=tokens.shape[1] - 1))  # noqa: E731
        stage = drafter.stage(state, at(0), lambda step, _, at=at: at(step + 1))
        hidden.append(stage.hidden)
        state = stage.state
    return hidden


def test_every_drafter_yaml_has_a_variant():
    assert {path.stem for path in (CONF / "drafter").glob("*.yaml")} == {family for family, _ in VARIANTS.values()}


def test_unrolled_equals_one_branch_at_a_time(drafter, text):
    """Branches together, some closer than k, equal each branch alone."""
    tokens, features, _ = text
    origins = torch.tensor([[3, 4, 5, 12], [2, 9, 10, 1]])
    together = stages_of(drafter, tokens, features, origins, 3)
    for row in range(2):
        for branch in range(4):
            alone = stages_of(drafter, tokens[row:row + 1], features[row:row + 1], origins[row:row + 1, branch:branch + 1], 3)
            for a, b in zip(together, alone, strict=True):
                torch.testing.assert_close(a[row, branch], b[0, 0], **EXACT)


def test_context_cut_at_the_origin_changes_nothing(drafter, text):
    """Decoding knows only what lies before the origin; training masks the rest."""
    tokens, features, _ = text
    masked = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[7]]), 3)
    state, cut = drafter.begin(Context(tokens[:1, :8], features[:1, :7]), torch.tensor([[7]])), []
    for number in range(3):
        anchor = tokens[:1, 7 + number * drafter.k]
        stage = drafter.stage(state, anchor[None], lambda step, _, number=number: tokens[:1, 7 + number * drafter.k + step + 1][None])
        cut.append(stage.hidden)
        state = stage.state
    for a, b in zip(masked, cut, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_no_feature_at_or_after_the_origin_is_seen(drafter, text):
    """The leak test, with anchors closer than k: features from the FIRST origin's position on are changed."""
    tokens, features, _ = text
    origins = torch.tensor([[6, 7, 8]])
    before = stages_of(drafter, tokens[:1], features[:1], origins, 3)
    changed = features[:1].clone()
    changed[:, 6:] += 1
    after = stages_of(drafter, tokens[:1], changed, origins, 3)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, 0], b[:, 0])
        assert not torch.allclose(a[:, 1], b[:, 1])  # its context holds the feature at 6


def test_own_and_previous_features_are_seen(drafter, text):
    tokens, features, _ = text
    origins = torch.tensor([[6]])
    before = stages_of(drafter, tokens[:1], features[:1], origins, 2)
    changed = features[:1].clone()
    changed[:, 5] += 1  # the last row before the origin
    after = stages_of(drafter, tokens[:1], changed, origins, 2)
    assert all(not torch.allclose(a, b) for a, b in zip(before, after, strict=True))


def test_tokens_seen_are_the_anchors_and_those_fed(drafter, text):
    """A block reads anchors alone; a chain reads the text up to the token fed to its last pass."""
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
    first = drafter.stage(state, tokens[:1].gather(1, origins), lambda step, _: tokens[:1].gather(1, origins + step + 1))
    anchors = tokens[:1].gather(1, origins + drafter.k)
    def feed(count):
        return lambda step, _: tokens[:1].gather(1, origins + drafter.k + step + 1)[:, :count]
    every = drafter.stage(first.state, anchors, feed(3)).hidden
    two = drafter.stage(take(first.state, 2), anchors[:, :2], feed(2)).hidden
    torch.testing.assert_close(two, every[:, :2], **EXACT)


def test_decoded_stage_equals_unrolled(drafter, text):
    """The live loop's own drafting, fed back as text, gives the same logits when unrolled."""
    tokens, features, _ = text
    state, anchor, drafted, logits = drafter.begin(Context(tokens[:1, :8], features[:1, :7]), torch.tensor([[7]])), int(tokens[0, 7]), [], []
    for _ in range(3):
        stage = draft_stage(drafter, state, anchor)
        drafted, state, anchor = drafted + stage.tokens, stage.state, stage.tokens[-1]
        logits.append(stage.logits)
    written = torch.cat([tokens[:1, :8], torch.tensor([drafted])], dim=1)
    filler = torch.zeros(1, written.shape[1] - 1 - 7, features.shape[-1], dtype=features.dtype)
    unrolled = stages_of(drafter, written, torch.cat([features[:1, :7], filler], dim=1), torch.tensor([[7]]), 3)
    slots = slice(1, None) if getattr(drafter.shape, "alignment", "") == "fill_in" else slice(None)
    for decoded, hidden in zip(logits, unrolled, strict=True):
        torch.testing.assert_close(drafter.logits(hidden[0, 0, slots]), decoded, **EXACT)


def test_save_load_identical(variant, tiny_target, text, tmp_path):
    tokens, features, _ = text
    drafter = make_drafter(variant, tiny_target)
    from dloop_train.config import build, option
    from dloop_train.drafters.base import DrafterConfig
    family, settings = VARIANTS[variant]
    save_drafter(drafter, tmp_path, section={"state": drafter.shape.state, "slot": drafter.shape.slot}, target=tiny_target.spec, dtype=torch.float64)
    again = load_drafter(tmp_path, build(option("drafter", family) | settings, DrafterConfig), drafter.head, dtype=torch.float64)
    assert again.shape == drafter.shape
    origins = torch.tensor([[3, 9]])
    for a, b in zip(stages_of(drafter, tokens[:1], features[:1], origins, 2), stages_of(again, tokens[:1], features[:1], origins, 2), strict=True):
        assert torch.equal(a, b)


# The paper's Eq. 3, recomputed without caches, branches or shared code: one origin, plain loops over layers.

def rms(rows, weight, eps):
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(heads, positions, theta):
    size = heads.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = positions.double()[:, None] * frequencies
    cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    a, b = heads[..., :size // 2], heads[..., size // 2:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attend(w, prefix, sizes, query_rows, query_positions, key_rows, key_positions):
    """Plain softmax attention of rows over rows, head by head."""
    def heads(name, rows, count):
        return (rows @ w[f"{prefix}.{name}_proj.weight"].T).view(len(rows), count, sizes.head_dim)
    q, k = heads("q", query_rows, sizes.num_attention_heads), heads("k", key_rows, sizes.num_key_value_heads)
    v = heads("v", key_rows, sizes.num_key_value_heads)
    if sizes.parts.head_norms:
        q, k = rms(q, w[f"{prefix}.q_norm.weight"], sizes.rms_norm_eps), rms(k, w[f"{prefix}.k_norm.weight"], sizes.rms_norm_eps)
    q, k = rotated(q, query_positions, sizes.rope.theta), rotated(k, key_positions, sizes.rope.theta)
    group = sizes.num_attention_heads // sizes.num_key_value_heads
    mixed = [torch.softmax(q[:, h] @ k[:, h // group].T / sizes.head_dim**0.5, -1) @ v[:, h // group] for h in range(sizes.num_attention_heads)]
    return torch.cat(mixed, dim=-1) @ w[f"{prefix}.o_proj.weight"].T


def mlp(w, prefix, rows):
    gate = rows @ w[f"{prefix}.gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (rows @ w[f"{prefix}.up_proj.weight"].T)) @ w[f"{prefix}.down_proj.weight"].T


def plain_block_stages(drafter, tokens, features, origin, count, *, shift=0, norm="as configured", use_feature=False):
    """Stages of a block drafter from one origin: h_{1:t-1} || own states, then anchor and masks. tokens [T], features [T, L D]"""
    w, shape, sizes = drafter.state_dict(), drafter.shape, drafter.shape.layers[0]
    norms = {"context_norm": "hidden_norm.weight", "post_norm": "norm.weight", "raw": None}
    name = norms[shape.state if norm == "as configured" else norm]
    fused = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], sizes.rms_norm_eps)
    entries, positions, out = [fused[:origin]], [torch.arange(origin)], []
    own = slice(1, None) if shape.alignment == "fill_in" and shape.slot == "next" else slice(0, drafter.k)
    for number in range(count):
        anchor = origin + number * drafter.k
        ids = torch.tensor([int(tokens[anchor])] + [shape.mask_token_id] * (shape.width - 1))
        rows, at = drafter.head.embed(ids), anchor + torch.arange(shape.width)
        for index in range(len(shape.layers)):
            layer = f"layers.{index}"
            normed = rms(rows, w[f"{layer}.input_layernorm.weight"], sizes.rms_norm_eps)
            rows = rows + attend(w, f"{layer}.self_attn", sizes, normed, at, torch.cat([*entries, normed]), torch.cat([*positions, at]))
            rows = rows + mlp(w, f"{layer}.mlp", rms(rows, w[f"{layer}.post_attention_layernorm.weight"], sizes.rms_norm_eps))
        out.append(rows)
        state = rows[own] if name is None else rms(rows[own], w[name], sizes.rms_norm_eps)
        entries.append(fused[anchor:anchor + drafter.k] if use_feature else state.roll(shift, 0))
        positions.append(anchor + torch.arange(drafter.k))
    return out


def plain_chain_stages(drafter, tokens, features, origin, count, *, post_norm=False, use_feature=False, shift=0):
    """k passes a stage from one origin, every row recomputed from its inputs."""
    w, sizes, layer = drafter.state_dict(), drafter.shape.layers[0], "layers.0"
    embedded = drafter.head.embed(tokens)
    if drafter.fc_norm is not None:
        parts = features.chunk(len(drafter.fc_norm), dim=-1)
        features = torch.cat([rms(part, w[f"fc_norm.{i}.weight"], sizes.rms_norm_eps) for i, part in enumerate(parts)], dim=-1)
    fused, inputs, out = features @ w["fc.weight"].T, [], []
    hidden = list(fused[:origin])  # hidden[p] is paired with token p + 1
    for step in range(count * drafter.k):
        row = origin - 1 + step
        for p in range(len(inputs), row + 1):
            inputs.append(torch.cat([rms(embedded[p + 1], w[f"{layer}.input_layernorm.weight"], sizes.rms_norm_eps),
                                     rms(hidden[p], w[f"{layer}.hidden_norm.weight"], sizes.rms_norm_eps)]))
        keys = torch.stack(inputs)
        rows = hidden[row] + attend(w, f"{layer}.self_attn", sizes, keys[row:], torch.tensor([row + shift]), keys, torch.arange(row + 1))[0]
        rows = rows + mlp(w, f"{layer}.mlp", rms(rows, w[f"{layer}.post_attention_layernorm.weight"], sizes.rms_norm_eps))
        out.append(rows)
        hidden.append(rms(rows, w["norm.weight"], sizes.rms_norm_eps) if post_norm else fused[row + 1] if use_feature else rows)
    return [torch.stack(out[s * drafter.k:(s + 1) * drafter.k]) for s in range(count)]


def plain_stages(drafter, *arguments, **mutation):
    return (plain_block_stages if hasattr(drafter, "absorb") else plain_chain_stages)(drafter, *arguments, **mutation)


def test_stages_equal_the_papers_equation(drafter, text):
    tokens, features, _ = text
    ours = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[6]]), 3)
    plain = plain_stages(drafter, tokens[0], features[0], 6, 3)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a[0, 0], b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mutation", [{"shift": 1}, {"other norm": True}, {"use_feature": True}], ids=str)
def test_a_wrong_equation_is_told_apart(drafter, text, mutation):
    """Own states shifted by one, pre- for post-norm, a target feature in place of an own state: each must differ in stages 2 and 3."""
    tokens, features, _ = text
    if "other norm" in mutation:
        mutation = {"norm": "raw"} if hasattr(drafter, "absorb") else {"post_norm": True}
    ours = stages_of(drafter, tokens[:1], features[:1], torch.tensor([[6]]), 3)
    plain = plain_stages(drafter, tokens[0], features[0], 6, 3, **mutation)
    for a, b in list(zip(ours, plain, strict=True))[1:]:
        assert (a[0, 0] - b).abs().max() > 1e-3


def test_taps_used(drafter):
    assert list(drafter.shape.taps) == TAPS
