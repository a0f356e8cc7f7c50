"""train: features -> checkpoints. The controller starts the ranks; each rank runs `rank_main`."""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from dloop_train.checkpoints.files import create_drafter, fill_backbone, locate_drafter
from dloop_train.config import Config
from dloop_train.data.online import OnlineSource
from dloop_train.data.responses import read_responses
from dloop_train.drafters.base import Drafter
from dloop_train.launch import start_ranks
from dloop_train.phases import artifacts
from dloop_train.phases.cache import require_source, training_source
from dloop_train.phases.replaying import summary_of_replay
from dloop_train.ranks import rank, say, world_size
from dloop_train.runs import require_same, write_atomic
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import load_head, load_spec, load_target
from dloop_train.training.engine import POINTER, Trainer, Validation, initialise_distributed
from dloop_train.training.initialise import initialise_from_target
from dloop_train.training.metrics import MetricLog


def run(config: Config) -> None:
    folder = artifacts.run_folder(config)
    require_settings(config, folder)
    if finished(config):
        say(f"train: done before, {folder / 'checkpoints'}")
        return
    require_source(config)
    start_ranks(config, "train")


def settings_of(config: Config) -> dict:
    """What decides the numbers of a training; a run folder belongs to one such set."""
    train = asdict(config.train)
    for free in ("save_every", "keep", "log_every", "validate_every", "validate_prompts", "loss_rows"):
        train.pop(free)
    drafter = {key: value for key, value in asdict(config.drafter).items()} | {"family": config.drafter.family}
    return {"features": artifacts.features(config).key, "mask_token_id": config.target.mask_token_id, "drafter": drafter, "train": train, "deepspeed": asdict(config.deepspeed)}


def require_settings(config: Config, folder: Path) -> None:
    """Refuse to go on in a folder that another training made."""
    path = folder / "training.json"
    if path.is_file():
        require_same(json.loads(path.read_text()), settings_of(config), path)
    else:
        write_atomic(path, json.dumps(settings_of(config), indent=1, sort_keys=True))


def finished(config: Config) -> bool:
    """Whether the last checkpoint is that of the last step."""
    folder = artifacts.run_folder(config) / "checkpoints"
    return (folder / POINTER).is_file() and (folder / "done.json").is_file()


def make_drafter(config: Config) -> Drafter:
    """The drafter that training starts from."""
    torch.manual_seed(config.train.seed)  # parts that no weights are given to start at random
    drafter = bare_drafter(config)
    if config.drafter.init == "scratch":
        initialise(drafter, config)
    return drafter


def bare_drafter(config: Config) -> Drafter:
    """A drafter that waits for weights, or that has its released ones."""
    return create_drafter(config.drafter, load_spec(config.target), load_head(config.target), artifacts.taps(config))


def initialise(drafter: Drafter, config: Config) -> None:
    """The weights of a drafter from scratch: another's backbone, or the target's last layers."""
    if config.drafter.backbone:
        fill_backbone(drafter, locate_drafter(config.drafter.backbone, config.drafter.revision))
        with torch.no_grad():
            drafter.start_head()
        return
    initialise_from_target(drafter, config.target, read_responses(artifacts.responses(config).folder, "train"))


def rank_main(config: Config) -> None:
    """One rank of the training."""
    initialise_distributed(config.launch.threads)
    folder = artifacts.run_folder(config)
    source = training_source(config)
    drafter = make_drafter(config)
    if isinstance(source, OnlineSource):
        drafter.borrow(TargetHead.of(source.target))  # one copy of the two largest matrices
    checkpoints = folder / "checkpoints"
    start = json.loads((checkpoints / POINTER).read_text())["step"] if (checkpoints / POINTER).is_file() else 0
    log = MetricLog(folder, config.wandb, name=config.name, config=settings_of(config), start=start)
    trainer = Trainer(drafter, source, config.train, config.deepspeed, checkpoints, log)
    say(f"train: {trainer.plan.steps} steps of {config.train.batch_size} sequences on {world_size()} rank(s), {len(source)} samples, "
        f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters")
    trainer.train(validation(config) if config.deepspeed.stage < 3 else None)  # replay needs the whole drafter on one rank
    if rank() == 0:
        write_atomic(checkpoints / "done.json", json.dumps({"step": trainer.step}))
    log.close()


def validation(config: Config):
    """Replay on validation prompts: what a checkpoint decodes like, measured during training. Called on every rank."""
    prompts = [r for r in read_responses(artifacts.responses(config).folder, "validation")][: config.train.validate_prompts]
    held = []

    def validate(step: int, drafter: Drafter) -> Validation:
        if not prompts or rank() != 0:
            return Validation({})
        if not held:
            held.append(load_target(config.target, dtype=config.train.precision, device=next(drafter.parameters()).device))
        return Validation(summary_of_replay(held[0], drafter, prompts, gate=config.gate, max_stages=config.train.depth_exposure + 1))
    return validate
