"""Launch: start the ranks of a phase, on this machine or on many, and wait for them."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from dloop_train.config import Config, LaunchConfig, check
from dloop_train.ranks import FAILURE, STOPPED, accelerators, die_with_parent
from dloop_train.runs import write_atomic

PATIENCE = 10
"""Seconds in which the other ranks may end by themselves when one has failed."""
PORTS = range(20000, 30000)
"""Below what Linux hands out to outgoing connections."""


@dataclass(frozen=True)
class World:
    """Who runs a phase of several ranks."""

    launcher: str
    """torchrun | srun | hostfile"""
    nodes: int
    ranks: int
    """Over all nodes; those of another Slurm node are taken to be as many as here."""


def world(config: Config) -> World:
    launcher = launcher_of(config.launch)
    if launcher == "hostfile":
        slots = read_hostfile(Path(config.launch.hostfile))
        return World(launcher, len(slots), sum(slots.values()))
    nodes = int(os.environ["SLURM_NNODES"]) if launcher == "srun" else 1
    return World(launcher, nodes, nodes * ranks_of_node(config.launch.processes))


def processes(config: Config) -> int:
    """Ranks of a phase, over all nodes."""
    return world(config).ranks


def in_separate_ranks(config: Config) -> bool:
    """Whether the ranks of a phase are other processes than this one: there are several, or the one may belong elsewhere."""
    found = world(config)
    return found.ranks > 1 or found.launcher != "torchrun"


def outside_allocation(launch: LaunchConfig) -> bool:
    """Whether this process stands outside the allocation where the work belongs: in the shell of `salloc`, on a login node."""
    return launcher_of(launch) == "srun" and "SLURMD_NODENAME" not in os.environ


def launcher_of(launch: LaunchConfig) -> str:
    """A hostfile's nodes, the nodes of a Slurm allocation, or this machine alone."""
    if launch.launcher != "auto":
        check(
            launch.launcher != "srun" or "SLURM_JOB_ID" in os.environ,
            "launch.launcher=srun works inside a Slurm allocation (sbatch or salloc), and SLURM_JOB_ID is not set; leave launch.launcher=auto elsewhere",
        )
        return launch.launcher
    if launch.hostfile:
        return "hostfile"
    several = int(os.environ.get("SLURM_NNODES", 1)) > 1
    return "srun" if "SLURM_JOB_ID" in os.environ and (several or "SLURMD_NODENAME" not in os.environ) else "torchrun"


def ranks_of_node(wanted: int) -> int:
    """Ranks of the node that this is called on: one for each accelerator it may use, one on a CPU."""
    return wanted or accelerators() or 1


def read_hostfile(path: Path) -> dict[str, int]:
    """Host -> ranks, of a file with DeepSpeed's lines: `name slots=n`."""
    check(path.is_file(), f"launch.hostfile: there is no {path}; write a line `name slots=n` for each host")
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [(line, re.fullmatch(r"(\S+)\s+slots=(\d+)", line)) for line in lines if line]
    wrong = [line for line, match in found if match is None]
    check(bool(found) and not wrong, f"{path} must hold lines `name slots=n`, got {wrong or 'none'}")
    return {match[1]: int(match[2]) for _, match in found}


def start_ranks(config: Config, phase: str, *, alone: bool = False) -> None:
    """Run `rank_main` of a phase on every rank, or `alone` on one of an allocation. ValueError with the first failed rank's own error."""
    run = (config.root / "runs" / config.name).absolute()
    failure = run / "failure.txt"
    failure.unlink(missing_ok=True)
    environment = os.environ | {FAILURE: str(failure)}
    if launcher_of(config.launch) == "hostfile":
        environment["DS_ENV_FILE"] = str(write_environment(run / "environment", environment))
    if accelerators():
        torch.accelerator.empty_cache()  # what earlier phases held in this process, torch would keep beside the ranks
    RANKS.process = subprocess.Popen(
        command(config, [str(run / "config.yaml"), phase], alone=alone), env=environment, preexec_fn=die_with_parent
    )
    code = wait(RANKS.process, failure)
    RANKS.process = None
    if failure.name in os.listdir(run):  # asked of the folder: NFS remembers that a file was not there
        error = failure.read_text(encoding="utf-8").rstrip("\n")
        failure.unlink()
        raise ValueError(error)
    check(
        code in (0, STOPPED),
        f"{phase}: the ranks ended with exit code {code}; what was printed above says more. "
        f"The same command goes on from what is on disk",
    )


@dataclass
class Ranks:
    """The ranks that run now, as far as this process knows: whoever starts them for it."""

    process: subprocess.Popen | None = None

    def end(self) -> None:
        """Have them end at once; they write beside and rename, so nothing is left half written."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()


RANKS = Ranks()


def wait(process: subprocess.Popen, failure: Path) -> int:
    """The exit code. A node whose ranks wait for one that failed elsewhere is not waited for."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(5)
        if failure.name in os.listdir(failure.parent):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(PATIENCE)
            RANKS.end()


def command(config: Config, arguments: list[str], *, alone: bool = False) -> list[str]:
    """What starts `worker` with these arguments on all ranks, or on one of an allocation."""
    launcher = launcher_of(config.launch)
    if launcher == "hostfile":
        return hostfile_command(Path(config.launch.hostfile), arguments)
    node = [sys.executable, "-m", "dloop_train.agent", str(1 if alone else config.launch.processes)]
    worker = ["-m", "dloop_train.worker", *arguments]
    if launcher == "torchrun":
        return [*node, "--standalone", *worker]
    if alone:
        return [*srun_command(1), *node, "--standalone", *worker]
    first = first_host()
    rendezvous = [
        f"--nnodes={os.environ['SLURM_NNODES']}",
        f"--master-addr={first}",
        f"--master-port={free_port(int(os.environ['SLURM_JOB_ID']))}",
    ]
    return [*srun_command(int(os.environ["SLURM_NNODES"])), *node, *rendezvous, *worker]


def srun_command(nodes: int) -> list[str]:
    """One task on each of so many nodes of the allocation, with all of the node's cores and accelerators; one that fails ends the others."""
    found = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        "--overlap",
        "--export=ALL",
    ]
    # A job that has its GPUs because it has the whole node (--exclusive) does not hand them to its steps unless they ask.
    if "SLURM_GPUS_ON_NODE" in os.environ and "SLURM_GPUS" not in os.environ:
        found.append(f"--gpus-per-node={os.environ['SLURM_GPUS_ON_NODE']}")
    return found


def first_host() -> str:
    """Where the ranks meet: the allocation's first node, which srun gives SLURM_NODEID 0."""
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[0]


def free_port(seed: int) -> int:
    """The same for the same job as long as nobody else listens there."""
    for offset in range(len(PORTS)):
        port = PORTS[(seed + offset) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise ValueError(f"no port of {PORTS[0]} to {PORTS[-1]} is free on {socket.gethostname()}")


def hostfile_command(path: Path, arguments: list[str]) -> list[str]:
    """DeepSpeed's launcher: over pdsh and ssh where there are several hosts, without either on this one alone."""
    hosts = list(read_hostfile(path))
    here = hosts in (["localhost"], [socket.gethostname()])
    check(
        here or shutil.which("pdsh") is not None,
        f"{path} names {', '.join(hosts)}, and DeepSpeed reaches other hosts with pdsh, which is not installed; install it, with ssh keys between the hosts",
    )
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        f"--hostfile={path}",
        f"--master_port={free_port(os.getuid())}",
        *(["--master_addr=127.0.0.1", "--no_ssh_check"] if here else ["--force_multi"]),
        "--log_level=warning",
        "--no_local_rank",
        "--module",
        "dloop_train.worker",
        *arguments,
    ]


def write_environment(path: Path, environment: dict[str, str]) -> Path:
    """What DeepSpeed's launcher is to set on the hosts, besides NCCL's and Python's variables. No secrets: they would stand in a command line."""
    passed = ("DLOOP_", "HF_", "OMP_", "WANDB_", "TRITON_", "TORCH_", "TOKENIZERS_", "GLOO_", "DS_ACCELERATOR")
    names = [name for name in sorted(environment) if name.startswith(passed) and not name.endswith(("TOKEN", "KEY"))]
    write_atomic(path, "".join(f"{name}={environment[name]}\n" for name in names))
    return path
