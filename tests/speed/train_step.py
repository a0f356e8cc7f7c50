"""One training step at sizes of your choice: tokens/s, memory, FLOPs and share of ideal at S = 1 and N = 3, and against plainer ways to the same loss.

    python tests/speed/train_step.py                                                      # every family at SmolLM2-135M's size
    python tests/speed/train_step.py --target qwen3_8b --length 4096 --origins 512 --sequences 1 --drafter dflash,dspark,eagle3   # one H100
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hydra import compose, initialize_config_dir
from watching import Watching
from omegaconf import OmegaConf, open_dict
from torch import Tensor

from dloop_train.config import CONF, Config, from_hydra
from dloop_train.data.batches import TextBatch
from dloop_train.drafters.base import Drafter
from dloop_train.phases import artifacts
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import as_dtype, default_device, random_config, spec_of
from dloop_train.config import DeepSpeedConfig, TrainConfig
from dloop_train.training.accounting import counts_of, forward_backward, held_for_backward, step_cost, working_space
from dloop_train.training.anchors import Origins, draw_origins
from dloop_train.training.unroll import Terms, Unroll
from dloop_train.types import TargetSpec

FAMILIES = ("dflash", "domino", "dspark", "eagle3", "mtp", "mtp_assistant")
RELEASED = {"dflash": ("drafter.layers=5", "drafter.width=16"), "domino": ("drafter.layers=5", "drafter.width=16"), "dspark": ("drafter.layers=5", "drafter.width=7")}
"""Sizes of weights that are not on this machine; of small targets the pair's YAML says them."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--target", default="smollm2_135m", help="whose sizes; its weights are not needed")
    sizes = {"length": 192, "origins": 32, "sequences": 4, "depth": 3, "loss-rows": 128, "steps": 5}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], help="more settings, such as drafter.width=8")
    return parser.parse_args(words)


def composed(family: str, wanted: argparse.Namespace) -> Config:
    """The settings of a pair, its drafter from scratch."""
    released = RELEASED.get(family, ()) if not (CONF / "pair" / f"{family}_{wanted.target}.yaml").is_file() or wanted.target.startswith("qwen") else ()
    aligned = ["drafter.alignment=shifted"] if family in ("dflash", "domino") and not (CONF / "pair" / f"{family}_{wanted.target}.yaml").is_file() else []
    overrides = [f"+drafter={family}", f"+target={wanted.target}", "name=speed", *(f"++{one}" for one in ("drafter.init=scratch", *aligned, *released, *wanted.set))]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", overrides)
    with open_dict(tree):
        return from_hydra(OmegaConf.create(OmegaConf.to_container(tree, resolve=True)))


@dataclass
class Bench:
    """A drafter with random weights, and one batch of random texts and features."""

    spec: TargetSpec
    drafter: Drafter
    batch: TextBatch
    settings: argparse.Namespace
    device: torch.device
    dtype: torch.dtype

    def origins(self, depth: int) -> Origins:
        return draw_origins(self.batch, self.drafter.k, count=self.settings.origins, depth_exposure=depth, seed=0, epoch=0)


def make_bench(family: str, wanted: argparse.Namespace) -> Bench:
    config = composed(family, wanted)
    device = default_device() if wanted.device == "auto" else torch.device(wanted.device)
    dtype = as_dtype(wanted.precision)
    spec, taps = spec_of(config.target, random_config(config.target)), artifacts.taps(config)
    torch.manual_seed(0)
    table = torch.randn(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype) * 0.02
    with torch.device(device):
        drafter = config.drafter.build(config.drafter.shape(spec, taps), TargetHead(table, table, embed_scale=spec.embed_scale, softcap=spec.softcap))
    drafter = drafter.to(device=device, dtype=dtype)
    with torch.no_grad():
        drafter.start_vocabulary(Counter(), table)
    make = lambda width: torch.randn(wanted.sequences, wanted.length, width, device=device, dtype=dtype)  # noqa: E731
    tokens = torch.randint(spec.vocab_size, (wanted.sequences, wanted.length), device=device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, wanted.length // 4:] = True  # the first quarter is the prompt
    batch = TextBatch(tuple(map(str, range(wanted.sequences))), tokens, mask, make(drafter.shape.reads.width(spec)), make(spec.hidden_size))
    return Bench(spec, drafter, batch, wanted, device, dtype)
