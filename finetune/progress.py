"""What one sees while a run goes on: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType

import tqdm
from absl import logging

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows step, loss, steps per second and time left; use it as a context manager.

    On a terminal a bar is drawn on stderr, elsewhere a line is logged every ten seconds and at the
    end, so that a log file stays readable.

    Args:
      total: the step at which the run ends.
      initial: the step at which it begins.
      shown: False shows nothing.
    """

    def __init__(self, total: int, initial: int = 0, shown: bool = True):
        self._total = total
        self._step = initial
        self._shown = shown
        self._bar: tqdm.tqdm | None = None
        self._started = (time.monotonic(), initial)
        self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            # A terminal that does not know its size says 0, where tqdm would draw nothing.
            known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            self._bar = tqdm.tqdm(
                total=self._total,
                initial=self._step,
                unit="step",
                desc="train",
                ncols=None if known else 80,
                nrows=None if known else 24,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, step: int, loss: float) -> None:
        """Shows that the run is at `step` with a mean `loss` since the last call."""
        taken, self._step = step - self._step, step
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
            self._bar.update(taken)
        elif self._shown:
            now = time.monotonic()
            if now - self._last_line >= _SECONDS_BETWEEN_LINES or step >= self._total:
                self._last_line = now
                logging.info("%s", self._line(loss, now))

    def write(self, text: str) -> None:
        """Prints `text` on stdout without tearing the bar, if anything is shown at all."""
        if not self._shown:
            return
        with tqdm.tqdm.external_write_mode() if self._bar else contextlib.nullcontext():
            print(text, flush=True)

    def _line(self, loss: float, now: float) -> str:
        seconds = now - self._started[0]
        rate = (self._step - self._started[1]) / seconds if seconds > 0 else 0.0
        left = (self._total - self._step) / rate if rate else 0.0
        return (
            f"step {self._step}/{self._total}  loss {loss:.4g}  {rate:.3g} steps/s  "
            f"{tqdm.tqdm.format_interval(left)} left"
        )
