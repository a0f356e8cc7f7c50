"""The command: compose the configuration, check it, run the phases in order."""

import importlib
import re
import sys
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from dloop_train import __version__
from dloop_train.config import CONF, Config, from_hydra
from dloop_train.ranks import say
from dloop_train.runs import write_atomic
from dloop_train.stopping import Stopping

REQUIRED = ("drafter", "target")


def main() -> None:
    """Entry point of `python -m dloop_train` and of the console script."""
    if "--version" in sys.argv[1:]:
        print(f"dloop_train {__version__}")
        return
    missing = missing_choices(sys.argv[1:])
    if missing and {"--help", "-h"} & set(sys.argv[1:]):  # Hydra composes before it helps, and cannot without them
        print(usage(missing))
        return
    if missing:
        sys.exit(usage(missing))
    arguments = [as_set_or_add(argument) for argument in sys.argv[1:]]
    if "dry_run=true" in (argument.lower() for argument in arguments):  # a dry run: Hydra must not write files either
        arguments += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
    sys.argv[1:] = arguments
    compose_and_run()


def as_set_or_add(argument: str) -> str:
    """Prefix an override with ++, so that `train.lr=1` sets the field whether or not a YAML contains it.

    The dataclasses then refuse unknown fields, with a message that lists the known ones.
    """
    return (
        f"++{argument}"
        if re.match(r"[a-z_]+\.[A-Za-z0-9_.]+=", argument) and not argument.startswith("hydra.")
        else argument
    )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose_and_run(tree: DictConfig) -> None:
    try:
        config = from_hydra(tree)
        if config.dry_run:
            from dloop_train.phases import plan

            plan.run(config)
            return
        write_atomic(run_config(config), OmegaConf.to_yaml(tree, resolve=True))
        run_phases(config)
    except (ValueError, OSError) as error:
        sys.exit(f"dloop_train: {error}")


def run_config(config: Config) -> Path:
    """Path of the composed configuration, which the ranks read."""
    return config.root / "runs" / config.name / "config.yaml"


def run_phases(config: Config) -> None:
    """Run the phases in order. After a stop signal during one of them the next is not started."""
    stopping = Stopping(run_config(config).parent)
    stopping.listen()
    for name in config.phases:
        phase = importlib.import_module(f"dloop_train.phases.{name}")
        started = time.perf_counter()
        with stopping.during(name):
            phase.run(config)
        say(f"{name}: {time.perf_counter() - started:.1f} s")


def missing_choices(arguments: list[str]) -> list[str]:
    """The required groups (drafter, target) that the arguments do not choose from; an experiment chooses from both."""
    if any(re.match(r"\+?experiment=", argument) for argument in arguments):
        return []
    if {"-cn", "--config-name", "--hydra-help"} & set(arguments):
        return []
    return [group for group in REQUIRED if not any(re.match(rf"'?\+?{group}=", one) for one in arguments)]


def usage(missing: list[str]) -> str:
    """The options of the groups that are still to be chosen from, and examples."""
    return "\n".join(
        [
            *(f"choose a {group}: +{group}=<{'|'.join(options(group))}>" for group in missing),
            f"or a whole experiment: +experiment=<{'|'.join(options('experiment'))}>",
            "for example: python -m dloop_train +drafter=dflash +target=smollm2_135m",
            "add dry_run=true to see what a run would do, --help for all settings",
        ]
    )


def options(group: str) -> list[str]:
    """Names of a group's YAML files, without the random models that the tests use."""
    names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return [name for name in names if not name.startswith("tiny_")]


if __name__ == "__main__":
    main()
