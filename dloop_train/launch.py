"""Launch: start the ranks of a phase and wait for them."""

import subprocess
import sys

import torch

from dloop_train.config import Config, check
from dloop_train.ranks import die_with_parent


def processes(config: Config) -> int:
    """Ranks on this machine."""
    return config.launch.processes or max(1, torch.cuda.device_count())


def start_ranks(config: Config, phase: str) -> None:
    """Run `rank_main` of a phase on every rank. ValueError where a rank fails; its own error has been printed by then."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes(config)}",
               "-m", "dloop_train.worker", str(config.root / "runs" / config.name / "config.yaml"), phase]
    result = subprocess.run(command, check=False, preexec_fn=die_with_parent)
    check(result.returncode == 0, f"{phase}: a rank failed with exit code {result.returncode}; its error stands above. "
          f"The same command goes on from what is on disk")
