"""One rank of a phase, started by torchrun: python -m dloop_train.worker run/config.yaml train."""

import importlib
import sys
import traceback
from dataclasses import dataclass

from omegaconf import OmegaConf

from dloop_train.config import from_hydra
from dloop_train.launch import leave_error
from dloop_train.ranks import die_with_parent


def main() -> None:
    die_with_parent()
    path, phase = sys.argv[1:]
    with Told(phase):
        importlib.import_module(f"dloop_train.phases.{phase}").rank_main(from_hydra(OmegaConf.load(path)))


@dataclass(frozen=True)
class Told:
    """Ends this rank with an error that left the block, after leaving it where it is told once: one line where a user can cause it, else the traceback."""

    phase: str

    def __enter__(self):
        return self

    def __exit__(self, kind, error, where) -> None:
        if kind is None or not issubclass(kind, Exception):
            return
        expected = issubclass(kind, (ValueError, OSError))
        leave_error(f"{self.phase}: " + (str(error) if expected else "".join(traceback.format_exception(kind, error, where)).rstrip()))
        sys.exit(1)


if __name__ == "__main__":
    main()
