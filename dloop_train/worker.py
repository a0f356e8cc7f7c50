"""One rank of a phase, started by torchrun: python -m dloop_train.worker run/config.yaml train."""

import importlib
import sys

from omegaconf import OmegaConf

from dloop_train.config import from_hydra
from dloop_train.ranks import OneCause, die_with_parent


def main() -> None:
    die_with_parent()
    path, phase = sys.argv[1:]
    with OneCause(phase):
        importlib.import_module(f"dloop_train.phases.{phase}").rank_main(from_hydra(OmegaConf.load(path)))


if __name__ == "__main__":
    main()
