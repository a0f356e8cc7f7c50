"""Shared by the tests: tiny targets (random, or briefly trained) and drafters in float64.

The briefly trained target accepts drafts of a drafter that is trained on its texts.
"""

import os

# Set before the imports below, some of which read these variables once.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_5 import modeling_qwen3_5

from dloop_train.config import CONF, TargetConfig, build, from_hydra, option
from dloop_train.drafters.base import DrafterConfig
from dloop_train.drafters.sizes import Rope
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import load_target
from dloop_train.targets.target import Target

torch.set_num_threads(1)


class Wide:
    """Stands in for torch in a module, so that casts to fp32 go to fp64 instead."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


class Watch(TorchDispatchMode):
    """Counts the elements of allocated tensors.

    Of tensors as wide as a vocabulary (`widths`) it also keeps the largest number of rows (`rows`) and the largest
    number of elements alive at once (`peak`). Tensors with a number of rows in `heights` are left out.
    """

    def __init__(self, widths=(), heights=()):
        super().__init__()
        self.widths, self.heights, self.elements, self.rows, self.peak, self.living = widths, heights, 0, 0, 0, {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        known = {
            StorageWeakRef(each.untyped_storage()).cdata
            for each in tree_leaves((arguments, keywords))
            if isinstance(each, torch.Tensor)
        }
        for made in tree_leaves(result):
            if not isinstance(made, torch.Tensor):
                continue
            storage = StorageWeakRef(made.untyped_storage())
            if storage.cdata in known:
                continue
            self.elements += made.numel()
            # `heights` are those of weight tables, so that tables and their gradients are not counted as logits.
            if made.dim() == 2 and made.shape[1] in self.widths and made.shape[0] not in self.heights:
                self.rows = max(self.rows, made.shape[0])
                self.living[storage.cdata] = storage, made.numel()
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self):
        self.living = {key: (storage, count) for key, (storage, count) in self.living.items() if not storage.expired()}
        return sum(count for _, count in self.living.values())


@pytest.fixture
def exact(monkeypatch):
    """Run Qwen3.5's delta rule and gated norm in fp64.

    They compute in fp32 whatever the model's dtype, and round differently for chunks and for single tokens.
    """
    monkeypatch.setattr(modeling_qwen3_5, "torch", Wide())


def gemma4_layers(shape):
    """The same shape with Gemma 4's layers, for a target with scaled embeddings and a logit softcap.

    The layers have sandwich norms, values equal to keys, and rotary positions in a quarter of each head.
    """
    gemma4 = dict(
        architecture="gemma4",
        head_dim=16,
        num_key_value_heads=1,
        keys_are_values=True,
        rope=Rope(10000.0, "proportional", 0.25),
    )
    return replace(
        shape,
        layers=tuple(replace(layer, **gemma4) for layer in shape.layers),
        head_scales=(torch.tensor(shape.hidden_size**0.5).item(), 3.0),
    )


def first_layer_slides(shape, causal=True):
    return replace(shape, layers=(replace(shape.layers[0], window=3, causal=causal), *shape.layers[1:]))


def all_layers_slide_both_ways(shape):
    return replace(shape, layers=tuple(replace(layer, window=5, causal=False) for layer in shape.layers))


BLOCK = {"layers": 2, "width": 4}
DOMINO = BLOCK | {"emb_dim": 12, "gru_hidden_dim": 10}
DSPARK = BLOCK | {"markov_rank": 6}
ASSISTANT = {"tokens_per_stage": 3, "layers": 2, "hidden_size": 32, "train_embedding": True}
VARIANTS = {
    "dflash-shifted": ("dflash", BLOCK | {"alignment": "shifted"}),
    "dflash-fill_in": ("dflash", BLOCK | {"alignment": "fill_in"}),
    "dflash-fill_in-next": ("dflash", BLOCK | {"alignment": "fill_in", "slot": "next"}),
    "dflash-post_norm": (
        "dflash",
        {"alignment": "shifted", "layers": 2, "width": 3, "state": "post_norm", "draft_vocab_size": 200},
    ),
    "dflash-sliding": ("dflash", BLOCK | {"alignment": "fill_in"}, first_layer_slides),
    "dflash-window": ("dflash", BLOCK | {"alignment": "shifted"}, all_layers_slide_both_ways),
    "dflash-gemma4": ("dflash", BLOCK | {"alignment": "shifted"}, gemma4_layers),
    "domino-shifted": ("domino", DOMINO | {"alignment": "shifted", "num_draft_tokens": 3}),
    "domino-fill_in": ("domino", DOMINO | {"alignment": "fill_in"}, first_layer_slides),
    "dspark-vanilla": ("dspark", DSPARK),
    "dspark-gated": (
        "dspark",
        DSPARK | {"markov_head_type": "gated", "confidence_with_markov": False},
        all_layers_slide_both_ways,
    ),
    "dspark-rnn": ("dspark", DSPARK | {"markov_head_type": "rnn", "detach_confidence": True, "draft_vocab_size": 200}),
    "dspark-gemma4": ("dspark", DSPARK | {"confidence": False}, gemma4_layers),
    "eagle3-reduced": ("eagle3", {"tokens_per_stage": 3, "draft_vocab_size": 200}),
    "eagle3-fc_norm": ("eagle3", {"tokens_per_stage": 2, "fc_norm": True}),
    "eagle3-deepspec": ("eagle3", {"tokens_per_stage": 3, "format": "deepspec_eagle3"}),
    "eagle3-gemma4": ("eagle3", {"tokens_per_stage": 3, "format": "deepspec_eagle3"}, gemma4_layers),
    "mtp": ("mtp", {"tokens_per_stage": 3}),
    "mtp_assistant": ("mtp_assistant", ASSISTANT),
    "mtp_assistant-bonus": ("mtp_assistant", ASSISTANT | {"draft_position": "bonus", "layers": 3}, first_layer_slides),
}
"""(family, settings, changes to the shape).

There is at least one for every drafter YAML (checked in test_drafters.py) and for every kind of layer.
"""

TAPS = [0, 1, 3]


def composed(*overrides: str):
    """The Config of a command line with these overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", overrides=["name=test", *overrides])
    with open_dict(tree):
        return from_hydra(OmegaConf.create(OmegaConf.to_container(tree, resolve=True)))


PAIRS = sorted(file.stem for file in CONF.glob("pair/*.yaml"))


def pair_of(name: str) -> list[str]:
    """The overrides that choose a pair's YAML.

    A drafter's name may be a prefix of another's, so the longest name that matches is taken.
    """
    drafter = max((file.stem for file in CONF.glob("drafter/*.yaml") if name.startswith(f"{file.stem}_")), key=len)
    return [f"+drafter={drafter}", f"+target={name.removeprefix(f'{drafter}_')}"]


def tiny_config(**changes) -> TargetConfig:
    return build(option("target", "tiny_llama") | changes, TargetConfig, "target")


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A tiny target with random weights, in float64."""
    return load_target(tiny_config(), dtype="float64", device="cpu")


@pytest.fixture(scope="session")
def taught_target() -> Target:
    return teach("tiny_llama")


def teach(name: str) -> Target:
    """A tiny target, briefly trained on counting texts, in float64.

    Its greedy continuations are regular, so that drafters can learn them.
    """
    target = load_target(build(option("target", name), TargetConfig, "target"), dtype="float32", device="cpu")
    model = target.model.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        start, jump = (
            torch.randint(0, 26, (16, 1), generator=generator),
            torch.randint(1, 3, (16, 1), generator=generator),
        )
        tokens = 70 + (start + jump * torch.arange(32)) % 26
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    target.model.eval().requires_grad_(False)
    target.model.double()
    return target


def settings_of(variant: str) -> DrafterConfig:
    family, settings, *_ = VARIANTS[variant]
    return build(option("drafter", family) | settings, DrafterConfig, "drafter")


def shape_of(variant: str, target: Target):
    shape = settings_of(variant).shape(target.spec, TAPS)
    for change in VARIANTS[variant][2:]:
        shape = change(shape)
    return shape


def head_for(shape, target: Target) -> TargetHead:
    """The target's head, with the embedding scale and softcap of the shape if it has them (Gemma 4)."""
    head = TargetHead.of(target)
    head.embed_scale, head.softcap = shape.head_scales or (head.embed_scale, head.softcap)
    return head


def make_drafter(variant: str, target: Target, *, seed: int = 0, dtype=torch.float64, shape=None):
    """A randomly initialised drafter of a variant, or of another shape in its family.

    Norm weights are random too, so that each norm influences the results.
    """
    config = settings_of(variant)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shape = shape or shape_of(variant, target)
        drafter = config.build(shape, head_for(shape, target))
        if hasattr(drafter, "keep_tokens") and drafter.d2t is not None:
            drafter.keep_tokens(torch.arange(50, 250))
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.2)
        for name, buffer in drafter.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    return drafter.to(dtype).eval()


@pytest.fixture(params=sorted(VARIANTS))
def variant(request) -> str:
    return request.param


@pytest.fixture
def drafter(variant, tiny_target):
    return make_drafter(variant, tiny_target)


@pytest.fixture
def text(variant, tiny_target):
    """Random tokens [2, 25], and the target's features [2, 24, F] and last hidden states [2, 24, D] on them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(60, 240, (2, 25), generator=generator)
    output = tiny_target.read(tokens[:, :-1], feature_spec=shape_of(variant, tiny_target).feature_spec)
    return tokens, output.features.clone(), output.last_hidden.clone()


def processes_of(root: Path, module: str = "dloop_train.worker") -> list[int]:
    """Ids of processes that run `module` for a run below `root`; by default its ranks."""
    found = [
        line.split()
        for line in subprocess.run(
            ["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]
    return [
        int(words[0])
        for words in found
        if "-m" in words and words[words.index("-m") + 1] == module and any(str(root) in word for word in words)
    ]
