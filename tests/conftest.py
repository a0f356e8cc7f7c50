"""Shared by the tests: tiny targets (random, and trained for a moment so that drafts get accepted) and drafters in float64."""

import os

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from dloop_train.config import CONF, TargetConfig, build, from_hydra, option
from dloop_train.drafters.base import DrafterConfig
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import load_target
from dloop_train.targets.target import Target
from dloop_train.types import Reads

torch.set_num_threads(1)

VARIANTS = {
    "dflash-shifted": ("dflash", {"alignment": "shifted", "layers": 2, "width": 4}),
    "dflash-fill_in": ("dflash", {"alignment": "fill_in", "layers": 2, "width": 4}),
    "dflash-fill_in-next": ("dflash", {"alignment": "fill_in", "layers": 2, "width": 4, "slot": "next"}),
    "dflash-post_norm": ("dflash", {"alignment": "shifted", "layers": 2, "width": 3, "state": "post_norm"}),
    "eagle3-reduced": ("eagle3", {"tokens_per_stage": 3, "draft_vocab_size": 200}),
    "eagle3-fc_norm": ("eagle3", {"tokens_per_stage": 2, "fc_norm": True}),
    "eagle3-deepspec": ("eagle3", {"tokens_per_stage": 3, "format": "deepspec_eagle3"}),
}
"""At least one for every drafter YAML (checked in test_drafters.py)."""

TAPS = [0, 1, 3]


def composed(*overrides: str):
    """The Config that the command line would give."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", overrides=["name=test", *overrides])
    with open_dict(tree):
        return from_hydra(OmegaConf.create(OmegaConf.to_container(tree, resolve=True)))


def tiny_config(**changes) -> TargetConfig:
    return build(option("target", "tiny_llama") | changes, TargetConfig, "target")


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """Random weights, float64."""
    return load_target(tiny_config(), dtype="float64", device="cpu")


@pytest.fixture(scope="session")
def taught_target() -> Target:
    """Trained for a moment on counting texts: its greedy continuations are regular, so that drafters can learn them."""
    target = load_target(tiny_config(), dtype="float32", device="cpu")
    model = target.model.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        start, jump = torch.randint(0, 26, (16, 1), generator=generator), torch.randint(1, 3, (16, 1), generator=generator)
        tokens = 70 + (start + jump * torch.arange(32)) % 26
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    target.model.eval().requires_grad_(False)
    target.model.double()
    return target


def make_drafter(variant: str, target: Target, *, seed: int = 0, dtype=torch.float64):
    """A randomly initialised drafter of a variant, its norms shaken so that each of them matters."""
    family, settings = VARIANTS[variant]
    config = build(option("drafter", family) | settings, DrafterConfig, "drafter")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = config.build(config.shape(target.spec, TAPS), TargetHead.of(target))
        if hasattr(drafter, "keep_tokens") and drafter.d2t is not None:
            drafter.keep_tokens(torch.arange(50, 250))
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.2)
    return drafter.to(dtype).eval()


@pytest.fixture(params=sorted(VARIANTS))
def variant(request) -> str:
    return request.param


@pytest.fixture
def drafter(variant, tiny_target):
    return make_drafter(variant, tiny_target)


@pytest.fixture(scope="session")
def text(tiny_target):
    """Random ids and the target's features on them: tokens [2, 25] and features [2, 24, 3 D]."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(60, 240, (2, 25), generator=generator)
    output = tiny_target.read(tokens[:, :-1], reads=Reads(taps=tuple(TAPS)))
    return tokens, output.features.clone(), output.last_hidden.clone()
