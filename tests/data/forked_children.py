"""A stand-in for ``subprocess.Popen`` that forks the workers of rewards and of rows: their imports take most of a second.

They are forks of one process that has imported what each of them imports, which is neither torch nor transformers. It starts
with the first worker and ends with the process that started it. Other commands, and those of another interpreter, start as usual.
The forks import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from forked import Forked, become

from engine_plugin_processes import child
from engine_plugin_processes.child import python_command

ENTRIES = ("engine_plugin_rewards.worker_pool.worker:main", "engine_plugin_processes.row_workers:serve")
COMMANDS = {tuple(python_command(entry)[:4]): entry for entry in ENTRIES}
IMPORTED = (
    "engine_core.builtin",
    "engine_core.plugins.plugin_set",
    "engine_core.rewards.signatures",
    "engine_plugin_rewards.plugin",
    "engine_plugin_rewards.worker_pool.worker",
    "engine_plugin_processes.row_workers",
)

SERVER = forkserver.ForkServer()  # not multiprocessing's own, which imports torch for the workers of pools
SERVER.set_forkserver_preload(list(IMPORTED))
STARTING = threading.Lock()


def popen(command: Sequence[str], **options: Any) -> Any:
    """Start a command; a worker of rewards or of rows is forked."""
    entry = COMMANDS.get(tuple(command[:4]))
    if entry is None:
        return subprocess.Popen(command, **options)
    reads, writes = os.pipe()
    ready, begun = os.pipe()
    numbers = [1, *options["pass_fds"]]
    passed = [Connection(writes), *(Connection(os.dup(number)) for number in numbers[1:])]
    given = Connection(begun, readable=False)
    env = dict(options.get("env") or os.environ)
    process = multiprocessing.get_context("forkserver").Process(
        target=work, args=(entry, list(command[4:]), env, os.getcwd(), numbers, passed, given)
    )
    own = SimpleNamespace(
        connect_to_new_process=SERVER.connect_to_new_process, read_signed=forkserver.read_signed
    )
    with STARTING, patch.object(popen_forkserver, "forkserver", own):
        process.start()
    for each in (*passed, given):
        each.close()
    os.read(ready, 1)  # until it leads its session, which may be killed at once
    os.close(ready)
    atexit.register(process.kill)  # otherwise the end of this process would wait for it
    return Forked(process, reads)


class Subprocess:
    """The module ``subprocess`` with another ``Popen``."""

    Popen = staticmethod(popen)

    def __getattr__(self, name: str) -> object:
        return getattr(subprocess, name)


@contextlib.contextmanager
def forked(rank: int, world_size: int) -> Iterator[None]:
    """Fork these workers in a worker of the kit, whose context this is, where ``ENGINE_TEST_FORK`` is set.

    The case that kills a worker starts fresh ones: it looks for them among the children of its process.
    """
    from engine_plugin_testing import forking, reward_cases  # lazily imported: the forks import this module

    killing = reward_cases.a_worker_that_is_lost_is_replaced

    def with_fresh_ones(bench: Any) -> None:
        with patch.object(child, "subprocess", subprocess):
            killing(bench)

    with contextlib.ExitStack() as stack:
        if forking.wanted():
            stack.enter_context(patch.object(child, "subprocess", Subprocess()))
            stack.enter_context(patch.object(reward_cases, killing.__name__, with_fresh_ones))
        yield


def work(
    entry: str,
    arguments: list[str],
    env: Mapping[str, str],
    folder: str,
    numbers: Sequence[int],
    passed: Sequence[Connection],
    begun: Connection,
) -> None:
    """Run a worker in the fork: with the session, descriptors, environment, folder and path that its command asks for."""
    os.setsid()
    begun.close()
    become(passed, numbers, env, folder)
    sys.argv = ["-c", *arguments]
    sys.path[:] = arguments[1:]
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(int(arguments[0]))
