"""Tests that need a GPU: block drafters at Qwen3-4B's size in bf16, and compiled FlexAttention."""

import pytest
import torch
from conftest import composed

from dloop_train.drafters.attention import ContextMask, loop_attention
from dloop_train.targets.head import TargetHead
from dloop_train.types import KV, Context, TargetSpec


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["dflash", "domino", "dspark"])
def test_block_drafters_at_qwen3_4b_size_in_bf16(family):
    """With random weights, two stages of 64 branches are finite and within bf16 rounding of fp32."""
    config = composed(
        f"+drafter={family}",
        "+target=qwen3_4b",
        "++drafter.init=scratch",
        "++drafter.layers=5",
        f"++drafter.width={7 if family == 'dspark' else 16}",
    )
    sizes = config.target.config
    spec = TargetSpec(
        name="qwen3_4b",
        revision="",
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        mask_token_id=config.target.mask_token_id,
        stop_ids=(0,),
        text_config=sizes,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        table = torch.randn(spec.vocab_size, spec.hidden_size) * 0.02
        drafter = config.drafter.build(
            config.drafter.shape(spec, config.target.taps["block"]), TargetHead(table, table)
        ).eval()
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "window, causal, size, branches",
    [
        (None, False, 64, 96),
        (24, True, 64, 96),
        (24, False, 64, 96),
        (None, False, 64, 20),
        (None, False, 256, 96),
        (24, True, 8, 96),
        (None, False, 512, 96),
    ],
)
def test_blocks_equal_parts_with_their_gradients(window, causal, size, branches):
    """Compiled FlexAttention equals attention with dense masks on the CPU, with gradients.

    Head sizes without a kernel use dense masks on both devices. test_drafters.py tests the forward pass on a CPU.
    """
    generator = torch.Generator().manual_seed(0)
    length, slots, drafted, heads, groups = (
        1024,
        8 if branches > 20 else 1,
        16,
        8,
        2,
    )  # FlexAttention uses another kernel for few queries
    shapes = [
        (2, branches, slots, heads, size),
        *[(2, length, groups, size)] * 2,
        *[(2, branches, drafted, groups, size)] * 2,
    ]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    origin, upstream = (
        torch.randint(0, length, (2, branches), generator=generator),
        torch.randn(shapes[0], generator=generator),
    )
    results = []
    for device in ("cpu", "cuda"):
        inputs = [value.to(device).requires_grad_() for value in values]
        context_mask = ContextMask(origin.to(device), torch.zeros_like(origin, device=device))
        queries, keys, rows, own_keys, own_rows = inputs
        for left in (branches, branches - 17):  # the second time with a block mask that is cut down
            output = loop_attention(
                queries[:, :left],
                KV(keys, rows),
                KV(own_keys[:, :left], own_rows[:, :left]),
                context_mask.select_branches(left),
                size**-0.5,
                window=window,
                causal=causal,
            )
        results.append([output, *torch.autograd.grad(output, inputs, upstream[:, :left].to(device))])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [8, 16, 64, 128, 256, 512])
def test_heads_of_all_sizes_fit(size):
    """Output and gradients in bf16 are close to fp32 on the CPU.

    Gemma 4 has heads of 256 and 512. Heads of 8, as in tiny drafters, use dense masks.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 40, 8, 8, size), *[(2, 200, 2, size)] * 2, *[(2, 40, 16, 2, size)] * 2]
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    origin = torch.randint(0, 200, (2, 40), generator=generator)
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        inputs = [value.to(device, dtype).requires_grad_() for value in values]
        queries, keys, rows, own_keys, own_rows = inputs
        context_mask = ContextMask(origin.to(device), torch.zeros_like(origin, device=device))
        output = loop_attention(queries, KV(keys, rows), KV(own_keys, own_rows), context_mask, size**-0.5)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
    for cpu, cuda in zip(*results, strict=True):
        assert (cuda.cpu().float() - cpu).norm() < 0.02 * cpu.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_long_text_needs_no_dense_mask():
    """4096 tokens, 512 origins of 8 slots, 32 heads.

    Dense scores and their gradients would take 4 GB in fp32; FlexAttention stays below 0.4 GB.
    """
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    queries, context, own = (
        make(1, 512, 8, 32, 128),
        KV(make(1, 4096, 8, 128), make(1, 4096, 8, 128)),
        KV(make(1, 512, 8, 8, 128), make(1, 512, 8, 8, 128)),
    )
    origin = torch.randint(1, 4096, (1, 512), device="cuda").sort().values
    context_mask = ContextMask(origin, torch.zeros_like(origin))
    loop_attention(queries, context, own, context_mask, 128**-0.5)  # compiles and makes the block mask
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loop_attention(queries, context, own, context_mask, 128**-0.5).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 0.4 * 2**30
