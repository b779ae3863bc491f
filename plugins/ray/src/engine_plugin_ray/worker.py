"""A worker inside an actor: commands are carried out in a thread, since Ray has the main one."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from engine_core.runtime.worker import Interrupted, Worker


class RayWorker(Worker):
    """``Worker`` whose command in hand is broken off without a signal: those reach the main thread alone."""

    def _allow_breaks(self) -> None:
        self._lock = threading.Lock()
        self._breakable: int | None = None  # the command that may be broken off

    def _carry_out(self, message: dict[str, Any]) -> Any:
        try:
            self._breakable = message["id"]
            return super()._carry_out(message)
        finally:
            with self._lock:
                self._breakable = None
            _raise_in(self.thread, None)  # one that is on its way does not arrive after the command

    def _break_off(self) -> None:
        with self._lock:
            if self._breakable in self.dropped:
                self._breakable = None
                _raise_in(self.thread, Interrupted)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have another thread raise this between two steps of the interpreter; None takes one back that waits there."""
    waiting = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), waiting)
