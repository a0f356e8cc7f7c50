"""Tests on a simulated CUDA device: training, decoding and all phases never mix devices."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import VARIANTS, composed, make_drafter, tiny_config
from simulated_device import simulated

import dloop_train
from dloop_train.config import SamplingConfig, TargetConfig, build, option
from dloop_train.data.batches import collate, packed
from dloop_train.data.online import read_samples, text_of
from dloop_train.data.responses import Response
from dloop_train.data.store import drafters_row
from dloop_train.decoding import costs
from dloop_train.decoding.gates import DLoop
from dloop_train.decoding.loop import decode
from dloop_train.decoding.rules import Match, Rejection
from dloop_train.drafters import attention
from dloop_train.phases import artifacts, cache, evaluate, export, generate, train
from dloop_train.phases.replaying import replay_all
from dloop_train.targets import sources
from dloop_train.targets.responders import decode_plain, respond
from dloop_train.targets.sources import load_target
from dloop_train.training import engine, metrics
from dloop_train.training.anchors import draw_origins
from dloop_train.training.metrics import reduce_sums
from dloop_train.training.unroll import Terms, Unroll

RESPONSES = [
    Response(
        f"prompt-{number}",
        "all",
        list(range(60 + 7 * number, 66 + 7 * number)),
        list(range(90, 98 + 2 * number)),
        False,
        "",
    )
    for number in range(3)
]
PROMPTS = [response.prompt_ids for response in RESPONSES]
RULES = [
    Rejection(),
    Rejection(temperature=0.8),
    Rejection(temperature=0.8, draft_temperature=0),
    Match(temperature=0.8),
]
QUICK = ("dflash-sliding", "domino-shifted", "dspark-rnn", "eagle3-reduced", "mtp", "mtp_assistant-bonus")
"""One variant per family; together they cover windows, both alignments, a draft vocabulary and token heads."""
TEXTS = [text_of(response, 99) for response in RESPONSES]


@pytest.fixture(
    autouse=True,
    params=[
        "simulated",
        pytest.param(
            "real",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def device(request, monkeypatch):
    """The simulated device, and the real one if it exists.

    On the simulated device FlexAttention's block masks are made uncompiled, and attention is computed in the dense
    form, which has gradients on a CPU.
    """
    monkeypatch.setattr(sources, "default_device", lambda: torch.device("cuda"))
    if request.param == "real":
        yield torch.device("cuda")
        return
    uncompiled = attention.flex(False)

    def in_blocks(queries, keys, values, context_mask, ahead, scale, window):
        mask = context_mask.blocks(ahead, queries.shape[3] // len(ahead), keys.shape[2], window)
        assert {
            each.device for each in (queries, keys, values, *mask.as_tuple()) if isinstance(each, torch.Tensor)
        } == {queries.device}
        return attention.context_in_parts(queries, keys, values, context_mask, ahead, scale, window)

    monkeypatch.setattr(attention, "flex", lambda compiled: uncompiled)
    monkeypatch.setattr(attention, "context_in_blocks", in_blocks)
    monkeypatch.setattr(attention, "HEADS", range(1, 257))  # the tiny targets have small heads
    with simulated():
        yield torch.device("cuda")


@pytest.fixture
def target(device):
    return load_target(tiny_config(), dtype="float32")


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(VARIANTS)]
)
def variant(request):
    return request.param


@pytest.fixture
def drafter(variant, target, device):
    return make_drafter(variant, target, dtype=torch.float32).to(device)


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_a_training_step(drafter, target, device, pack):
    batch = collate(
        [
            replace(sample, features=drafters_row(sample, drafter.shape.feature_spec))
            for sample in read_samples(target, TEXTS, drafter.shape.feature_spec, dtype=torch.float32, batch_tokens=40)
        ]
    ).to(device, torch.float32)
    batch = packed(batch) if pack else batch
    origins = draw_origins(batch, drafter.k, count=2, depth_exposure=2, seed=0, epoch=0)
    unroll = Unroll(drafter.train(), Terms(2), max_rows=1000, recompute=pack)
    result = unroll(batch, origins, unroll.weights(batch, origins), 0.5)
    result.loss.backward()
    assert (
        all(parameter.grad.is_cuda for parameter in drafter.parameters() if parameter.grad is not None)
        and result.loss.is_cuda
    )
    assert reduce_sums(result.sums)["loss_first"] > 0


def test_decoding(drafter, target, monkeypatch):
    for rule in RULES:
        emissions = list(
            decode(
                target,
                drafter,
                DLoop(threshold=-1e9, max_stages=2),
                PROMPTS[0],
                max_new_tokens=2 * drafter.k + 2,
                rule=rule,
            )
        )
        assert emissions[1].round.stages == 2
    records = replay_all(
        target, drafter, RESPONSES[:1], DLoop(threshold=-1e9, max_stages=2), [], {}, stages=1, max_new_tokens=20
    )
    assert records[0].scores.device.type == "cpu"
    monkeypatch.setattr(costs, "TURNS", 1)
    monkeypatch.setattr(costs, "ROUNDS", 1)
    synchronise = Mock(wraps=torch.accelerator.synchronize)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronise)
    assert costs.measure_costs(target, drafter, PROMPTS, stages=2).plain > 0
    assert synchronise.called  # without it, times would not include queued work


@pytest.mark.parametrize(
    "size, dtype, blocks",
    [
        (16, torch.float32, True),
        (256, torch.bfloat16, True),
        (8, torch.float32, False),
        (512, torch.bfloat16, True),
        (1024, torch.bfloat16, False),
        (64, torch.float64, False),
    ],
)
def test_heads_without_a_kernel_have_dense_masks(size, dtype, blocks, device, monkeypatch):
    monkeypatch.undo()
    ways = []
    for name in ("context_in_blocks", "context_in_parts"):
        monkeypatch.setattr(
            attention, name, lambda queries, *_, name=name: ways.append(name) or (queries, queries[..., 0].float())
        )
    queries, context = (
        torch.zeros(1, 2, 3, 4, size, device=device, dtype=dtype),
        attention.KV(*[torch.zeros(1, 9, 2, size, device=device, dtype=dtype)] * 2),
    )
    origin = torch.tensor([[3, 5]], device=device)
    attention.loop_attention(queries, context, None, attention.ContextMask(origin, torch.zeros_like(origin)), 1.0)
    assert ways == ["context_in_blocks" if blocks else "context_in_parts"]


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_qwen35", "tiny_gemma4"])
def test_targets_take_drafts_back(name, device):
    target = load_target(build(option("target", name), TargetConfig, "target"), dtype="float64")
    cache, tokens = target.new_cache(), torch.arange(60, 75, device=device)[None]
    target.read(tokens[:, :8], cache=cache)
    target.read(tokens[:, 8:12], cache=cache)
    target.commit(cache, 8, range(2))
    again = target.read(tokens[:, 10:], cache=cache, logits=slice(None)).logits
    torch.testing.assert_close(again, target.read(tokens, logits=slice(10, None)).logits, rtol=1e-3, atol=1e-4)
    prompts, drawn = [[60, 61], [62, 63, 64], [65, 66]], dict(max_new_tokens=6, seed=0)
    answers = respond(target, prompts, "abc", SamplingConfig(), **drawn)
    target.spec = replace(target.spec, stop_ids=(answers[0][1],))
    assert len(respond(target, prompts, "abc", SamplingConfig(), **drawn)[0]) <= 2  # it left the batch and the cache
    decode_plain(target, [60, 61], max_new_tokens=3)


def as_nccl(values):
    """The sum over one rank, as NCCL computes it: for CUDA tensors only."""
    assert values.is_cuda
    return values.clone()


class Engine:
    """The part of DeepSpeed's engine that a trainer uses."""

    def __init__(self, module, settings):
        self.device = torch.device("cuda", 0)
        self.module = module.to(self.device, torch.bfloat16 if settings.precision == "bfloat16" else torch.float32)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=settings.lr)
        self.boundary = False

    def __call__(self, *arguments):
        return self.module(*arguments)

    def backward(self, loss):
        loss.backward()

    def set_gradient_accumulation_boundary(self, boundary):
        self.boundary = boundary

    def step(self):
        if self.boundary:
            self.norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def get_global_grad_norm(self):
        return self.norm

    def save_checkpoint(self, folder, tag, client_state, save_latest):
        (Path(folder) / tag).mkdir()


@pytest.mark.parametrize(
    "drafter, target, features, settings",
    [
        pytest.param("eagle3", "tiny_llama", "disk", ["++drafter.draft_vocab_size=200", "++train.pack=true"]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("dflash", "tiny_llama", "disk", ["++drafter.width=4", "++train.pack=true"]),
                ("dspark", "tiny_qwen3", "online", ["++drafter.width=4"]),
                ("domino", "tiny_qwen3", "disk", ["++drafter.width=4"]),
                ("eagle3", "tiny_gemma4", "online", ["++train.recompute=true"]),
                ("mtp", "tiny_qwen35", "disk", ["++train.pack=true"]),
                ("mtp_assistant", "tiny_gemma4", "online", []),
            ]
        ),
    ],
)
def test_all_phases(drafter, target, features, settings, tmp_path, monkeypatch):
    config = composed(
        f"+drafter={drafter}",
        f"+target={target}",
        f"features={features}",
        f"root={tmp_path}",
        *settings,
        "++prompts.limit=12",
        "++generate.max_new_tokens=8",
        "++generate.greedy_max_new_tokens=8",
        "++generate.greedy_prompts=2",
        "++train.steps=2",
        "++train.batch_size=4",
        "++train.micro_batch_size=2",
        "++train.origins=3",
        "++train.depth_exposure=2",
        "++wandb.mode=disabled",
        "++evaluate.prompts=1",
        "++evaluate.max_new_tokens=8",
        "++evaluate.replay_stages=2",
    )
    monkeypatch.setattr(engine, "start_engine", lambda unroll, settings, *_, **__: Engine(unroll, settings))
    monkeypatch.setattr(train, "initialise_distributed", lambda threads: None)
    monkeypatch.setattr(costs, "TURNS", 1)
    for module in (engine, metrics):
        monkeypatch.setattr(module, "sum_over_ranks", as_nccl)
    generate.run(config)
    cache.run(config)
    train.require_settings(config, artifacts.run_folder(config))
    assert train.train(config)
    export.run(config)
    evaluate.run(config)
    folder = artifacts.run_folder(config) / "drafter"
    model = dloop_train.load(folder, target)
    assert (
        model.target.device.type == "cuda"
        and list(model.tokens([60, 61, 62], max_new_tokens=6))
        and list(model.generate("hello", max_new_tokens=6, temperature=1.0))
    )
