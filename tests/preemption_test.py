import os
import signal
import threading

import pytest

from finetune.preemption import EXIT_PREEMPTED, Preempted, sigterm_noted


@pytest.fixture
def received():
    """SIGTERMs that reach the handler which was there before."""
    numbers = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, previous)


def test_sigterm_is_noted_and_not_passed_on(received):
    with sigterm_noted() as preempted:
        assert not preempted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preempted()
        assert preempted()
    assert received == []


def test_the_old_handler_is_back_afterwards(received):
    with sigterm_noted():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_the_old_handler_is_back_after_an_error(received):
    with pytest.raises(KeyError), sigterm_noted():
        raise KeyError
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_a_sigterm_of_which_nobody_asked_reaches_the_old_handler(received):
    with sigterm_noted() as preempted:
        assert not preempted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == []
    assert received == [signal.SIGTERM]


def test_outside_of_the_main_thread_the_answer_is_no_and_no_handler_is_set(received):
    answers = []

    def ask():
        with sigterm_noted() as preempted:
            os.kill(os.getpid(), signal.SIGTERM)
            answers.append(preempted())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [False]
    assert received == [signal.SIGTERM]


def test_preempted_exits_with_42_and_says_how_to_go_on():
    error = Preempted(120, "runs/a")
    assert error.code == EXIT_PREEMPTED == 42
    assert str(error) == "SIGTERM: step 120 is saved in runs/a; start again to go on."
