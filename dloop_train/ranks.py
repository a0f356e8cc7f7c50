"""Ranks: who am I, how many are we, sums over all, printing once, and ending with the command."""

import ctypes
import os
import resource
import signal
import sys
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent dies. A grandchild does not inherit the wish."""
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The element-wise sum over all ranks, as a new tensor."""
    values = values.clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def most_over_ranks(count: int) -> int:
    """The largest of all ranks' counts."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return count
    most = torch.tensor(count, device=torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu")
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


def peak_memory() -> float:
    """Most memory this process has held, in GB: the accelerator's where there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def say(text: str) -> None:
    """Print on the first rank, above a progress bar if there is one."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Have Linux end this process with its parent, even after kill -9, so that no rank writes on beside the rerun."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
