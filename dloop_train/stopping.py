"""Stopping: what signals do to the command - save and stop where the time limit is near, end at once where it is over."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dloop_train.launch import RANKS
from dloop_train.ranks import STOP, STOPPED, say
from dloop_train.runs import write_atomic

SAVING = ("train",)
"""Phases whose ranks look for the file STOP in the run folder, in every step. The others go on from the last batch, shard or response on disk, so they may end at any moment."""


@dataclass
class Stopping:
    """SIGUSR1: stop so that the same command goes on later; the exit code is STOPPED then. SIGTERM: end."""

    folder: Path
    """Of the run."""
    phase: str = ""
    asked: bool = False

    def listen(self) -> None:
        (self.folder / STOP).unlink(missing_ok=True)  # of a run that was stopped before
        signal.signal(signal.SIGUSR1, self.on_stop)
        signal.signal(signal.SIGTERM, self.on_end)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase, after which a command that was asked to stop ends."""
        self.phase = phase
        yield
        if self.asked:
            self.leave()

    def on_stop(self, number: int, frame) -> None:
        self.asked = True
        if self.phase in SAVING and RANKS.process is not None:
            say(f"{self.phase}: asked to stop; saving after this step")
            write_atomic(self.folder / STOP, f"{self.phase}\n")
        else:
            RANKS.end()
            self.leave()

    def on_end(self, number: int, frame) -> None:
        RANKS.end()
        say(f"dloop_train: {self.phase}: ended by signal {number}; the same command goes on from what is on disk")
        os._exit(128 + number)

    def leave(self) -> None:
        """At once: nobody waits for threads of the phase, and what it has not yet renamed is not there."""
        (self.folder / STOP).unlink(missing_ok=True)
        say(f"dloop_train: {self.phase}: stopped as asked; the same command goes on from what is on disk")
        sys.stdout.flush()
        os._exit(STOPPED)
