"""A worker inside an actor: commands are carried out in a thread, since Ray has the main one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

from engine_plugin_processes.worker import Interrupted, Worker

TURNS = 1000  # of a loop in which an exception from outside surely arrives


class RayWorker(Worker):
    """``Worker`` whose command in hand is broken off without a signal: those reach the main thread alone."""

    def _allow_breaks(self) -> None:
        self._lock = threading.Lock()
        self._breakable: int | None = None  # the command that may be broken off
        self._sent = False  # whether it was

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
    """Have another thread raise ``Interrupted`` between two steps of the interpreter."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))


def _take_back(thread: int) -> None:
    """One that is still on its way to this thread does not arrive after the command.

    It is replaced by one that arrives here. To ask for none in its place would leave the interpreter looking for it at every
    call and every turn of a loop, from then on (CPython 3.11 and 3.12 clear that flag when one is raised).
    """
    with contextlib.suppress(Interrupted):
        _raise_in(thread)
        for _ in range(TURNS):
            pass
