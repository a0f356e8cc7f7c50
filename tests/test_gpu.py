"""What only an accelerator can show: block drafters at Qwen3-4B's size in bf16, and FlexAttention under the loop's own visibility rule."""

import pytest
import torch
from conftest import composed

from dloop_train.drafters.attention import loop_attention
from dloop_train.targets.head import TargetHead
from dloop_train.types import KV, Context, TargetSpec

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["dflash", "domino", "dspark"])
def test_block_drafters_at_qwen3_4b_size_in_bf16(family):
    """Random weights: two looped stages of 64 branches, finite, and within bf16's noise of fp32."""
    config = composed(f"+drafter={family}", "+target=qwen3_4b", "++drafter.init=scratch", "++drafter.layers=5", f"++drafter.width={7 if family == 'dspark' else 16}")
    sizes = config.target.config
    spec = TargetSpec(name="qwen3_4b", revision="", hidden_size=sizes["hidden_size"], num_layers=sizes["num_hidden_layers"], vocab_size=sizes["vocab_size"],
                      mask_token_id=config.target.mask_token_id, stop_ids=(0,), text_config=sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        table = torch.randn(spec.vocab_size, spec.hidden_size) * 0.02
        drafter = config.drafter.build(config.drafter.shape(spec, config.target.taps["block"]), TargetHead(table, table)).eval()
        tokens = torch.randint(spec.vocab_size, (1, 513))
        features = torch.randn(1, 512, len(config.target.taps["block"]) * spec.hidden_size)
        origins = torch.arange(100, 484, 6)[None]
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter, drafter.head = drafter.to(dtype), drafter.head.to(dtype)
        with torch.inference_mode():
            state = drafter.begin(Context(tokens, features.to(dtype)), origins)
            for number in range(2):
                stage = drafter.stage(state, tokens.gather(1, origins + number * drafter.k))
                state = stage.state
        outputs.append(stage.hidden.float())
    assert outputs[1].isfinite().all() and (outputs[0] - outputs[1]).norm() < 0.05 * outputs[0].norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("window, causal", [(None, False), (24, True), (24, False)])
def test_flex_attention_under_the_same_rule(window, causal, device):
    """One predicate on (branch, position) pairs, as a FlexAttention block mask and as the loop's dense one. Compiled on a GPU alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch.manual_seed(0)
    length, branches, slots, drafted, heads, groups, size = 256, 24, 8, 16, 8, 2, 64
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.float32)  # noqa: E731
    queries, context, own = make(1, branches, slots, heads, size), KV(make(1, length, groups, size), make(1, length, groups, size)), \
        KV(make(1, branches, drafted, groups, size), make(1, branches, drafted, groups, size))
    origin = torch.randint(1, length, (1, branches), device=device)
    dense = loop_attention(queries, context, own, origin, size**-0.5, window=window, causal=causal)
    at = (origin[0, :, None] + torch.arange(drafted - slots, drafted, device=device)).flatten()  # positions of the queries
    row = (origin[0, :, None] + torch.arange(drafted, device=device)).flatten()  # and of the own rows

    def seen(batch, head, query, key):
        branch, inside = query // slots, key < length
        mine = (key - length) // drafted == branch
        place = torch.where(inside, key, row[(key - length).clamp(min=0)])
        behind = at[query] - place
        allowed = torch.where(inside, place < origin[0, branch], mine & ((behind >= 0) | (not causal)))
        return allowed if window is None else allowed & (behind.abs() < window)

    mask = create_block_mask(seen, None, None, branches * slots, length + branches * drafted, device=device)
    keys, values = (torch.cat([shared, mine.flatten(1, 2)], dim=1).transpose(1, 2) for shared, mine in ((context.keys, own.keys), (context.values, own.values)))
    flex = (torch.compile(flex_attention) if device == "cuda" else flex_attention)(queries.flatten(1, 2).transpose(1, 2), keys, values, block_mask=mask, scale=size**-0.5, enable_gqa=True)
    torch.testing.assert_close(flex.transpose(1, 2).unflatten(1, (branches, slots)), dense, rtol=2e-3, atol=2e-3)
