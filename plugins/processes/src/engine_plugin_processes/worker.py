"""A worker process, ``python -m engine_plugin_processes.worker FD``: a pool's rank or a ``[rollout.process]`` engine.

Commands arrive over the socket FD and run one after another; each answer carries the number of its command.
``worker_pool`` is the other side. A separate thread reads the socket. It handles messages that must not wait for the
current command, such as interrupts and requests for this rank's stack, and ends the process when the controller ends.

consumes: commands; waits for: the next command, and within a command for whatever the engine waits for; unblocked by:
the thread that reads, an interrupt; produces: answers and parts of them, in an ``Outbox``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine_core import timeline
from engine_core.errors import TrainingFailed
from engine_core.plugins.modules import blamed
from engine_core.types import Rollout, decode_texts
from engine_plugin_processes.channel import Channel, Closed
from engine_plugin_processes.child import print_stacks_on_request
from engine_plugin_processes.json_channel import Outbox
from engine_plugin_processes.remote_errors import pack

if TYPE_CHECKING:
    from types import FrameType

    from engine_core.contracts.engines import RolloutEngine, TrainEngine
    from engine_core.contracts.weight_transport import WeightTransport

CONTROLLER_GONE = 70
HEARTBEAT_SECONDS = 1.0
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # handled by the controller


class Interrupted(BaseException):
    """An exception raised within a command that the controller has abandoned."""


class Worker:
    """A server of commands, which runs until it is closed.

    Args:
        channel: channel to the controller.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel, self.outbox = channel, Outbox(channel)
        self.mailbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self.host: Any  # ``SharingHost``, or that of ``build_host``
        self.order: dict[str, Any] = {}
        self.loaded: Any = None  # by ``_do_prepare``
        self.links: dict[str, WeightTransport] = {}  # name of the link -> endpoint of this process
        self.weight_dtypes: dict[str, str] = {}  # name of the link -> type of its receivers' weights, or ""
        self.current: int | None = None  # number of the running command
        self.dropped: set[int] = set()  # commands that the controller has abandoned
        self.profile = contextlib.ExitStack()
        self.thread = 0  # id of the thread that runs commands
        self._closing = False

    def run(self) -> None:
        """Serve commands until ``close`` arrives, then close the engines."""
        self.thread = threading.get_ident()
        signal.signal(signal.SIGUSR1, self._interrupt)
        threading.Thread(target=self._listen, name="mailbox", daemon=True).start()
        try:
            while (message := self.mailbox.get())["kind"] != "close":
                self._answer(message)
        finally:
            self._leave()

    def _answer(self, message: dict[str, Any]) -> None:
        """Run one command, and send its result or error with its number."""
        number = message["id"]
        try:
            if number in self.dropped:
                raise Interrupted
            with timeline.span(message.get("method", message["kind"]), ""):
                value = self._carry_out(message)
        except (Exception, SystemExit, Interrupted) as error:
            if isinstance(error, Exception) and (host := getattr(self, "host", None)):
                error = blamed(error, host.plugins.plugins)
            self.outbox.put({"id": number, "error": pack(error), "spans": timeline.drain()})
            return
        answer = {"id": number, "spans": timeline.drain()}
        if isinstance(value, Future):
            self.outbox.put({**answer, "pending": True})
            value.add_done_callback(lambda future: self._settle(number, future))
            return
        try:
            self.outbox.put({**answer, "value": value})
        except TypeError as error:
            self.outbox.put({**answer, "error": pack(error)})

    def _carry_out(self, message: dict[str, Any]) -> Any:
        """Run the command; only this part can be interrupted."""
        self.current = message["id"]
        try:
            return getattr(self, f"_do_{message['kind']}")(message)
        finally:
            self.current = None

    def _settle(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        self.outbox.put({"id": number, "settled": True, "error": pack(error) if error else None})

    # -- commands -----------------------------------------------------------

    def _do_start(self, message: dict[str, Any]) -> dict[str, Any]:
        """Join the pool, load the run's plugins and build the engines; return a description of roles and device."""
        from engine_plugin_processes.starting import describe, join_pool, make_host
        from engine_plugin_processes.transports.choice import gpu_uuid

        self.order = message
        self._forward_logs(message["log_level"])
        device = join_pool(message)
        self.host = make_host(message, device)
        roles = {name: describe(e, self.host.place) for name, e in self.host.engines.items()}
        described = {"kind": device.type, "gpu": gpu_uuid(device)}
        return {"shared": self.host.shared, "roles": roles, "device": described}

    def _do_prepare(self, message: dict[str, Any]) -> None:
        """Load the plugin and the libraries of the engine of ``[rollout.process]``, which the next command builds."""
        from engine_plugin_processes.sampler_process.build import load

        self.order = message
        self._forward_logs(message["log_level"])
        self.loaded = load(message)

    def _do_sampler(self, message: dict[str, Any]) -> str:
        """Build the engine of ``[rollout.process]``; return its label."""
        from engine_plugin_processes.sampler_process.build import build_host

        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        if self.loaded is None:
            self._do_prepare(message)
        self.host = build_host(message, *self.loaded)
        label: str = self.host.engines["rollout"].label
        return label

    def _do_call(self, message: dict[str, Any]) -> Any:
        """Call a method of an engine's contract."""
        from engine_core.contracts.engines import RolloutEngine, TrainEngine

        engine, method = self.host.engines[message["role"]], message["method"]
        contract = TrainEngine if isinstance(engine, TrainEngine) else RolloutEngine
        if method.startswith("_") or not callable(getattr(contract, method, None)):
            raise RuntimeError(f"'{method}' is no method of {contract.__name__}.")
        arguments = () if message["batch"] is None else (message["batch"],)
        if method == "generate" and type(engine).generate is RolloutEngine.generate:
            return self._in_parts(engine, message)
        value = getattr(engine, method)(*arguments, **message["plain"])
        return self._with_texts(message["role"], value) if isinstance(engine, RolloutEngine) else value

    def _in_parts(self, engine: RolloutEngine, message: dict[str, Any]) -> Any:
        """Run ``generate`` of an engine that does not override it: send rollouts as they finish."""
        from engine_core.sampling import stream

        for finished in stream(engine, message["plain"]["requests"]):
            self._tell(message["role"], message["id"], finished)
        return []

    def _tell(self, role: str, number: int, finished: list[Rollout]) -> None:
        """Send a part of a command's result."""
        self.outbox.put({"id": number, "part": self._with_texts(role, finished)})

    def _with_texts(self, role: str, value: Any) -> Any:
        """Return a result after decoding the text of its finished responses."""
        tokenizer = self.host.live.get("tokenizer")
        if role == "rollout" and tokenizer is not None:  # other roles may have other tokenizers
            decode_ended(value, tokenizer)
        return value

    def _do_flow(self, message: dict[str, Any]) -> None:
        """Sample until another command arrives, no request is left, or the time is up; send rollouts as they finish."""
        engine = cast("RolloutEngine", self.host.engines[message["role"]])
        end = time.monotonic() + message["seconds"]
        finished = engine.advance(message["requests"], message["dropped"])
        while True:
            if finished:
                self._tell(message["role"], message["id"], finished)
            if not engine.running or not self.mailbox.empty() or time.monotonic() >= end:
                return
            finished = engine.advance()

    def _do_host(self, message: dict[str, Any]) -> Any:
        """Call a method of this process's host."""
        return getattr(self.host, message["method"])(**message["plain"])

    def _do_link(self, message: dict[str, Any]) -> tuple[Any, str]:
        """Open this process's endpoint of a link, and close that of the link of this name that it replaces.

        Returns:
            The endpoint's address, and the name of ``weight_dtype`` of the sampler here, or "".
        """
        from engine_core.contracts.weight_transport import TransportEndpoint
        from engine_plugin_processes.codec import NAMES
        from engine_plugin_processes.transports.choice import make

        if (old := self.links.pop(message["link"], None)) is not None:
            old.close()
        device, token = self.host.place.device, self.order["token"]
        endpoint = TransportEndpoint(**message["endpoint"], device=device, token=token)
        kind, options = make(self.host.config, self.host.plugins, endpoint.transport)
        self.links[message["link"]] = transport = kind(options, endpoint)
        dtype = getattr(self.host.engines.get("rollout"), "weight_dtype", None)
        return transport.open(), "" if dtype is None else NAMES.get(dtype, "")

    def _do_join(self, message: dict[str, Any]) -> None:
        self.links[message["link"]].join(message["peers"])
        self.weight_dtypes[message["link"]] = message["weight_dtype"]

    def _do_send(self, message: dict[str, Any]) -> int:
        """Send weights to another pool; a rank without a link only takes part in the collective stream."""
        from engine_core.contracts.weight_sync import rounded, sends_adapter, stream_of
        from engine_core.contracts.weight_transport import WeightUpdate
        from engine_plugin_processes.codec import DTYPES

        actor = cast("TrainEngine", self.host.engines[message["role"]])
        adapter = message["mix"] is None and sends_adapter(self.host.config)
        if message["link"] is None:
            for _ in stream_of(actor, adapter, to="leader"):
                pass
            return 0
        sampler = self.host.config.rollout if message["mix"] is None else None
        dtype = DTYPES.get(self.weight_dtypes[message["link"]]) if message["mix"] is None else None
        stream = rounded(stream_of(actor, adapter, to="leader", sampler=sampler), dtype)
        try:
            return self.links[message["link"]].send(
                stream, WeightUpdate(message["update"], message["version"])
            )
        finally:
            for _ in stream:  # after a loss: collective for the actor's ranks
                pass

    def _do_receive(self, message: dict[str, Any]) -> str:
        """Receive weights of another pool and load them into the sampler, or mix them into a model."""
        from engine_core.contracts.weight_transport import WeightUpdate

        engine: Any = self.host.engines[message["role"]]
        stream = self.links[message["link"]].receive(WeightUpdate(message["update"], message["version"]))
        with closing_stream(stream):
            if message["mix"] is not None:
                engine.load_named_weights(stream, message["mix"])
                return ""
            return engine.update_weights(stream, message["version"])

    def _do_profile(self, message: dict[str, Any]) -> None:
        """End the profile of this process, and begin one if the message names a folder."""
        self.profile.close()
        if message["folder"]:
            profiler = self.host.plugins.require("parts", "profiler")
            self.profile.enter_context(profiler(Path(message["folder"]), message["name"]))

    # -- handled at once ----------------------------------------------------

    def _listen(self) -> None:
        """Read messages into the mailbox; end this process when the controller ends."""
        try:
            while True:
                message = self.channel.receive()
                if message["kind"] == "interrupt":
                    self.dropped.add(message["id"])
                    signal.pthread_kill(self.thread, signal.SIGUSR1)
                elif message["kind"] == "stacks":
                    self.outbox.put({"stacks": where(self.thread)})
                else:
                    self._closing = message["kind"] == "close"
                    self.mailbox.put(message)
        except Closed:
            if not self._closing:
                end_at_once(CONTROLLER_GONE)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            end_at_once(1)

    def _send_heartbeats(self) -> None:
        """Send heartbeats to the owner, forever."""
        while True:
            self.outbox.put({"heartbeat": True})
            time.sleep(HEARTBEAT_SECONDS)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise ``Interrupted`` in the thread that runs commands, if its command was abandoned."""
        if self.current in self.dropped:
            self.current = None
            raise Interrupted

    def _forward_logs(self, level: int) -> None:
        handler = ToOwner(self.outbox)
        for name in ("engine", "engine_core"):
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).addHandler(handler)

    def _leave(self) -> None:
        from engine_plugin_processes.starting import leave_pool

        try:
            if hasattr(self, "host"):
                self.host.close()
            for transport in self.links.values():
                transport.close()
            leave_pool()
        finally:
            try:
                self.profile.close()  # last: it may take long, or fail
            except Exception as error:
                logging.getLogger("engine").warning("The profile of this process is not written: %s", error)
            self.outbox.close()


class ToOwner(logging.Handler):
    """A log handler that sends records to the process that started this one."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self.outbox = outbox
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; a failure to send goes to ``handleError``."""
        try:
            self.outbox.put({"log": self.format(record), "name": record.name, "level": record.levelno})
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def closing_stream(stream: Generator[Any, None, None]) -> Iterator[None]:
    """Close a stream of ``WeightTransport.receive`` at the end; start it first if it was not started.

    The sender waits for this endpoint. An engine may refuse an update before it reads the stream (because it is
    asleep), which must not leave the stream unstarted.
    """
    try:
        yield
    finally:
        if inspect.getgeneratorstate(stream) == inspect.GEN_CREATED:
            with contextlib.suppress(TrainingFailed):
                next(stream, None)
        stream.close()


def decode_ended(result: Any, tokenizer: Any) -> None:
    """Decode the texts of the finished rollouts in a command's result: there are many workers and one controller.

    Args:
        result: result of any command; if it is a list, the rollouts in it are changed in place.
        tokenizer: the run's tokenizer.
    """
    if isinstance(result, list):
        found = (each for each in result if isinstance(each, Rollout))
        decode_texts((each for each in found if each.finish_reason != "abort"), tokenizer)


def end_at_once(code: int) -> None:
    """End this process, and the processes of its session if it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(code)


def where(thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of a thread, the innermost last."""
    frame = sys._current_frames().get(thread)
    summary = traceback.extract_stack(frame) if frame is not None else []
    return [(entry.filename, entry.lineno or 0, entry.name) for entry in summary]


def main() -> None:
    """Serve commands from the socket whose descriptor is the argument."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    print_stacks_on_request()
    os.dup2(2, 1)  # engines print to stderr, like the log
    Worker(Channel(socket.socket(fileno=int(sys.argv[1])))).run()
    sys.stderr.flush()
    os._exit(0)  # the engines are closed; shutting down the interpreter would only take time


if __name__ == "__main__":
    main()
