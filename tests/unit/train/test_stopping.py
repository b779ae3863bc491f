import os
import signal
import threading
import time

import pytest

from engine_core.train.stopping import ONE_STOP, SAVED, Stop, StopSignals, Terminated


def send(number):
    os.kill(os.getpid(), number)  # to this thread: its handler runs before the next line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_leaves_a_window_at_once(number):
    done = []

    def interrupted(signals):
        with signals.window():
            send(number)
            done.append("went on")

    with StopSignals() as signals, pytest.raises(Stop) as caught:
        interrupted(signals)
    assert caught.value.number == number
    assert done == []


def test_outside_of_a_window_a_signal_waits_for_the_next_one():
    done = []
    with StopSignals() as signals:
        send(signal.SIGTERM)
        done.append("came to its end")
        with pytest.raises(Stop), signals.window():
            done.append("never")
    assert done == ["came to its end"]


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_the_second_signal_ends_at_once_wherever_it_comes(number, ending):
    with StopSignals():
        send(signal.SIGTERM)
        time.sleep(ONE_STOP)
        with pytest.raises(ending):
            send(number)


def test_a_stop_that_arrives_twice_is_one_stop():
    with StopSignals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        with pytest.raises(Stop):
            signals.check()


def test_the_handlers_before_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_nothing_is_handled():
    errors = []

    def work():
        try:
            with StopSignals() as signals, signals.window():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.parametrize(
    ("number", "saved", "ending", "code"),
    [
        (signal.SIGTERM, True, SystemExit, SAVED),
        (signal.SIGUSR1, True, SystemExit, SAVED),
        (signal.SIGTERM, False, SystemExit, 143),
        (signal.SIGINT, True, KeyboardInterrupt, None),
    ],
)
def test_the_exit_code_says_whether_the_run_can_be_started_again(number, saved, ending, code):
    end = Stop(number).ending(saved)
    assert type(end) is ending
    assert getattr(end, "code", None) == code
