"""The inside of a sampler's process: the engine of a plugin, driven as its owner says.

One thread reads commands ahead and answers what must not wait, one gives signs of life. The main thread carries
commands out between the steps of the engine; told to go, it steps until nothing is left, and sends each rollout as
soon as it is finished.

consumes: commands, buckets of weights; waits for: commands, while it has nothing to sample; unblocked by: commands,
the end of the owner, which ends this session; produces: replies, rollouts, signs of life.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import DataError
from engine_plugin_processes import foreign_interpreter
from engine_plugin_processes.buckets import received
from engine_plugin_processes.channel import Channel, Closed
from engine_plugin_processes.json_channel import Outbox
from engine_plugin_processes.remote_errors import pack
from engine_plugin_processes.sampler_process.memory import HostMemory, Seen
from engine_plugin_processes.worker import ToOwner, where

if TYPE_CHECKING:
    from types import FrameType

    from engine_core.contracts.engines import RolloutEngine

PROTOCOL = 2
"""Of the messages between owner and process; both sides must have the same."""
BEAT_SECONDS = 1.0
MODES = ("add", "abort", "pause", "resume", "sleep", "wake")
"""Methods of the engine that a command calls as they are."""
HALTS = ("pause", "sleep")
"""Those after which the engine would refuse to sample."""

log = logging.getLogger("engine")


class Interrupted(BaseException):
    """The owner wants an answer now; raised in the middle of a step."""


def versions() -> dict[str, Any]:
    """Return what both sides compare; the protocol stands beside the distribution that has it."""
    same = foreign_interpreter.versions()
    return {
        **same,
        "engine-plugin-processes": f"{same['engine-plugin-processes']} (protocol {PROTOCOL})",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


class Server:
    """Serves one owner.

    Args:
        channel: to it.
        memory: descriptor of the file that weights come through.
    """

    def __init__(self, channel: Channel, memory: int) -> None:
        self.channel, self.outbox = channel, Outbox(channel)
        self.host_memory = HostMemory(memory)
        self.mailbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.engine: RolloutEngine
        self.seen: Seen
        self.going = False  # told to sample, and something is left
        self.incomplete = ""  # why the weights are not those of one version
        self._since: float | None = None  # at this piece of work
        self._stepping = False
        self._closing = False

    def run(self) -> None:
        """Until the owner says so."""
        signal.signal(signal.SIGUSR1, self._interrupt)
        self.outbox.put({"id": 0, "value": versions()})
        for work in (self._listen, self._live):
            threading.Thread(target=work, daemon=True).start()
        while True:
            message = self._next()
            if message is None:
                self._step()
            elif message["kind"] == "close":
                break
            else:
                self._answer(message)
        if hasattr(self, "engine"):
            self.engine.close()
        self.outbox.close()

    def _next(self) -> dict[str, Any] | None:
        """The next command; None: there is none, and something to sample."""
        with contextlib.suppress(queue.Empty):
            return self.mailbox.get(block=not self.going)
        return None

    # -- sampling -----------------------------------------------------------

    def _step(self) -> None:
        """Go on sampling once; what finished goes to the owner."""
        try:
            if self.engine.num_unfinished == 0:
                self.going = False
                self.outbox.put({"idle": True})
                return
            with self._busy():
                if self.incomplete:
                    raise DataError(
                        f"The sampler holds weights of two versions ({self.incomplete}). Update them again."
                    )
                self._stepping = True
                finished = self.engine.step()
                self._stepping = False
            if finished:
                self.outbox.put({"rollouts": finished}, prompts=False)
        except Interrupted:
            return
        except Exception as error:
            self.going = False
            self.outbox.put({"failed": pack(error)})
        finally:
            self._stepping = False

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    # -- commands -----------------------------------------------------------

    def _answer(self, message: Mapping[str, Any]) -> None:
        """Carry one command out; its result or its error goes back under its number."""
        kind = message["kind"]
        if kind == "go":
            self.going = True
            return
        if kind in ("bucket", "end", "break"):  # of an update that has failed
            return
        number = message["id"]
        try:
            with self._busy() if kind != "start" else contextlib.nullcontext():  # that has a time of its own
                if kind in MODES:
                    value = getattr(self.engine, kind)(**message["plain"])
                    if kind in HALTS and self.going:  # until the owner says go again
                        self.going = False
                        self.outbox.put({"idle": True})
                else:
                    value = getattr(self, f"_do_{kind}")(message)
            self.outbox.put({"id": number, "value": value}, prompts=False)
        except (Exception, SystemExit) as error:
            self.outbox.put({"id": number, "error": pack(error)})

    def _do_start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Load the plugin, check its table, build its engine; what the engine is."""
        from engine_plugin_processes.sampler_process.build import build_engine

        handler = ToOwner(self.outbox)
        for name in ("engine", "engine_core"):
            logging.getLogger(name).setLevel(message["log_level"])
            logging.getLogger(name).addHandler(handler)
        if message["path"] is not None:
            sys.path[:] = message["path"]
        device = torch.device(message["context"]["device"])
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        self.seen = Seen(self.host_memory, device)
        self.engine = build_engine(message, device)
        return {"label": self.engine.label, "capacity": self.engine.capacity}

    def _do_update(self, message: Mapping[str, Any]) -> str:
        """Replace the weights; returns the engine's checksum."""
        number, version = message["id"], message["version"]

        def take() -> dict[str, Any]:
            self._since = None  # the owner gathers the next bucket
            message = self.mailbox.get()
            self._since = time.monotonic()
            return message

        def answer(bucket: int, ok: bool) -> None:
            self.outbox.put({"id": number, "bucket": bucket, "ok": ok})

        self.incomplete = f"an update to version {version} did not come to its end"
        found = self.engine.update_weights(received(take, answer, number, self.seen), version)
        if self.engine.version != version:
            raise DataError(
                f"The engine says version {self.engine.version} after an update to {version}. This is a bug of the plugin."
            )
        self.incomplete = ""
        return found

    # -- what does not wait -------------------------------------------------

    def _listen(self) -> None:
        """Fill the mailbox; the end of the owner is the end of this session."""
        main = threading.main_thread().ident or 0
        try:
            while True:
                message = self.channel.receive()
                if message["kind"] == "interrupt":
                    signal.pthread_kill(main, signal.SIGUSR1)
                elif message["kind"] == "stacks":
                    self.outbox.put({"stack": where(main)})
                else:
                    self._closing |= message["kind"] == "close"
                    self.mailbox.put(message)
        except Closed:
            if not self._closing:
                os.killpg(0, signal.SIGKILL)

    def _live(self) -> None:
        """Say that the interpreter runs, and since when it is at its present piece of work."""
        while True:
            since = self._since
            self.outbox.put({"busy": 0.0 if since is None else time.monotonic() - since})
            time.sleep(BEAT_SECONDS)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stepping:
            self._stepping = False
            raise Interrupted
