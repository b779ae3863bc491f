"""A supervised child: what it says, what it prints, how it ends, and that nothing is left of it."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from engine_plugin_processes.child import (
    KEPT_LINES,
    SOCKET,
    ChildProcess,
    print_stacks_on_request,
    python_command,
)
from engine_plugin_processes.json_channel import JsonChannel

SECONDS = 60.0
SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
FAMILY = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('up', flush=True); time.sleep(600)",
]


def echo(number):
    """Answer each message with its double, in a child; some do harm instead."""
    print_stacks_on_request()
    channel = JsonChannel(socket.socket(fileno=number))
    while True:
        match channel.receive():
            case "nonsense":
                channel.socket.sendall(b"\xff" * 64)
            case "hang":
                hang_here(channel)
            case "spawn":
                os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
                os._exit(3)
            case message:
                print("got", message, flush=True)
                channel.send(message * 2)


def hang_here(channel):
    channel.send("hangs")
    time.sleep(600)


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def members(group):
    """Processes of a session that live."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


@pytest.fixture
def start():
    """``start(command, ...)``: children that are killed after the test, with nothing left of them."""
    made = []

    def make(command, *args, **keys):
        made.append(ChildProcess(command, *args, **keys))
        return made[-1]

    yield make
    for child in made:
        child.kill()
        child.kill()
        until(lambda group=child.popen.pid: not members(group))


@pytest.fixture
def echoing(start, monkeypatch):
    """A child that runs ``echo``, and its messages."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    messages = queue.Queue()
    child = start(python_command("test_child:echo"), JsonChannel, take=messages.put)
    return child, lambda: messages.get(timeout=SECONDS)


def test_messages_go_both_ways_and_what_it_prints_is_no_message(echoing):
    child, receive = echoing
    for message in (3, "ab", [1]):
        child.send(message)
        assert receive() == message * 2
    until(lambda: child.tail(2) == "got ab\ngot [1]")
    with pytest.raises(TypeError):
        child.send(1j)
    child.send("x" * 10_000_000)  # more than any buffer holds
    assert len(receive()) == 20_000_000


def test_its_end_is_told_after_all_messages_with_how_and_what_it_printed_last(echoing):
    child, receive = echoing
    child.send(3)
    child.send("spawn")
    assert [receive(), receive()] == [6, None]  # also where a process that it has started lives on
    assert child.ending() == "exited with status 3"
    assert child.report() == "it exited with status 3. The last that it printed:\ngot 3"
    assert child.report("it is late").startswith("it is late. The last")


def test_a_killed_child_and_one_that_breaks_the_protocol_are_told_apart(echoing, start):
    child, receive = echoing
    child.send("nonsense")
    assert receive() is None
    assert child.ending().startswith("sent something else than an answer: ")
    other = start(SLEEPS)
    os.kill(other.popen.pid, signal.SIGTERM)
    assert other.ended(SECONDS)
    assert other.ending() == "was killed by SIGTERM"


def test_a_stopped_child_holds_up_nobody_who_sends(echoing):
    child, receive = echoing
    child.send(1)
    assert receive() == 2
    os.kill(child.popen.pid, signal.SIGSTOP)
    child.send("x" * 10_000_000)  # returns at once
    assert not child.ended(0.1)
    child.kill()
    assert receive() is None


def test_the_stacks_of_a_hanging_child_are_printed(echoing):
    child, receive = echoing
    child.send("hang")
    assert receive() == "hangs"
    child.dump_stacks()
    until(lambda: "in hang_here" in child.tail())


def test_lines_are_given_as_they_come_and_a_bounded_number_is_kept(start):
    lines = []
    code = f"print('x' * 100_000, flush=True); [print(i) for i in range({2 * KEPT_LINES})]"
    child = start([sys.executable, "-c", code], on_line=lines.append)
    assert child.ended(SECONDS)
    until(lambda: len(lines) >= 2 * KEPT_LINES)
    assert max(map(len, lines)) < 10_000
    assert child.tail(2) == f"{2 * KEPT_LINES - 2}\n{2 * KEPT_LINES - 1}"
    assert len(child.tail(10**6).splitlines()) == KEPT_LINES


def test_killing_it_ends_what_it_has_started(start):
    child = start(FAMILY, keeper=True)
    until(
        lambda: child.tail() == "up" and len(members(child.popen.pid)) == 3
    )  # it, its keeper, what it started
    child.kill()
    until(lambda: not members(child.popen.pid))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_keeper_ends_it_and_what_it_started_when_its_owner_is_killed(stopped):
    code = (
        "import time\nfrom engine_plugin_processes.child import ChildProcess\n"
        f"child = ChildProcess({FAMILY!r}, keeper=True)\nprint(child.popen.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        group = int(owner.stdout.readline())
        until(lambda: len(members(group)) == 3)
        if stopped:
            os.kill(group, signal.SIGSTOP)
        owner.kill()
    until(lambda: not members(group))


def held():
    """Threads and descriptors of this process."""
    return set(threading.enumerate()), set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("keeper", [False, True])
def test_a_program_that_is_absent_is_an_error_at_once_and_leaves_nothing_open(start, keeper, tmp_path):
    threads, descriptors = held()
    with pytest.raises(FileNotFoundError, match="nobody"):
        start([str(tmp_path / "nobody"), SOCKET], JsonChannel, keeper=keeper)
    assert held()[0] <= threads
    assert held()[1] <= descriptors


def test_a_child_leaves_no_descriptor_and_no_thread(start):
    threads, descriptors = held()
    child = start([*SLEEPS, SOCKET], JsonChannel, take=lambda message: None, keeper=True)
    assert len(held()[0] - threads) == 3
    assert len(held()[1] - descriptors) >= 3  # its socket, the keeper's, what it prints
    child.kill()
    assert held()[0] <= threads
    assert held()[1] <= descriptors
