"""Stopping: the signal handlers. SIGUSR1 saves and stops before a time limit, SIGTERM ends at once."""

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
"""Phases whose ranks look for the file STOP in the run folder in every step.

The others continue from the last batch, shard or response on disk, so they may end at any moment.
"""


@dataclass
class Stopping:
    """The handlers of the signals that end a command.

    SIGUSR1 stops it with exit code STOPPED, so that the same command can continue later. SIGTERM ends it.
    """

    folder: Path
    """The run's folder."""
    phase: str = ""
    asked: bool = False

    def listen(self) -> None:
        (self.folder / STOP).unlink(missing_ok=True)  # left over from an earlier stop
        signal.signal(signal.SIGUSR1, self.on_stop)
        signal.signal(signal.SIGTERM, self.on_end)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The context of a phase. If a stop was requested in it, the command ends after the phase."""
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
        say(f"dloop_train: {self.phase}: ended by signal {number}; the same command resumes from what is on disk")
        os._exit(128 + number)

    def leave(self) -> None:
        """Exit with STOPPED at once, without waiting for threads of the phase.

        A file that is not yet renamed to its final name does not count as written.
        """
        (self.folder / STOP).unlink(missing_ok=True)
        say(f"dloop_train: {self.phase}: stopped as asked; the same command resumes from what is on disk")
        sys.stdout.flush()
        os._exit(STOPPED)
