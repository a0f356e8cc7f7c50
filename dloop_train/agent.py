"""Agent: one node's torchrun, which ends quietly because its ranks have said why: python -m dloop_train.agent <ranks> <torchrun's arguments>."""

import logging
import os
import signal
import socket
import sys
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dloop_train.launch import ranks_of_node
from dloop_train.ranks import FAILURE, STOPPED, die_with_parent, leave_cause
from dloop_train.runs import write_atomic


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the controller's business; the ranks inherit it
    for part in (
        "multiprocessing.api",
        "agent.server.api",
    ):  # torchrun's errors: ranks that ended, whatever the reason, and a first node that left before the others
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    wanted, *arguments = sys.argv[1:]
    ranks = ranks_of_node(int(wanted))
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, cores() // ranks))
    )  # torchrun would say 1, and an offloaded optimiser would crawl
    os.environ.setdefault("PET_NODE_RANK", os.environ.get("SLURM_NODEID", "0"))
    try:
        torchrun.run(torchrun.parse_args([f"--nproc-per-node={ranks}", *arguments]))
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if STOPPED in codes and codes <= {STOPPED, -signal.SIGTERM}:
            return  # all ranks have saved; a code other than 0 would have srun end other nodes that are on their way out
        tell_killed(arguments[-1], list(error.failures.values()))
        sys.exit(max(map(abs, codes)))
    except SignalException as error:
        sys.exit(128 + error.sigval)


def tell_killed(phase: str, failures: list[ProcessFailure]) -> None:
    """A rank that a signal ended cannot say so.

    SIGKILL comes from outside, and what the others then said of their connections is not the cause. Other signals may be an effect
    (NCCL aborts where a rank has left), so a cause that stands there already stays.
    """
    ended = sorted(
        (failure for failure in failures if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM),
        key=lambda failure: failure.exitcode != -signal.SIGKILL,
    )
    if not ended:
        return
    text = f"{phase}: a rank on {socket.gethostname()} was ended by {ended[0].signal_name()}; the same command goes on from what is on disk"
    if ended[0].exitcode == -signal.SIGKILL:
        write_atomic(Path(os.environ[FAILURE]), f"{text}. Look whether the memory of the machine was used up\n")
    else:
        leave_cause(text)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


if __name__ == "__main__":
    main()
