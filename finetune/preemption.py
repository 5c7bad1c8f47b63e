"""SIGTERM becomes a question the training loop asks between two compiled loops."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

EXIT_PREEMPTED = 42
"""The exit status of a run that saved its state on SIGTERM and wants to be started again."""


class Preempted(SystemExit):
    """Raised after a run saved its state on SIGTERM; uncaught, the process exits with 42."""

    def __init__(self, global_step: int, model_dir: str):
        super().__init__(EXIT_PREEMPTED)
        self.global_step = global_step
        self.model_dir = model_dir

    def __str__(self) -> str:
        return (
            f"SIGTERM: step {self.global_step} is saved in {self.model_dir}; start again to go on."
        )


@contextlib.contextmanager
def sigterm_noted() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether SIGTERM has arrived; the old handler returns after.

    A SIGTERM of which nobody asked any more is sent again to the old handler at the end. Outside
    of the main thread, where Python allows no handlers, the answer is always False.

    Example:
      >>> with sigterm_noted() as preempted:
      ...     before = preempted()
      ...     signal.raise_signal(signal.SIGTERM)
      ...     print(before, preempted())
      False True
    """
    arrived, told = threading.Event(), threading.Event()

    def preempted() -> bool:
        if arrived.is_set():
            told.set()
        return arrived.is_set()

    if threading.current_thread() is not threading.main_thread():
        yield preempted
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: arrived.set())
    try:
        yield preempted
    finally:
        signal.signal(signal.SIGTERM, previous)
        if arrived.is_set() and not told.is_set():
            signal.raise_signal(signal.SIGTERM)
