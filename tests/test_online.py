"""Tests of online features: the target in the training step gives the features that a store has."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import composed
from test_pipeline import environment

from dloop_train.data.online import OnlineSource, text_of
from dloop_train.phases import artifacts, cache, generate, plan, train
from dloop_train.runs import read_jsonl

PAIRS = [("dflash", "tiny_llama"), ("eagle3", "tiny_qwen3"), ("mtp", "tiny_qwen35"), ("mtp_assistant", "tiny_gemma4")]
"""Drafters that read taps, only the last hidden state, or shared keys and values; every architecture of targets."""
SMALL = [
    "prompts.limit=7",
    "generate.max_new_tokens=6",
    "generate.greedy_max_new_tokens=2",
    "generate.greedy_prompts=1",
    "++cache.dtype=float32",
]


@pytest.fixture(params=PAIRS, ids="-".join, scope="module")
def sources(request, tmp_path_factory):
    """A function that makes the source of a training's batches, from disk or online."""
    drafter, target = request.param

    def make(kind, *more):
        config = composed(f"+drafter={drafter}", f"+target={target}", f"root={root}", f"features={kind}", *SMALL, *more)
        cache.run(config)
        return cache.training_source(config)

    root = tmp_path_factory.mktemp("root")
    generate.run(composed(f"+drafter={drafter}", f"+target={target}", f"root={root}", *SMALL))
    return make


def ready(source, indices):
    return source.ready(source.read(indices), torch.device("cpu"), torch.float32)


def same(first, second, compare):
    assert (
        first.ids == second.ids
        and torch.equal(first.tokens, second.tokens)
        and torch.equal(first.loss_mask, second.loss_mask)
    )
    assert type(first) is type(second) and first.features.shape[-1] == second.features.shape[-1] > 0
    compare(first.features, second.features)
    compare(first.last_hidden, second.last_hidden)


def equal(first, second):
    assert torch.equal(first, second)


def test_online_features_are_the_stored_ones(sources):
    """They are bitwise equal if the target reads the same batches (here each sample alone).

    Order and padding of the training's batches do not matter.
    """
    disk, online = (sources(kind, "++cache.batch_tokens=1") for kind in ("disk", "online"))
    assert disk.lengths == online.lengths and len(disk) == len(online) == 7
    for indices in ([0], [3, 1, 6], [5, 0, 4, 2]):
        same(ready(disk, indices), ready(online, indices), equal)


def test_other_batches_of_the_target_change_rounding_alone(sources):
    """Padding changes numbers only through the order of sums."""
    disk, online = sources("disk"), sources("online", "++cache.batch_tokens=300")
    same(
        ready(disk, [0, 3, 5, 6]),
        ready(online, [0, 3, 5, 6]),
        lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5),
    )


def test_a_batch_can_be_trained_on(sources):
    """Features that the target computes in inference mode can be used in a backward pass."""
    batch = ready(sources("online"), [0, 1])
    weight = torch.ones(batch.features.shape[-1], requires_grad=True)
    (batch.features * weight).sum().backward()
    assert weight.grad.abs().sum() > 0


def test_long_texts_are_cut(sources):
    source = sources("online")
    short = OnlineSource(
        source.responses, source.target, source.feature_spec, dtype=source.dtype, max_length=5, batch_tokens=64
    )
    assert set(short.lengths) == {5} and ready(short, [0, 1]).tokens.shape == (2, 5)
    assert text_of(replace(source.responses[0], prompt_ids=[1, 2], response_ids=[3, 2]), 99).loss_mask.tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_features_are_rounded_as_on_disk(sources):
    disk, online = (sources(kind, "++cache.batch_tokens=1", "++cache.dtype=bfloat16") for kind in ("disk", "online"))
    same(ready(disk, [2, 4]), ready(online, [2, 4]), equal)
    assert torch.equal(ready(online, [2]).features, ready(online, [2]).features.bfloat16().float())


def test_a_dry_run_counts_no_store(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "measure_rate", lambda dtype: 1e12)
    config = composed("+drafter=eagle3", "+target=qwen3_8b", f"root={tmp_path}", "features=online")
    assert plan.estimate(config).fits and "the target runs in the training step" in plan.as_text(
        config, plan.estimate(config)
    )
    stored = composed("+drafter=eagle3", "+target=qwen3_8b", f"root={tmp_path}")
    assert "choose features=online" in plan.as_text(stored, plan.estimate(stored))


def test_online_stores_nothing_and_is_another_training(tmp_path, capsys):
    config = composed("+drafter=dflash", "+target=tiny_llama", f"root={tmp_path}", "features=online", *SMALL)
    cache.run(config)
    assert "nothing is stored" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="responses/.* does not exist yet"):
        cache.training_source(config)
    disk = composed("+drafter=dflash", "+target=tiny_llama", f"root={tmp_path}", *SMALL)
    assert (
        artifacts.features(disk).key != artifacts.features(config).key
        and artifacts.responses(disk).key == artifacts.responses(config).key
    )
    train.require_settings(disk, tmp_path)
    with pytest.raises(ValueError, match="features: found"):
        train.require_settings(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, target, ranks, zero",
    [
        ("dflash", "tiny_llama", 1, 1),
        ("mtp", "tiny_qwen35", 2, 2),
        ("mtp_assistant", "tiny_gemma4", 2, 3),
        ("eagle3", "tiny_qwen3", 2, 0),
    ],
)
def test_a_training_is_the_same_online(drafter, target, ranks, zero, tmp_path):
    """All losses and accuracies are equal, on one and on two ranks and with all ZeRO stages."""
    rows = {}
    for kind in ("disk", "online"):
        command = [
            sys.executable,
            "-m",
            "dloop_train",
            f"+drafter={drafter}",
            f"+target={target}",
            f"features={kind}",
            f"name={kind}",
            "prompts.limit=13",
            "generate.greedy_prompts=2",
            "cache.dtype=float32",
            "cache.batch_tokens=1",
            "train.precision=float32",
            "train.steps=5",
            "train.batch_size=4",
            "train.micro_batch_size=1",
            "train.log_every=1",
            "launch.threads=1",
            f"launch.processes={ranks}",
            f"deepspeed=zero{zero}",
            "phases=[generate,cache,train]",
        ]
        done = subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        rows[kind] = [
            {name: row[name] for name in row if name == "step" or "loss" in name or "accuracy" in name}
            for row in read_jsonl(tmp_path / "runs" / kind / "metrics.jsonl")
        ]
    assert len(rows["disk"]) == 5 and rows["disk"] == rows["online"]
