"""export: best checkpoint -> a drafter folder in its family's public layout, re-read and checked."""

import importlib.metadata
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from dloop_train import __version__
from dloop_train.checkpoints.files import (
    SECTION,
    check_export,
    layout_modules,
    locate_drafter,
    read_config,
    save_drafter,
)
from dloop_train.config import Config, check
from dloop_train.decoding.gates import Gate
from dloop_train.drafters.base import Drafter
from dloop_train.phases import artifacts
from dloop_train.phases.train import bare_drafter
from dloop_train.phases.validation import chosen_threshold, require_same_validation
from dloop_train.ranks import say
from dloop_train.targets.sources import load_spec, locate
from dloop_train.training.saves import weights_of


def run(config: Config) -> None:
    folder = artifacts.run_folder(config)
    drafter = bare_drafter(config)
    weights, step = weights_of(folder / "checkpoints", config.export.checkpoint)
    drafter.load_state_dict(load_file(weights))
    section = dloop_section(config, drafter, step)
    out, beside = folder / "drafter", folder / "drafter.partial"
    if (out / "config.json").is_file() and read_config(out).get(SECTION) == section:
        say(f"export: done before, {out}")
        return
    spec = load_spec(config.target)
    shutil.rmtree(beside, ignore_errors=True)
    save_drafter(drafter, beside, section=section, target=spec)
    check_export(beside, drafter.to(torch.bfloat16), config.drafter)
    put_into_target(config, drafter, beside)
    shutil.rmtree(out, ignore_errors=True)
    beside.rename(out)
    say(f"export: {out} ({drafter.shape.format} layout)")


def gate_of(config: Config, step: int) -> Gate:
    """The gate that is written into an export.

    With gate.threshold=replay its threshold is the one that validation chose at this step; ValueError if there is none.
    """
    if not config.gate.by_replay:
        return config.gate
    folder = artifacts.run_folder(config)
    require_same_validation(config)
    threshold = chosen_threshold(folder, step)
    check(
        threshold is not None,
        f"gate.threshold=replay takes the choice of validation, "
        f"and {folder / 'validation.jsonl'} has none at step {step}; "
        f"set gate.threshold={config.gate.paper_threshold:g}, or export a checkpoint that was validated",
    )
    return config.gate.with_threshold(threshold)


def depth_exposure_of(config: Config, step: int) -> int:
    """N, the number of extra stages in training, for the weights of a step.

    At step 0 it is read from the config.json of the drafter that training started from; 0 if that does not have it.
    """
    if step > 0 or config.drafter.init == "scratch":
        return config.train.depth_exposure
    return (
        read_config(locate_drafter(config.drafter.init, config.drafter.revision))
        .get(SECTION, {})
        .get("trained_depth_exposure", 0)
    )


def put_into_target(config: Config, drafter: Drafter, folder: Path) -> None:
    """For layouts that engines load from the target's own files: copy these files with the trained tensors in them.

    The copies are in the subfolder `merged` of `folder`. Other layouts and random targets have none.
    """
    merge = getattr(layout_modules()[drafter.shape.format], "merge_into", None)
    if merge is None or config.target.source == "random":
        return
    files = merge(folder, locate(config.target), folder / "merged")
    if files:
        say(
            f"export: {folder.with_suffix('').name}/merged holds {[file.name for file in files]}: "
            f"put them in place of the target's files of these names to serve it"
        )


def versions() -> dict[str, str]:
    return {"dloop_train": __version__} | {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")
    }


def dloop_section(config: Config, drafter, step: int) -> dict:
    """The section of config.json with the settings of drafting in stages and the provenance of the weights."""
    gate = gate_of(config, step)
    return {
        "threshold": gate.threshold,
        "paper_threshold": gate.paper_threshold,
        "tokens_per_stage": drafter.k,
        "max_stages": config.gate.max_stages,
        "temperature": config.gate.temperature,
        "trained_depth_exposure": depth_exposure_of(config, step),
        "state": drafter.shape.state,
        "slot": drafter.shape.slot,
        **config.drafter.section(),
        "provenance": {
            "versions": versions(),
            "target": config.target.name,
            "target_revision": load_spec(config.target).revision,
            "init": config.drafter.init,
            "backbone": config.drafter.backbone,
            "responses": artifacts.responses(config).key,
            "features": artifacts.features(config).key,
            "checkpoint": config.export.checkpoint,
            "step": step,
        },
    }
