"""A group of three samplers that are none: what it sends is noted, and answered when a test says so; and strangers who call."""

import contextlib
import socket
import sys
import threading
from typing import Any, NamedTuple

import pytest

from engine_core.errors import WorkerLost
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes.codec import decode, encode
from engine_plugin_processes.placement import Slice
from engine_plugin_processes.replacement import Replacements
from engine_plugin_processes.worker_group import RemoteWorkerGroup
from engine_plugin_processes.worker_pool import Reply

RANKS = [1, 2, 3]


class Command(NamedTuple):
    """One that was sent."""

    rank: int
    message: dict[str, Any]
    reply: Reply
    tell: Any  # is given rollouts of a part

    @property
    def requests(self):
        return self.message.get("plain", self.message)["requests"]


class Crew:
    """Notes what is sent; its workers say what a test has them say."""

    stall_seconds, broken = 600.0, None

    def __init__(self):
        self.sent, self.left = [], []
        self.workers = {rank: Handle(rank) for rank in RANKS}

    def reply(self, give_up):
        return Reply(give_up)

    def send(self, messages, what, *, on_part=None, merge=lambda results: results[0], **settings):
        """As ``WorkerPool.send``: lost ranks are left out of the result."""
        replies = {rank: Reply(lambda: None) for rank in messages}
        whole = Reply(lambda: self.left.extend(rank for rank in messages if not replies[rank].done()))

        def settle(_):
            if all(reply.done() for reply in replies.values()):
                errors = [error for reply in replies.values() if (error := reply.exception())]
                found = [reply.result() for reply in replies.values() if not reply.exception()]
                others = [error for error in errors if not isinstance(error, WorkerLost)]
                if others or not found:
                    whole.set_exception((others or errors)[0])
                else:
                    whole.set_result(merge(found))

        for rank, message in messages.items():
            encoded = encode(message)
            plain = decode(encoded.header, bytearray(b"".join(encoded.buffers)))
            self.sent.append(Command(rank, plain, replies[rank], on_part))
        for reply in replies.values():
            reply.add_done_callback(settle)
        return whole

    def take(self):
        """What was sent since the last time."""
        sent, self.sent = self.sent, []
        return sent


class Handle:
    def __init__(self, rank):
        self.rank = rank

    def ask_to_end(self):
        """It ends."""

    def ended(self, seconds):
        return True

    def kill(self):
        """It has ended."""


class Away(Replacements):
    """``Replacements`` that begin no process."""

    def _replace(self, worker, number):
        return

    def lose(self, rank, *replies, outlived=True):
        """The worker is gone, and with it what it had in hand; returns the loss."""
        loss = WorkerLost("rollout", rank, "here", "gone")
        assert self.lost(Handle(rank), loss) is outlived
        for reply in replies:
            reply.set_exception(loss)
        return loss


def requests_of(*numbers):
    return [
        Request(f"r{number}", Prompt(f"p{number}", [1, 2], "a"), Sampling(max_response_tokens=8), number)
        for number in numbers
    ]


class Flowing:
    """What the flow of a group tells."""

    def __init__(self, group):
        self.group, self.crew = group, group.crew
        self.told, self.changes = [], 0
        self.flow = group.flow(self.told.extend, self.changed)

    def changed(self):
        self.changes += 1

    def go(self, *numbers, dropped=()):
        """Have the requests of these numbers sampled."""
        self.flow.go(requests_of(*numbers), dropped)

    def asked(self, since=0):
        """Rank, ids and dropped ids of each command since then."""
        return [
            (each.rank, [request.id for request in each.requests], each.message["dropped"])
            for each in self.crew.sent[since:]
        ]

    def finish(self, at, *numbers):
        """Command ``at`` tells the responses to these, as they come from a worker: without their prompts."""
        parts = [request.unsampled() for request in requests_of(*numbers)]
        for part in parts:
            part.prompt = Prompt(part.prompt.id, [], "")
        self.crew.sent[at].tell(parts)

    def answer(self, at, error=None):
        """Command ``at`` is over."""
        reply = self.crew.sent[at].reply
        reply.set_exception(error) if error else reply.set_result(None)

    def lose(self, rank, *commands, outlived=True):
        """The worker of a replaceable group is gone, and with it these commands; returns the loss."""
        replies = [self.crew.sent[at].reply for at in commands]
        return self.group.replacements.lose(rank, *replies, outlived=outlived)

    def ids(self):
        return [rollout.request_id for rollout in self.told]


@pytest.fixture(name="requests_of")
def _requests_of():
    return requests_of


@pytest.fixture(name="flowing_of")
def _flowing_of():
    return Flowing


@pytest.fixture
def samplers_of():
    """``samplers_of()``: the group of the ranks 1, 2 and 3 over a new ``Crew``."""

    def make():
        return group_of(Crew())

    return make


def group_of(crew, replacements=None):
    slices = [Slice((rank,), rank) for rank in RANKS]
    return RemoteWorkerGroup(crew, "rollout", slices, 0.0, True, replacements=replacements)


@pytest.fixture
def replaceable_of():
    """``samplers_of``, whose processes may be lost; its ``replacements`` have ``lose``."""

    def make():
        crew = Crew()
        return group_of(crew, Away(crew, RANKS, 2, "runtime.x.max_replacements", None, 1.0))

    return make


@pytest.fixture
def away_of():
    """``away_of(crew, ranks)``: ``Replacements`` of these ranks that begin no process."""
    return lambda crew, ranks: Away(crew, ranks, 2, "runtime.x.max_replacements", None, 1.0)


@pytest.fixture
def persistent():
    """Has a stranger call an address again and again, until the test ends."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:

        def call(address):
            called = threading.Event()

            def again():
                while not over.is_set():
                    with contextlib.suppress(OSError), socket.create_connection(address) as stranger:
                        stranger.sendall(b"x" * 28)  # as long as a caller's first word
                    called.set()

            thread = threading.Thread(target=again)
            thread.start()
            stack.callback(thread.join)
            assert called.wait(60)

        yield call
        over.set()


WITHOUT = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{package}":
            raise ModuleNotFoundError(f"No module named '{package}'", name=name)


sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def interpreter_without(tmp_path):
    """``interpreter_without("engine_core")``: the path of this Python, as if a package were not installed."""

    def make(package):
        folder = tmp_path / f"without_{package}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(WITHOUT.format(package=package))
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return python

    return make
