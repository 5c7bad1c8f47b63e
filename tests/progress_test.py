import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable

import pytest

from finetune import progress
from finetune.progress import Progress


@pytest.fixture
def terminal(monkeypatch):
    """A function that makes stderr a terminal and returns one that reads what was drawn on it."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)

    def read() -> str:
        sys.stderr.flush()
        parts = []
        while True:
            try:
                parts.append(os.read(ours, 65536))
            except BlockingIOError:
                return b"".join(parts).decode()

    with os.fdopen(theirs, "w") as file:

        def make(rows: int = 24, columns: int = 80) -> Callable[[], str]:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
            monkeypatch.setattr(sys, "stderr", file)
            return read

        yield make
    os.close(ours)


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger="absl")
    return lambda: [record.getMessage() for record in caplog.records]


# (0, 0) is what a terminal says that does not know its size.
@pytest.mark.parametrize("size", [(24, 100), (0, 0)])
def test_a_terminal_shows_a_bar_with_step_loss_rate_and_time_left(size, terminal, lines):
    read = terminal(*size)
    with Progress(200, initial=100) as shown:
        shown.update(150, loss=0.12345)
    drawn = read()
    assert "100/200" in drawn
    assert "150/200" in drawn
    assert "loss=0.1235" in drawn
    assert "step/s" in drawn
    assert "<" in drawn  # Elapsed < left.
    assert lines() == []


def test_text_beside_the_bar_goes_to_stdout(terminal, capsys):
    read = terminal()
    with Progress(10) as shown:
        shown.write("step 5: f1 0.5")
    assert capsys.readouterr().out == "step 5: f1 0.5\n"
    drawn = read()
    assert "0/10" in drawn
    assert "f1" not in drawn


def test_elsewhere_nothing_is_drawn_but_the_last_step_is_a_plain_line(capsys, lines):
    with Progress(40, initial=20) as shown:
        shown.update(30, loss=0.5)
        shown.update(40, loss=0.25)
    (line,) = lines()
    assert line.startswith("step 40/40  loss 0.25  ")
    assert line.endswith(" steps/s  00:00 left")
    assert "\r" not in capsys.readouterr().err


def test_elsewhere_there_is_a_line_every_ten_seconds(monkeypatch, lines):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with Progress(40) as shown:
        for step in (10, 20, 30):
            shown.update(step, loss=1.0)
    assert [line.partition("  ")[0] for line in lines()] == [
        "step 10/40",
        "step 20/40",
        "step 30/40",
    ]


def test_text_goes_to_stdout_without_a_terminal_too(capsys):
    with Progress(10) as shown:
        shown.write("step 5: f1 0.5")
    assert capsys.readouterr().out == "step 5: f1 0.5\n"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_shown_false_shows_nothing_at_all(on_terminal, terminal, capsys, lines):
    read = terminal() if on_terminal else lambda: ""
    with Progress(10, shown=False) as shown:
        shown.update(10, loss=0.5)
        shown.write("step 5: f1 0.5")
    assert read() == ""
    assert capsys.readouterr() == ("", "")
    assert lines() == []


def test_the_bar_is_closed_after_an_error(terminal):
    read = terminal()
    with pytest.raises(ZeroDivisionError), Progress(10) as shown:
        shown.update(1 // 0, loss=0.5)
    assert read().endswith("\r\n")
