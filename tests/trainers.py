"""Small trainers on several gloo ranks of this machine, for tests of distributed training.

A test's function runs on all ranks. It may run several trainings, so that ranks are started once.
"""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import make_drafter, shape_of, tiny_config

from dloop_train.config import DeepSpeedConfig, LogConfig, TrainConfig
from dloop_train.data.batches import collate
from dloop_train.ranks import initialise_distributed
from dloop_train.targets.sources import load_target
from dloop_train.training.engine import Trainer, Validation
from dloop_train.training.metrics import MetricLog
from dloop_train.training.saves import best_of, last_of, whole_weights
from dloop_train.types import Sample

LENGTHS = (14, 30, 22, 18, 34, 26, 16, 28, 20, 24, 32)


def on_ranks(count, function, *arguments):
    """Run function(*arguments) on `count` ranks, and return the results in the order of ranks."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(one_rank, (count, port, folder, function, arguments), nprocs=count)
        return [torch.load(Path(folder) / f"{number}.pt", weights_only=False) for number in range(count)]


def one_rank(number, count, port, folder, function, arguments):
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.manual_seed(0)
    initialise_distributed(1)
    torch.save(function(*arguments), Path(folder) / f"{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


class Samples:
    """A source in memory. The features of sample `poisoned` are finite, but the drafter's results from them are not."""

    def __init__(self, target, feature_spec, poisoned=None, lengths=LENGTHS):
        generator = torch.Generator().manual_seed(3)
        self.samples = []
        for number, length in enumerate(lengths):
            tokens = torch.randint(60, 240, (length,), generator=generator)
            output = target.read(tokens[None], feature_spec=feature_spec)
            features = (
                output.features[0].float() if number != poisoned else torch.full_like(output.features[0], 1e38).float()
            )
            self.samples.append(
                Sample(f"sample-{number}", tokens, torch.arange(length) >= 4, features, output.last_hidden[0].float())
            )
        self.lengths = tuple(len(sample.tokens) for sample in self.samples)

    def read(self, indices):
        return collate([self.samples[index] for index in indices])

    def ready(self, batch, device, dtype):
        return batch.to(device, dtype)


def trainer(folder, stage, *, offload=False, poisoned=None, variant="dflash-shifted", shape=None, source=None, **train):
    """A trainer of a tiny drafter (by default DFlash), resumed if the folder has a checkpoint."""
    target = load_target(tiny_config(), dtype="float32", device="cpu")
    settings = TrainConfig(
        **{
            "batch_size": 4,
            "micro_batch_size": 1,
            "steps": 6,
            "origins": 3,
            "lr": 1e-3,
            "save_every": 2,
            "log_every": 1,
            "depth_exposure": 2,
            "precision": "float32",
            "validate_every": 1,
        }
        | train
    )
    folder.mkdir(parents=True, exist_ok=True)
    drafter = make_drafter(variant, target, dtype=torch.float32, shape=shape).train()
    last, best = last_of(folder / "checkpoints"), best_of(folder / "checkpoints")
    log = MetricLog(
        folder,
        LogConfig(mode="disabled"),
        name="test",
        config={},
        start=last.step if last else 0,
        best=best.step if best else None,
    )
    source = source or Samples(target, shape_of(variant, target).feature_spec, poisoned)
    return Trainer(drafter, source, settings, DeepSpeedConfig(stage, offload), folder / "checkpoints", log)


def weights_of(trainer):
    return whole_weights(trainer.drafter)


def optimiser_of(trainer):
    """Every tensor of this rank's optimiser: fp32 weights, moments, steps."""
    basic = trainer.engine.basic_optimizer
    held = [parameter for group in basic.param_groups for parameter in group["params"]]
    return [parameter.detach().clone() for parameter in held] + [
        value.clone() for parameter in held for value in basic.state[parameter].values() if torch.is_tensor(value)
    ]


def nothing(step, drafter):
    return Validation({})


class Died(Exception):
    """Raised by tests inside a training to end it."""
