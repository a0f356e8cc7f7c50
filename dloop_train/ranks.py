"""Ranks: rank and world size, reductions over ranks, printing once, and ending all ranks on a failure."""

import ctypes
import os
import resource
import signal
import sys
import traceback
import warnings
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

STOP = "stop"
"""A training saves and ends when a file of this name is in the run's folder."""
STOPPED = 75
"""Exit code of ranks that saved and stopped on request and are to be started again (EX_TEMPFAIL)."""
FAILURE = "DLOOP_FAILURE"
"""Environment variable: path of the file to which the first failing rank writes the cause."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent dies. Its children do not inherit it."""
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Number of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def accelerators() -> int:
    """Number of accelerators that this process may use.

    DS_ACCELERATOR=cpu keeps a run off the GPUs. DeepSpeed obeys it, so targets and ranks must too.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available():
        return 0
    return torch.accelerator.device_count()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The element-wise sum over all ranks, as a new tensor."""
    values = values.clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def max_over_ranks(count: int) -> int:
    """The largest of all ranks' counts."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return count
    from deepspeed.accelerator import get_accelerator

    most = torch.tensor(count, device=get_accelerator().current_device_name())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def gather_over_ranks(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks, on all of them."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def peak_memory() -> int:
    """Peak memory of this process in bytes: on the accelerator if there is one, otherwise resident memory."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return get_accelerator().max_memory_allocated()


def say(text: str) -> None:
    """Print on the first rank, above a progress bar if there is one."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Make Linux end this process when its parent dies, even of kill -9.

    Otherwise a rank that is left over could write files while the command runs again.
    """
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def initialise_distributed(threads: int) -> None:
    """Create the process group with the accelerator's backend; on a CPU with gloo.

    On a CPU DeepSpeed's shared-memory op, which would be compiled, is disabled. `threads` are the threads of a CPU
    rank; 0 divides the cores among the ranks.
    """
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    else:
        get_accelerator().set_device(local_rank())
        deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)


class OneCause:
    """A context in which an exception ends this rank at once. Only the first of all ranks to fail reports its cause.

    A failed rank does not wait for the others: these block in a collective until the launcher ends them.
    """

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> "OneCause":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not isinstance(error, Exception):  # none, or KeyboardInterrupt or SystemExit
            return
        leave_cause(
            f"{self.what}: {as_text(error)}" + (f"\n(rank {rank()} of {world_size()})" if world_size() > 1 else "")
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def leave_cause(text: str) -> None:
    """Write the cause of a failure to the file that FAILURE names; the command prints it last.

    The file is created exclusively, so that only the first failing rank writes it. Ranks that were started by hand have
    no such file and print the cause.
    """
    try:
        if FAILURE in os.environ:
            with open(os.environ[FAILURE], "x", encoding="utf-8") as file:
                file.write(text + "\n")
            return
    except FileExistsError:
        return
    except OSError:  # the file cannot be written, for example on a full disk: print the cause
        pass
    print(f"dloop_train: {text}", file=sys.stderr)


def as_text(error: Exception) -> str:
    """The text of an error: without a traceback if a user can correct it, otherwise with one."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{error}\nout of memory: lower train.micro_batch_size, train.loss_rows or train.origins, "
            "or choose a higher deepspeed.stage"
        )
    if isinstance(error, ValueError | OSError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
