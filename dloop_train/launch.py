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
"""Seconds that the other ranks have to end by themselves after one has failed."""
PORTS = range(20000, 30000)
"""Ports for the rendezvous, below the range that Linux uses for outgoing connections."""


@dataclass(frozen=True)
class World:
    """How the ranks of a phase are started, and how many there are."""

    launcher: str
    """torchrun | srun | hostfile"""
    nodes: int
    ranks: int
    """Ranks over all nodes. Every Slurm node is assumed to have as many as this one."""


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
    """Whether the ranks of a phase are processes other than this one.

    They are if there are several, or if the launcher is not torchrun, since a single rank may then belong on another
    machine.
    """
    found = world(config)
    return found.ranks > 1 or found.launcher != "torchrun"


def outside_allocation(launch: LaunchConfig) -> bool:
    """Whether this process runs outside the nodes of its Slurm allocation, as in `salloc`'s shell on a login node."""
    return launcher_of(launch) == "srun" and "SLURMD_NODENAME" not in os.environ


def launcher_of(launch: LaunchConfig) -> str:
    """The launcher to use (torchrun, srun or hostfile). Raises ValueError for srun outside an allocation."""
    if launch.launcher != "auto":
        check(
            launch.launcher != "srun" or "SLURM_JOB_ID" in os.environ,
            "launch.launcher=srun works inside a Slurm allocation (sbatch or salloc), and SLURM_JOB_ID is not set; "
            "leave launch.launcher=auto elsewhere",
        )
        return launch.launcher
    if launch.hostfile:
        return "hostfile"
    several = int(os.environ.get("SLURM_NNODES", 1)) > 1
    return "srun" if "SLURM_JOB_ID" in os.environ and (several or "SLURMD_NODENAME" not in os.environ) else "torchrun"


def ranks_of_node(wanted: int) -> int:
    """Ranks on this node: `wanted` if it is not 0, otherwise one per accelerator, or one on a CPU."""
    return wanted or accelerators() or 1


def read_hostfile(path: Path) -> dict[str, int]:
    """Host -> ranks, from a file of DeepSpeed's lines `name slots=n`. Raises ValueError for any other line."""
    check(path.is_file(), f"launch.hostfile: there is no {path}; write a line `name slots=n` for each host")
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [(line, re.fullmatch(r"(\S+)\s+slots=(\d+)", line)) for line in lines if line]
    wrong = [line for line, match in found if match is None]
    check(bool(found) and not wrong, f"{path} must hold lines `name slots=n`, got {wrong or 'none'}")
    return {match[1]: int(match[2]) for _, match in found}


def start_ranks(config: Config, phase: str, *, alone: bool = False) -> None:
    """Run `rank_main` of a phase on every rank, or with `alone` on one rank of an allocation.

    Raises ValueError with the error of the first rank that failed.
    """
    run = (config.root / "runs" / config.name).absolute()
    failure = run / "failure.txt"
    failure.unlink(missing_ok=True)
    environment = os.environ | {FAILURE: str(failure)}
    if launcher_of(config.launch) == "hostfile":
        environment["DS_ENV_FILE"] = str(write_environment(run / "environment", environment))
    if accelerators():
        # torch keeps memory that earlier phases of this process have freed; the ranks need it.
        torch.accelerator.empty_cache()
    RANKS.process = subprocess.Popen(
        command(config, [str(run / "config.yaml"), phase], alone=alone), env=environment, preexec_fn=die_with_parent
    )
    code = wait(RANKS.process, failure)
    RANKS.process = None
    # List the folder instead of testing for the file: NFS caches that a file did not exist.
    if failure.name in os.listdir(run):
        error = failure.read_text(encoding="utf-8").rstrip("\n")
        failure.unlink()
        raise ValueError(error)
    check(
        code in (0, STOPPED),
        f"{phase}: the ranks ended with exit code {code}; see the output above. "
        f"The same command resumes from what is on disk",
    )


@dataclass
class Ranks:
    """The launcher process of the ranks that run now, if any. Signal handlers end it through this object."""

    process: subprocess.Popen | None = None

    def end(self) -> None:
        """End the ranks at once. They write temporary files and rename them, so no file is left half written."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()


RANKS = Ranks()


def wait(process: subprocess.Popen, failure: Path) -> int:
    """Wait for the launcher and return its exit code.

    If a rank has failed, the others are ended after PATIENCE seconds, since they may wait for it in a collective.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(5)
        if failure.name in os.listdir(failure.parent):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(PATIENCE)
            RANKS.end()


def command(config: Config, arguments: list[str], *, alone: bool = False) -> list[str]:
    """The command line that starts `worker` with these arguments on all ranks, or with `alone` on one rank."""
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
    """The command line of srun for one task on each of `nodes` nodes, with all cores and accelerators of the node.

    A task that fails ends the others.
    """
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
    # With --exclusive a job has all GPUs of its nodes, but its steps get them only if they request them.
    if "SLURM_GPUS_ON_NODE" in os.environ and "SLURM_GPUS" not in os.environ:
        found.append(f"--gpus-per-node={os.environ['SLURM_GPUS_ON_NODE']}")
    return found


def first_host() -> str:
    """The host of the rendezvous: the first node of the allocation, to which srun gives SLURM_NODEID 0."""
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[0]


def free_port(seed: int) -> int:
    """A free port of PORTS, the same for the same seed unless another process uses it."""
    for offset in range(len(PORTS)):
        port = PORTS[(seed + offset) % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise ValueError(f"no port of {PORTS[0]} to {PORTS[-1]} is free on {socket.gethostname()}")


def hostfile_command(path: Path, arguments: list[str]) -> list[str]:
    """The command line of DeepSpeed's launcher. It uses pdsh and ssh unless this machine is the only host."""
    hosts = list(read_hostfile(path))
    here = hosts in (["localhost"], [socket.gethostname()])
    check(
        here or shutil.which("pdsh") is not None,
        f"{path} names {', '.join(hosts)}, and DeepSpeed reaches other hosts with pdsh, which is not installed; "
        "install it, with ssh keys between the hosts",
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
    """Write the variables that DeepSpeed's launcher sets on the hosts, besides NCCL's and Python's.

    Names that end with TOKEN or KEY are left out, because the launcher puts the values in a command line.
    """
    passed = ("DLOOP_", "HF_", "OMP_", "WANDB_", "TRITON_", "TORCH_", "TOKENIZERS_", "GLOO_", "DS_ACCELERATOR")
    names = [name for name in sorted(environment) if name.startswith(passed) and not name.endswith(("TOKEN", "KEY"))]
    write_atomic(path, "".join(f"{name}={environment[name]}\n" for name in names))
    return path
