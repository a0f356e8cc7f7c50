"""train: features -> checkpoints. The controller starts the ranks; each rank runs `rank_main`."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dloop_train.checkpoints.files import create_drafter, fill_backbone, locate_drafter, read_shape
from dloop_train.config import Config
from dloop_train.data.online import OnlineSource
from dloop_train.data.responses import read_responses
from dloop_train.drafters.base import Drafter, frequent_ids, with_vocabulary
from dloop_train.launch import start_ranks
from dloop_train.phases import artifacts, validation
from dloop_train.phases.cache import require_source, training_source
from dloop_train.phases.validation import Validator
from dloop_train.ranks import STOPPED, barrier, initialise_distributed, rank, say, world_size
from dloop_train.runs import require_same, write_atomic
from dloop_train.targets.head import TargetHead
from dloop_train.targets.sources import load_head, load_spec
from dloop_train.training.engine import Trainer
from dloop_train.training.initialise import initialise_from_target, token_counts
from dloop_train.training.metrics import MetricLog
from dloop_train.training.saves import best_of, last_of

DONE = "done.json"
"""File beside the checkpoints: the step at which the training ended.

If patience ended it, also the number of validations since the best one.
"""
FREE = (
    "micro_batch_size",
    "save_every",
    "keep",
    "log_every",
    "validate_every",
    "validate_share",
    "patience",
    "max_skipped",
    "max_skipped_share",
    "loss_rows",
    "pack",
    "recompute",
)
"""Settings of train that may change when a training is resumed.

The numbers of the training do not depend on them, or only through the order of a sum.
"""
OF_VALIDATION = "validate_prompts"
"""Setting of train that changes the comparison of checkpoints, but not the numbers of the training."""


def run(config: Config) -> None:
    folder = artifacts.run_folder(config)
    require_settings(config, folder)
    if finished(config):
        say(f"train: done before, {folder / 'checkpoints'}")
        return
    validation.require_same_validation(config)
    write_atomic(folder / validation.VALIDATED_BY, json.dumps(validation.settings_of(config), indent=1))
    require_source(config)
    start_ranks(config, "train")
    if not finished(config):
        say("train: stopped as asked; the same command resumes from the checkpoint")
        sys.exit(STOPPED)


def settings_of(config: Config) -> dict:
    """The settings that determine the numbers of a training; a run folder belongs to one set of them."""
    train = {name: value for name, value in asdict(config.train).items() if name not in (*FREE, OF_VALIDATION)}
    drafter = {key: value for key, value in asdict(config.drafter).items() if key != "released"} | {
        "family": config.drafter.family
    }
    return {
        "features": artifacts.features(config).key,
        "mask_token_id": config.target.mask_token_id,
        "drafter": drafter,
        "train": train,
        "deepspeed": asdict(config.deepspeed),
    }


def free_settings_of(config: Config) -> dict:
    """The settings that may differ when a training is resumed."""
    return {f"train.{name}": value for name, value in asdict(config.train).items() if name in FREE}


def require_settings(config: Config, folder: Path) -> None:
    """Raise ValueError if the folder has a training with other settings; print the free settings that have changed."""
    path, free = folder / "training.json", folder / "training_free.json"
    if path.is_file():
        found = json.loads(path.read_text())
        require_division(found.get("deepspeed"), asdict(config.deepspeed), folder)
        require_same(found, settings_of(config), path)
    else:
        write_atomic(path, json.dumps(settings_of(config), indent=1, sort_keys=True))
    before = json.loads(free.read_text()) if free.is_file() else {}
    for name, value in free_settings_of(config).items():
        if before.get(name, value) != value:
            say(f"train: {name} was {before[name]} and is {value} from now on")
    write_atomic(free, json.dumps(free_settings_of(config), indent=1, sort_keys=True))


def require_division(found: dict | None, wanted: dict, folder: Path) -> None:
    """Raise ValueError if the ZeRO stage or offload has changed, since DeepSpeed cannot read the checkpoints then."""

    def named(settings: dict) -> str:
        return f"deepspeed=zero{settings['stage']} deepspeed.offload={str(settings['offload']).lower()}"

    if found is not None and found != wanted:
        raise ValueError(
            f"{folder} was trained with {named(found)}, this run has {named(wanted)}, "
            f"and DeepSpeed cannot read its checkpoints at another stage; "
            f"go on with {named(found)}, or choose another name= (or root=) to start anew"
        )


def finished(config: Config) -> bool:
    """Whether the last checkpoint is the one with which the training ended.

    The steps are compared because a new training may have begun beside the done.json of an old one. A training that
    patience ended is not finished if train.patience has been raised above the recorded number or set to 0.
    """
    folder = artifacts.run_folder(config) / "checkpoints"
    last, done = last_of(folder), folder / DONE
    if last is None or not done.is_file():
        return False
    found = json.loads(done.read_text())
    return found["step"] == last.step and (found["worse"] is None or 0 < config.train.patience <= found["worse"])


def make_drafter(config: Config) -> Drafter:
    """The drafter that training starts from."""
    torch.manual_seed(config.train.seed)  # parts without given weights start at random
    drafter = bare_drafter(config)
    if config.drafter.init == "scratch":
        initialise(drafter, config)
    elif (
        config.drafter.draft_vocab_size
        and not read_shape(locate_drafter(config.drafter.init, config.drafter.revision)).reduced
    ):
        drafter = reduce_vocabulary(config)
    return drafter


def reduce_vocabulary(config: Config) -> Drafter:
    """The released drafter with its vocabulary reduced to the most frequent tokens of this run's responses."""
    whole = create_drafter(
        replace(config.drafter, draft_vocab_size=0),
        load_spec(config.target),
        load_head(config.target),
        artifacts.taps(config),
    )
    counts = token_counts(read_responses(artifacts.responses(config).folder, "train"))
    shape = replace(whole.shape, draft_vocab_size=config.drafter.draft_vocab_size)
    ids = frequent_ids(counts, shape, config.target.stop_ids)
    covered = sum(counts[token] for token in ids.tolist()) / max(counts.total(), 1)
    say(f"train: {len(ids)} of {shape.vocab_size} tokens can be drafted, {covered:.2%} of those in the responses")
    return with_vocabulary(whole, config.drafter, ids)


def bare_drafter(config: Config) -> Drafter:
    """A drafter with its released weights, or, from scratch, with weights that are still to be set."""
    return create_drafter(config.drafter, load_spec(config.target), load_head(config.target), artifacts.taps(config))


def initialise(drafter: Drafter, config: Config) -> None:
    """Set the weights of a drafter from scratch: from drafter.backbone, or else from the target's last layers."""
    if config.drafter.backbone:
        fill_backbone(drafter, locate_drafter(config.drafter.backbone, config.drafter.revision))
        with torch.no_grad():
            drafter.start_head()
            if drafter.shape.reduced:
                drafter.start_vocabulary(
                    token_counts(read_responses(artifacts.responses(config).folder, "train")),
                    drafter.head.lm_head_weight,
                    config.target.stop_ids,
                )
        return
    initialise_from_target(drafter, config.target, read_responses(artifacts.responses(config).folder, "train"))


def rank_main(config: Config) -> None:
    """One rank of the training."""
    if not train(config):
        sys.exit(STOPPED)


def train(config: Config) -> bool:
    """Run the training. Returns whether it is over; False if it was asked to stop before its end."""
    initialise_distributed(config.launch.threads)
    folder = artifacts.run_folder(config)
    source = training_source(config)
    drafter = make_drafter(config)
    if isinstance(source, OnlineSource):
        drafter.attach_head(TargetHead.of(source.target))  # one copy of the two largest matrices, embedding and lm_head
    checkpoints = folder / "checkpoints"
    last, best = last_of(checkpoints), best_of(checkpoints)
    log = MetricLog(
        folder,
        config.wandb,
        name=config.name,
        config=artifacts.described(config),
        start=last.step if last else 0,
        best=best.step if best else None,
    )
    trainer = Trainer(drafter, source, config.train, config.deepspeed, checkpoints, log)
    say(
        f"train: {trainer.plan.steps} steps of {config.train.batch_size} sequences on {world_size()} rank(s), "
        f"{len(source)} samples, "
        f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters"
    )
    over = trainer.train(Validator(config, source.target if isinstance(source, OnlineSource) else None))
    if over and rank() == 0:
        write_atomic(
            checkpoints / DONE,
            json.dumps(
                {
                    "step": trainer.step,
                    "worse": trainer.train_state.worse if trainer.step < trainer.plan.steps else None,
                }
            ),
        )
    log.close()
    barrier()  # the first rank that exits with a nonzero code ends the others
    return over
