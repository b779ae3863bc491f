"""A worker inside an actor: commands run in a separate thread, since Ray uses the main one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from engine_plugin_processes.worker import Interrupted, Worker

TURNS = 1000  # iterations of a loop in which an asynchronous exception surely arrives


class RayWorker(Worker):
    """A ``Worker`` whose command is interrupted without a signal, since signals reach only the main thread."""

    def _allow_breaks(self) -> None:
        self._lock = threading.Lock()
        self._breakable: int | None = None  # the command that may be interrupted
        self._sent = False  # whether an interruption was sent to it

    def _carry_out(self, message: dict[str, Any]) -> Any:
        try:
            self._breakable = message["id"]
            return super()._carry_out(message)
        finally:
            with self._lock:
                self._breakable = None
            if self._sent:
                self._sent = False
                _take_back(self.thread)

    def _break_off(self) -> None:
        with self._lock:
            if self._breakable in self.dropped:
                self._breakable, self._sent = None, True
                _raise_in(self.thread)


def _raise_in(thread: int) -> None:
    """Raise ``Interrupted`` in another thread, between two steps of the interpreter."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))


def _take_back(thread: int) -> None:
    """Consume an exception that is still in flight to this thread, so that it does not arrive after the command.

    It is replaced by one that arrives here. Clearing it instead would make the interpreter check for it at every call
    and every iteration of a loop from then on (CPython 3.11 and 3.12 reset that flag only when one is raised).
    """
    with contextlib.suppress(Interrupted):
        _raise_in(thread)
        for _ in range(TURNS):
            pass
