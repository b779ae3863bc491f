"""A worker in a thread: a command without a waiting caller is interrupted, and the next one is answered."""

import queue
import threading
import time

import pytest

from engine_plugin_processes.channel import Closed
from engine_plugin_processes.codec import decode, encode
from engine_plugin_ray.worker import RayWorker


class Mailbox:
    """A mailbox with both ends in this process."""

    socket = None
    encode = staticmethod(encode)

    def __init__(self):
        self.commands, self.answers = queue.SimpleQueue(), queue.SimpleQueue()

    def receive(self):
        command = self.commands.get()
        if command is None:
            raise Closed("over")
        return command

    def send(self, message):
        self.answers.put(decode(message.header, bytearray(b"".join(message.buffers))))


class Sleeping(RayWorker):
    """A worker with a command that takes a while, in many short steps."""

    def _do_wait(self, message):
        self.began.set()
        deadline = time.monotonic() + message["seconds"]
        while time.monotonic() < deadline:
            time.sleep(0.001)
        return "done"

    def _do_echo(self, message):
        return message["text"]


@pytest.fixture
def worker():
    mailbox = Mailbox()
    made = Sleeping(mailbox)
    made.began = threading.Event()
    thread = threading.Thread(target=made.run)
    thread.start()
    yield mailbox, made
    mailbox.commands.put({"kind": "close"})
    thread.join(10)
    mailbox.commands.put(None)  # its reader
    assert not thread.is_alive()


def test_a_command_that_nobody_waits_for_ends_and_the_next_is_answered(worker):
    mailbox, made = worker
    mailbox.commands.put({"kind": "wait", "id": 1, "seconds": 60.0})
    assert made.began.wait(10)
    mailbox.commands.put({"kind": "interrupt", "id": 1})
    assert mailbox.answers.get(timeout=10)["error"]["message"] == "Interrupted: "
    mailbox.commands.put({"kind": "echo", "id": 2, "text": "here"})
    assert mailbox.answers.get(timeout=10) == {"id": 2, "value": "here"}


def test_an_interrupt_that_comes_late_hurts_nothing(worker):
    mailbox, _ = worker
    for number in range(1, 400, 2):  # the interrupt races with the end of its command
        mailbox.commands.put({"kind": "echo", "id": number, "text": "a"})
        mailbox.commands.put({"kind": "interrupt", "id": number})
        mailbox.commands.put({"kind": "echo", "id": number + 1, "text": "b"})
        first, second = mailbox.answers.get(timeout=10), mailbox.answers.get(timeout=10)
        assert first["id"] == number
        assert second == {"id": number + 1, "value": "b"}


def test_commands_that_end_by_themselves_have_the_interpreter_look_for_nothing(worker, monkeypatch):
    mailbox, _ = worker
    asked = []
    monkeypatch.setattr("engine_plugin_ray.worker._raise_in", asked.append)
    for number in range(3):
        mailbox.commands.put({"kind": "echo", "id": number, "text": "a"})
        assert mailbox.answers.get(timeout=10)["value"] == "a"
    assert asked == []


def test_where_it_is_is_told_while_a_command_runs(worker):
    mailbox, made = worker
    mailbox.commands.put({"kind": "wait", "id": 1, "seconds": 1.0})
    assert made.began.wait(10)
    mailbox.commands.put({"kind": "stacks"})
    stacks = mailbox.answers.get(timeout=10)["stacks"]
    assert "_do_wait" in [function for _, _, function in stacks]
    assert mailbox.answers.get(timeout=10)["value"] == "done"
