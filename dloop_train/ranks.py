"""Ranks: who am I, how many are we, sums over all, printing once, and ending together."""

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
"""A file of this name in the run's folder asks for a checkpoint and a clean end."""
STOPPED = 75
"""Exit code of ranks that were asked to stop, have saved and want to be started again (EX_TEMPFAIL)."""
FAILURE = "DLOOP_FAILURE"
"""Environment variable: the file in which the first rank to fail leaves its cause."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent dies. A grandchild does not inherit the wish."""
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Number of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def accelerators() -> int:
    """How many this process may use. DeepSpeed goes by DS_ACCELERATOR, so that targets and ranks must too: `cpu` keeps a run off the GPUs."""
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
    """Most bytes this process has held: of the accelerator's memory where there is one, else of resident memory."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return get_accelerator().max_memory_allocated()


def say(text: str) -> None:
    """Print on the first rank, above a progress bar if there is one."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Have Linux end this process with its parent, even after kill -9, so that no rank writes on beside the rerun."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def initialise_distributed(threads: int) -> None:
    """Process group over the accelerator's backend; gloo on a CPU, without DeepSpeed's compiled shared-memory op."""
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
    """A block whose failure ends this rank at once. The first of all ranks to fail says why; those that fail because of it say nothing.

    A rank that has failed waits for nobody: the others hang in a collective that it has left, until whoever started them ends them.
    """

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> "OneCause":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not isinstance(error, Exception):  # none, or somebody wants this process to end
            return
        leave_cause(
            f"{self.what}: {as_text(error)}" + (f"\n(rank {rank()} of {world_size()})" if world_size() > 1 else "")
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def leave_cause(text: str) -> None:
    """In the file that the command named and only one rank can create; the command shows it last. A rank that was started by hand prints its own."""
    try:
        if FAILURE in os.environ:
            with open(os.environ[FAILURE], "x", encoding="utf-8") as file:
                file.write(text + "\n")
            return
    except FileExistsError:
        return
    except OSError:  # a full disk is a cause like any other
        pass
    print(f"dloop_train: {text}", file=sys.stderr)


def as_text(error: Exception) -> str:
    """What a user can mend in a sentence, all else with its traceback."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"{error}\nout of memory: lower train.micro_batch_size, train.loss_rows or train.origins, or choose a higher deepspeed.stage"
    if isinstance(error, ValueError | OSError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
