"""Agent: runs torchrun on one node, without torchrun's error messages, since ranks write the cause.

python -m dloop_train.agent <ranks> <torchrun's arguments>
"""

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
    # Only the command itself handles SIGUSR1. The ranks inherit that it is ignored.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Silence torchrun's errors about ranks that ended and a first node that ended early: neither is the cause.
    for part in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    wanted, *arguments = sys.argv[1:]
    ranks = ranks_of_node(int(wanted))
    # torchrun would set one thread, with which an offloaded optimiser is very slow.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ.setdefault("PET_NODE_RANK", os.environ.get("SLURM_NODEID", "0"))
    try:
        torchrun.run(torchrun.parse_args([f"--nproc-per-node={ranks}", *arguments]))
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if STOPPED in codes and codes <= {STOPPED, -signal.SIGTERM}:
            # All ranks have saved. On a code other than 0 srun would kill the other nodes while they end by themselves.
            return
        tell_killed(arguments[-1], list(error.failures.values()))
        sys.exit(max(map(abs, codes)))
    except SignalException as error:
        sys.exit(128 + error.sigval)


def tell_killed(phase: str, failures: list[ProcessFailure]) -> None:
    """Write the cause for a rank that was ended by a signal, since it could not write one itself.

    SIGKILL comes from outside, so it replaces a cause that another rank wrote, such as a lost connection. Other signals
    may be a consequence (NCCL aborts if a rank has left), so they do not replace a cause.
    """
    ended = sorted(
        (failure for failure in failures if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM),
        key=lambda failure: failure.exitcode != -signal.SIGKILL,
    )
    if not ended:
        return
    text = (
        f"{phase}: a rank on {socket.gethostname()} was ended by {ended[0].signal_name()}; "
        "the same command resumes from what is on disk"
    )
    if ended[0].exitcode == -signal.SIGKILL:
        write_atomic(Path(os.environ[FAILURE]), f"{text}. Look whether the memory of the machine was used up\n")
    else:
        leave_cause(text)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


if __name__ == "__main__":
    main()
