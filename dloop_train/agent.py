"""Agent: one node's torchrun, which ends quietly because its ranks have said why: python -m dloop_train.agent <ranks> <torchrun's arguments>."""

import os
import signal
import socket
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from dloop_train.launch import leave_error, ranks_of_node
from dloop_train.ranks import die_with_parent


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the controller's business; the ranks inherit it
    wanted, *arguments = sys.argv[1:]
    ranks = ranks_of_node(int(wanted))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))  # torchrun would say 1, and an offloaded optimiser would crawl
    os.environ.setdefault("PET_NODE_RANK", os.environ.get("SLURM_NODEID", "0"))
    try:
        torchrun.run(torchrun.parse_args([f"--nproc-per-node={ranks}", *arguments]))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode < 0:  # no rank can tell that it was killed
            leave_error(f"{arguments[-1]}: a rank on {socket.gethostname()} was ended by signal {-first.exitcode} ({first.signal_name()}); "
                        f"SIGKILL often means that the node's memory is used up. The same command goes on from what is on disk")
        sys.exit(abs(first.exitcode))
    except SignalException as error:
        sys.exit(128 + error.sigval)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


if __name__ == "__main__":
    main()
