"""The runtime of a simulation: groups and messages of ``MultiProcessRuntime``, workers that take virtual time.

The controller's work for a call is real: splitting, encoding, decoding of the answers, merging. A worker's work is not
counted as the controller's (``VirtualClock.aside``), and there are no system calls of sockets.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
from engine_core.contracts.weight_sync import SyncResult
from engine_plugin_processes.codec import Encoded, decode, encode
from engine_plugin_processes.placement import Slice
from engine_plugin_processes.worker import decode_ended
from engine_plugin_processes.worker_group import RemoteWorkerGroup
from engine_plugin_processes.worker_pool import Command, Reply, WorkerPool, encoded
from virtual_cluster.workers import SimulatedSampler, SimulatedTrainer

if TYPE_CHECKING:
    from engine_plugin_processes.split import Merge
    from virtual_cluster.speeds import Lengths, Speeds
    from virtual_cluster.virtual_clock import VirtualClock


@dataclass
class Cluster:
    """A simulated cluster: clock, speeds, and the number of devices of each side.

    With ``shared`` trainers and samplers are the same devices, as with one pool of a run file.
    """

    clock: VirtualClock
    speeds: Speeds
    lengths: Lengths
    trainers: int
    samplers: int
    shared: bool
    weights: str = "relay"  # the way of an update: see ``Speeds.weights_seconds``


class VirtualReply(Reply):
    """A command's result; waiting for it takes virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(lambda: None)
        self._clock = clock

    def result(self, timeout: float | None = None) -> Any:
        """Wait in virtual time and return the result."""
        if not self.done():
            mine = self._clock.turn()
            self.add_done_callback(lambda _: self._clock.wake(mine))
            self._clock.wait()
        return super().result()


@dataclass(slots=True)
class Stretch:
    """A period of a sampler's flow until a response finishes."""

    start: float
    prefill: float  # seconds
    each: float  # seconds of a token
    count: int  # tokens of each response

    @property
    def end(self) -> float:
        """The moment at which it ends."""
        return self.start + self.prefill + self.count * self.each

    def tokens_by(self, moment: float, at_once: int) -> int:
        """Return the tokens of each response after the engine call (``at_once`` tokens) that runs at ``moment``."""
        calls = max(math.ceil((moment - self.start - self.prefill) / self.each / at_once), 1)
        return min(calls * at_once, self.count)


class SimulatedWorker:
    """A process with a trainer's rank, a sampler, or both, which runs one command after another.

    Args:
        rank: the process's rank in the run.
        cluster: the cluster that it is part of.
    """

    tell: Callable[[int, int, dict[str, Any], float], None]
    """Sends an answer to the controller: rank, number of the command, content, moment."""

    def __init__(self, rank: int, cluster: Cluster) -> None:
        self.rank, self.cluster = rank, cluster
        self.engines: dict[str, SimulatedTrainer | SimulatedSampler] = {}
        self.free_at = 0.0
        self._flow = 0  # the command of the current flow; 0: none
        self._stretch: Stretch | None = None  # of the flow
        self.busy = {"actor": 0.0, "rollout": 0.0}  # seconds, by role
        self._role = ""  # of its last command that took time

    def take(self, number: int, message: Mapping[str, Any]) -> None:
        """Run a command after the current one; a flow is ended for it."""
        if self._flow:
            self._leave_flow()
        if message["kind"] == "flow":
            self._begin_flow(number, message)
            return
        value, moment = self._carry_out(message)
        self.tell(self.rank, number, {"value": value}, moment)

    def _carry_out(self, message: Mapping[str, Any]) -> tuple[Any, float]:
        """Return the answer and the moment at which it is ready."""
        role, kind, start = message.get("role", "rollout"), message["kind"], self.free_at
        start = max(start, self.cluster.clock.now())
        value: Any = None
        seconds = 0.0
        if kind == "call":
            value, seconds = self.engines[role].call(message["method"], message["batch"], message["plain"])
        elif kind in ("receive", "push"):
            sampler = self.engines["rollout"]
            assert isinstance(sampler, SimulatedSampler)
            sampler.update(message["version"])
            value, seconds = "same", message["seconds"]
        elif kind == "memory":
            value = {"memory/allocated": 1.0}
        self.free_at = start + seconds
        self.busy[role] += seconds
        self._role = role if seconds else self._role
        return value, self.free_at

    # -- a flow -------------------------------------------------------------

    @property
    def _sampler(self) -> SimulatedSampler:
        sampler = self.engines["rollout"]
        assert isinstance(sampler, SimulatedSampler)
        return sampler

    def _begin_flow(self, number: int, message: Mapping[str, Any]) -> None:
        clock, self._flow, self._stretch = self.cluster.clock, number, None
        self._sampler.take_in(message["requests"], message["dropped"])
        self.free_at = max(self.free_at, clock.now())
        clock.at(self.free_at, lambda: self._go_on(number))
        clock.at(self.free_at + message["seconds"], lambda: self._late(number))

    def _go_on(self, number: int) -> None:
        """Sample until a response finishes; end the flow if none is left."""
        if self._flow != number:
            return
        if not self._sampler.unfinished:
            self._end_flow()
            return
        clock = self.cluster.clock
        self._stretch = stretch = Stretch(clock.now(), *self._sampler.begin())
        clock.at(stretch.end, lambda: self._over(number, stretch))

    def _over(self, number: int, stretch: Stretch) -> None:
        """Finish a stretch, unless it was ended before."""
        if self._stretch is stretch:
            self._sampled(stretch.count)
            self._go_on(number)

    def _late(self, number: int) -> None:
        """End a flow whose time is up."""
        if self._flow == number:
            self._leave_flow()

    def _leave_flow(self) -> None:
        """End the flow for another command, at the end of the engine's current call."""
        if self._stretch is not None:
            self._sampled(self._stretch.tokens_by(self.cluster.clock.now(), self.cluster.speeds.call_tokens))
        self._end_flow()

    def _sampled(self, tokens: int) -> None:
        """Add ``tokens`` to each response and send the finished ones at the moment when they are ready."""
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        self.free_at = stretch.start + stretch.prefill + tokens * stretch.each
        self.busy["rollout"] += self.free_at - stretch.start
        self._role = "rollout"
        if done := self._sampler.run(tokens):
            self.tell(self.rank, self._flow, {"part": done}, self.free_at)

    def _end_flow(self) -> None:
        self.tell(self.rank, self._flow, {"value": None}, self.free_at)
        self._flow = 0

    def busy_until_now(self, role: str) -> float:
        """Return the seconds of work for a role so far, including the finished part of the current work."""
        if self._stretch is not None and role == "rollout":
            return self.busy[role] + self.cluster.clock.now() - self._stretch.start
        left = max(self.free_at - self.cluster.clock.now(), 0.0) if role == self._role else 0.0
        return self.busy[role] - left

    def finish(self, number: int) -> None:
        """Do nothing when a command has been answered."""


STALL_SECONDS = 1800.0  # of the run file's default


class SimulatedCrew(WorkerPool):
    """A ``WorkerPool`` without processes, sockets and threads: answers arrive in virtual time."""

    def __init__(self, workers: Sequence[SimulatedWorker], cluster: Cluster, tokenizer: Any) -> None:
        self.workers: dict[int, Any] = dict(enumerate(workers))
        self.tokenizer = tokenizer
        self.cluster, self.broken = cluster, None
        self.open: dict[int, Command] = {}
        self.absent: dict[int, Any] = {}  # no worker is lost
        self.stall_seconds = STALL_SECONDS
        for worker in workers:
            worker.tell = self._told
        self.messages = self.bytes = 0  # that the controller has sent and received
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._line_free = 0.0  # when the controller's network has sent all bytes so far

    def send(
        self,
        messages: Mapping[int, Mapping[str, Any]],
        what: tuple[str, str],
        *,
        leaders: Sequence[int] | None = None,
        merge: Merge = lambda results: results[0],
        interruptible: bool = False,
        deadline: tuple[float, str] | None = None,
        on_part: Callable[[Any], None] = lambda part: None,
    ) -> Reply:
        """Send messages; they arrive after their time on the controller's network."""
        ranks, number = list(messages), next(self._numbers)
        command = Command(number, what, ranks, leaders or ranks[:1], merge, deadline or (0.0, ""))
        command.on_part, command.reply = on_part, VirtualReply(self.cluster.clock)
        self.open[number] = command
        clock = self.cluster.clock
        with clock.aside():
            read: dict[int, Any] = {}
            for rank, message in encoded(messages, number).items():
                if id(message) not in read:
                    read[id(message)] = decode(message.header, bytearray(b"".join(message.buffers)))
                sent = self._carried(len(message.header) + message.payload_bytes)
                read_at = sent + self.cluster.speeds.message_seconds
                clock.at(read_at, partial(self.workers[rank].take, number, read[id(message)]))
        return command.reply

    def reply(self, give_up: Callable[[], None]) -> Reply:
        """Return a future whose waiting takes virtual time."""
        return VirtualReply(self.cluster.clock)

    def close(self) -> None:
        """Do nothing."""

    def _told(self, rank: int, number: int, what: dict[str, Any], moment: float) -> None:
        """Encode an answer and send it at ``moment``."""
        decode_ended(what.get("value", what.get("part")), self.tokenizer)
        answer = encode({"id": number, **what})
        self.cluster.clock.at(moment, lambda: self._sent(rank, answer))

    def _sent(self, rank: int, answer: Encoded) -> None:
        """Put an answer on the controller's network."""
        size = len(answer.header) + answer.payload_bytes
        moment = self._carried(size) + self.cluster.speeds.message_seconds
        self.cluster.clock.at(moment, lambda: self._heard(rank, answer))

    def _heard(self, rank: int, answer: Encoded) -> None:
        """Handle an answer as ``WorkerPool`` does in the thread that reads it; this counts as the controller's work."""
        watch = self.cluster.clock.controller
        payload = bytearray(b"".join(answer.buffers))
        before = watch.switch(True)
        self._take(self.workers[rank], decode(answer.header, payload))
        watch.switch(before)

    def _carried(self, size: int) -> float:
        """Return when the controller's network has sent ``size`` more bytes."""
        self.messages, self.bytes = self.messages + 1, self.bytes + size
        start = max(self._line_free, self.cluster.clock.now())
        self._line_free = start + size / self.cluster.speeds.controller_bandwidth
        return self._line_free


class SimulatedGroup(RemoteWorkerGroup):
    """A group of simulated workers. Its responses come together, because a stream would wait in real time."""

    stream = WorkerGroup.stream


class SimulatedRuntime(Runtime):
    """A runtime that simulates ``live["cluster"]``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cluster: Cluster = self.live["cluster"]
        count = self.cluster.trainers + (0 if self.cluster.shared else self.cluster.samplers)
        self.workers = [SimulatedWorker(rank, self.cluster) for rank in range(count)]
        self.crew = SimulatedCrew(self.workers, self.cluster, self.live["tokenizer"])
        self.ranks = {
            "actor": range(self.cluster.trainers),
            "rollout": range(count)[-self.cluster.samplers :],
        }

    def start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        """Make the simulated engines of each role."""
        groups: dict[str, WorkerGroup] = {}
        for name in roles:
            for rank in self.ranks[name]:
                sampler = SimulatedSampler(self.cluster.speeds, self.cluster.lengths)
                self.workers[rank].engines[name] = (
                    sampler if name == "rollout" else SimulatedTrainer(self.cluster.speeds)
                )
            slices = [Slice((rank,), rank) for rank in self.ranks[name]]
            groups[name] = SimulatedGroup(self.crew, name, slices, 0.0, independent=name == "rollout")
            groups[name].repeatable = self.config.run.deterministic  # as on the accelerators of `Speeds`
        return groups

    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        """Let the virtual time of an update pass."""
        cluster, start = self.cluster, self.cluster.clock.now()
        seconds = cluster.speeds.load_seconds
        if not cluster.shared:
            seconds = cluster.speeds.weights_seconds(cluster.samplers, cluster.weights)
            giving = self._tell(source, "send", addresses=[])
        self._tell(target, "receive", version=version, seconds=seconds).result()
        if not cluster.shared:
            giving.result()
        moved = cluster.speeds.weight_bytes * cluster.samplers
        return SyncResult(version, moved, cluster.clock.now() - start, "same")

    def memory_metrics(self) -> dict[str, float]:
        """Return the samplers' answer."""
        metrics: dict[str, float] = self._tell("rollout", "memory").result()
        return metrics

    def close(self) -> None:
        """Do nothing."""

    def busy(self, role: str) -> float:
        """Return the seconds that all workers of a role have worked for it so far."""
        return sum(self.workers[rank].busy_until_now(role) for rank in self.ranks[role])

    def _tell(self, role: str, kind: str, **fields: Any) -> Future[Any]:
        ranks, message = self.ranks[role], {"kind": kind, "role": role, **fields}
        return self.crew.send(dict.fromkeys(ranks, message), (role, kind), leaders=list(ranks))
