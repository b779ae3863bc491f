"""The controller's side of a run's workers: sends commands, receives answers, detects lost workers.

For each worker, one thread reads its answers and another its output. One more thread watches for ended processes,
commands past their deadline, and ranks that wait for a failed one. The first loss fails all open commands.

consumes: answers of workers; waits for: nothing, ``send`` returns at once; unblocked by: answers, losses,
deadlines; produces: results and errors in the futures of ``send``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_core import timeline
from engine_core.errors import EngineError, WorkerLost
from engine_core.runs.logs import FILE_ONLY
from engine_plugin_processes.channel import Closed
from engine_plugin_processes.codec import DecodeError, Encoded, encode
from engine_plugin_processes.remote_errors import unpack
from engine_plugin_processes.split import Merge, merge_futures
from engine_plugin_processes.stalls import Stack, diagnose
from engine_plugin_processes.worker_process import UNANSWERED

if TYPE_CHECKING:
    from engine_plugin_processes.worker_process import WorkerHandle

log = logging.getLogger("engine")

TICK_SECONDS = 0.1
STRAGGLER_SECONDS = 5.0  # for the other ranks once one has failed: they may wait for it forever
# the same if the failure is an OSError: the others may still be writing, and the run may continue
WRITER_SECONDS = 60.0
STACK_SECONDS = 3.0
CLOSE_SECONDS = 10.0


class Reply(Future[Any]):
    """The future of a command. An interrupt while waiting for the result abandons the command."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        super().__init__()
        self._give_up = give_up

    def give_up(self) -> None:
        """Abandon the command unless it is done."""
        if not self.done():
            self._give_up()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the command's error; abandon the command if a signal interrupts the wait."""
        try:
            return super().result(timeout)
        except Exception:
            raise
        except BaseException:  # a signal
            self.give_up()
            raise


@dataclass(slots=True)
class Command:
    """A command to some ranks; done when all of them have answered."""

    number: int  # id that the answers carry
    what: tuple[str, str]  # role and method, for messages
    ranks: Sequence[int]  # receivers of the command
    leaders: Sequence[int]  # ranks whose results are merged, in this order
    merge: Merge
    deadline: tuple[float, str]  # seconds that a rank may take once it has begun, and the key that sets them
    on_part: Callable[[Any], None] = lambda part: None
    reply: Reply = field(init=False)
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    later: dict[int, Future[Any]] = field(default_factory=dict)  # results that follow the answer, as of saves
    failed_at: float | None = None  # time of the first error
    thread: int = field(default_factory=threading.get_ident)  # the thread that sends the command
    sent: float = field(default_factory=timeline.now)

    @property
    def waiting(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self.values and rank not in self.errors]

    @property
    def answered(self) -> bool:
        """Whether all ranks have answered; checked at each answer, so it counts instead of comparing ranks."""
        return len(self.values) + len(self.errors) >= len(self.ranks)

    @property
    def patience(self) -> float:
        """Seconds that the other ranks get once one has failed."""
        unwritten = any(isinstance(error, OSError) for error in self.errors.values())
        return WRITER_SECONDS if unwritten else STRAGGLER_SECONDS

    def leave_out(self, rank: int, loss: WorkerLost) -> None:
        """Remove a lost rank; the command fails with the loss if it was the last one."""
        self.ranks = [other for other in self.ranks if other != rank]
        self.leaders = [other for other in self.leaders if other != rank] or self.ranks[:1]
        for answers in (self.values, self.errors):
            answers.pop(rank, None)
        if not self.ranks:
            self.fail(loss)

    def finish(self) -> None:
        """Set the result, or the most informative error."""
        if self.reply.done():
            return
        if self.errors:
            errors = list(self.errors.values())
            error = next((e for e in errors if isinstance(e, EngineError)), errors[0])
            # report an early failure only when the other ranks have written: only then may files be removed
            merge_futures(list(self.later.values())).add_done_callback(lambda _: self._fail(error))
            return
        try:
            found = [self.values[rank] for rank in self.leaders]
            result = merge_futures(list(self.later.values())) if self.later else self.merge(found)
        except Exception as problem:
            self.reply.set_exception(problem)
        else:
            self.reply.set_result(result)

    def fail(self, error: Exception) -> None:
        """Fail the command and its pending later results."""
        for future in self.later.values():
            if not future.done():
                future.set_exception(error)
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


class WorkerPool:
    """A pool of all workers of a run.

    Args:
        workers: started workers, in the order of their ranks.
        stall_seconds: time that a rank may take for one command.
        stall_key: the configuration key that sets this time.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        stall_seconds: float,
        stall_key: str = "runtime.torchrun.command_timeout_minutes",
    ) -> None:
        self.workers = {worker.rank: worker for worker in workers}
        self.stall_seconds, self.stall_key = stall_seconds, stall_key
        self.broken: WorkerLost | None = None
        self.may_lose: Callable[[WorkerHandle, WorkerLost], bool] = lambda worker, loss: False
        self.absent: dict[int, WorkerLost] = {}  # ranks that the run continues without -> their loss
        self.open: dict[int, Command] = {}
        self.stacks: dict[int, list[Stack]] = {}
        self._numbers = itertools.count(1)
        self._warned: dict[str, int] = {}  # warning -> the rank that logged it first
        self._lock = threading.RLock()
        self._closing = threading.Event()
        # commands; the id of a thread: abandon its commands so far; None: the end
        self._outgoing: queue.SimpleQueue[tuple[Command | None, dict[int, Encoded]] | int | None]
        self._outgoing = queue.SimpleQueue()
        threading.Thread(target=self._send, name="send", daemon=True).start()
        for worker in workers:
            threading.Thread(
                target=self._read, args=(worker,), name=f"rank {worker.rank}", daemon=True
            ).start()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

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
        """Put a command into the mailboxes of some ranks; return its future result without waiting.

        Args:
            messages: ``kind`` and fields of each rank's message; ranks may share one object.
            what: role and method, for error messages.
            leaders: ranks whose results are merged; default: the first rank.
            merge: merges the leaders' results into one.
            interruptible: whether the command may be interrupted at any point: no rank waits for another in it.
            deadline: seconds, and the key that sets them; default: `command_timeout_minutes`.
            on_part: called, in a reading thread, with each part of a result that a rank sends before its answer.

        Raises:
            TypeError: a message cannot be encoded; nothing is sent.
        """
        ranks, number = list(messages), next(self._numbers)
        limit = deadline or (self.stall_seconds, self.stall_key)
        command = Command(number, what, ranks, leaders or ranks[:1], merge, limit, on_part)
        command.reply = Reply((lambda: self._interrupt(command)) if interruptible else (lambda: None))
        # one atomic put: a signal's exception within a half-sent message would lose the worker
        self._outgoing.put((command, encoded(messages, number)))
        if self._closing.is_set():  # the sender may have ended
            with self._lock:
                command.fail(self._over(command))
        return command.reply

    def reply(self, give_up: Callable[[], None]) -> Reply:
        """Return a new future for a result that several commands make up; ``give_up`` abandons them."""
        return Reply(give_up)

    def give_up(self) -> None:
        """Abandon the calling thread's open commands that are interruptible.

        Called after an interrupt: a signal's exception may arrive between a command and the wait for its reply.
        """
        self._outgoing.put(threading.get_ident())

    def admit(self, worker: WorkerHandle) -> None:
        """Add a new worker, which may replace a lost one of the same rank."""
        with self._lock:
            self.workers[worker.rank] = worker
            self.absent.pop(worker.rank, None)
            if self._closing.is_set():
                worker.kill()
                return
        threading.Thread(target=self._read, args=(worker,), name=f"rank {worker.rank}", daemon=True).start()

    def dismiss(self, worker: WorkerHandle, cause: str) -> None:
        """Remove a worker without treating it as a loss; the caller ends its process."""
        with self._lock:
            if self.workers.get(worker.rank) is worker and worker.rank not in self.absent:
                self.absent[worker.rank] = WorkerLost(worker.roles[0], worker.rank, worker.host, cause)
                self._go_on_without(worker.rank)

    def close(self) -> None:
        """End every worker: idle workers are asked to exit, all others are killed."""
        if self._closing.is_set():
            return
        idle = self.broken is None and not self.open and self._outgoing.empty()
        self._closing.set()
        self._outgoing.put(None)
        if idle:
            for worker in self._all():
                worker.ask_to_end()
            deadline = time.monotonic() + CLOSE_SECONDS
            for worker in self._all():
                worker.ended(max(deadline - time.monotonic(), 0.0))
        for worker in self._all():
            worker.kill()
        self._watcher.join()
        with self._lock:
            for command in self.open.values():
                command.fail(self._over(command))
            self.open.clear()

    def _over(self, command: Command) -> WorkerLost:
        first = self.workers[command.ranks[0]]
        return WorkerLost(command.what[0], first.rank, first.host, "the run has ended")

    def _send(self) -> None:
        """Send queued commands to the workers, in order."""
        while (item := self._outgoing.get()) is not None:
            if isinstance(item, int):
                with self._lock:
                    left = [command for command in self.open.values() if command.thread == item]
                for each in left:
                    each.reply.give_up()
                continue
            command, messages = item
            with self._lock:
                if self.broken is not None or self._closing.is_set():
                    if command is not None:
                        command.fail(self.broken or self._over(command))
                    continue
                messages = {rank: text for rank, text in messages.items() if rank not in self.absent}
                if command is not None and self._without_absent(command):
                    self.open[command.number] = command
                    for rank in messages:
                        self.workers[rank].begin(command.number)
            for rank, message in messages.items():
                with contextlib.suppress(Closed):  # the worker's reader reports how it ended
                    self.workers[rank].channel.send(message)

    def _all(self) -> list[WorkerHandle]:
        """Return a copy of all workers, including lost ones: another thread may add workers meanwhile."""
        with self._lock:
            return list(self.workers.values())

    # -- answers ------------------------------------------------------------

    def _read(self, worker: WorkerHandle) -> None:
        """Handle the messages of one worker until it ends."""
        try:
            while True:
                self._take(worker, worker.channel.receive())
        except Closed as end:
            lost = isinstance(end.__cause__, TimeoutError)  # no answer to the system's probes
            cause = UNANSWERED if lost else ""
        except DecodeError as error:
            cause = f"it sent something else than an answer: {error}"
        if not self._closing.is_set():
            self._lose(worker, worker.how_it_ended(cause))

    def _take(self, worker: WorkerHandle, message: Mapping[str, Any]) -> None:
        if "heartbeat" in message:
            worker.heartbeat = time.monotonic()
        elif "log" in message:
            self._log(worker, message)
        elif "stacks" in message:
            self.stacks[worker.rank] = message["stacks"]
        else:
            with self._lock:
                command = None if worker.rank in self.absent else self.open.get(message["id"])
                if command is not None and "part" in message:
                    if worker.rank in command.leaders:
                        command.on_part(message["part"])
                elif command is not None:
                    self._answered(worker, command, message)

    def _answered(self, worker: WorkerHandle, command: Command, message: Mapping[str, Any]) -> None:
        rank = worker.rank
        if spans := message.get("spans"):
            worker.record(command.what[0], command.sent, spans)
        error = unpack(message["error"], rank) if message.get("error") else None
        if "settled" in message:
            if error:
                command.later[rank].set_exception(error)
            else:
                command.later[rank].set_result(None)
        else:
            worker.finish(command.number)
            if error:
                command.errors[rank] = error
                command.failed_at = command.failed_at or time.monotonic()
            else:
                command.values[rank] = message.get("value")
                if message.get("pending"):
                    command.later[rank] = Future()
            if command.answered:
                command.finish()
        if command.answered and all(future.done() for future in command.later.values()):
            self.open.pop(command.number, None)

    def _log(self, worker: WorkerHandle, message: Mapping[str, Any]) -> None:
        """Log a worker's record: on screen for shown workers and new warnings, else to the log file alone."""
        logger, level, text = logging.getLogger(message["name"]), message["level"], message["log"]
        with self._lock:
            said_by = self._warned.setdefault(text, worker.rank) if level >= logging.WARNING else -1
        extra = None if worker.shown or said_by == worker.rank else FILE_ONLY
        logger.log(level, "%s%s", worker.prefix, text, extra=extra)

    def _interrupt(self, command: Command) -> None:
        """Tell the ranks of an abandoned command to interrupt it."""
        message = {"kind": "interrupt"}
        self._outgoing.put((None, encoded(dict.fromkeys(command.ranks, message), command.number)))

    # -- losses -------------------------------------------------------------

    def _lose(self, worker: WorkerHandle, cause: str, role: str | None = None) -> None:
        """Handle the loss of a worker: continue without it if allowed, else fail all open and later commands."""
        with self._lock:
            if self.broken is not None or self._closing.is_set():
                return
            if self.workers[worker.rank] is not worker or worker.rank in self.absent:
                return  # it was lost or dismissed before
            at = next((c.what[0] for c in self.open.values() if worker.rank in c.waiting), None)
            name = role or at or worker.roles[0]
            loss = WorkerLost(name, worker.rank, worker.host, cause)
            if self.may_lose(worker, loss):
                self.absent[worker.rank] = loss
                self._go_on_without(worker.rank)
                return
            self.broken = loss
            for command in self.open.values():
                command.fail(self.broken)
            self.open.clear()

    def _go_on_without(self, rank: int) -> None:
        """Remove a lost rank from all open commands, and finish those that waited for it alone."""
        for command in list(self.open.values()):
            if rank not in command.ranks:
                continue
            if rank not in command.waiting and not command.later:
                continue  # it had answered
            if not self._without_absent(command):
                self.open.pop(command.number, None)
            elif not command.waiting:
                command.finish()
                self.open.pop(command.number, None)

    def _without_absent(self, command: Command) -> bool:
        """Remove absent ranks from a command; return whether any rank is left."""
        gone = [rank for rank in command.ranks if rank in self.absent]
        for rank in gone:
            command.leave_out(rank, self.absent[rank])
        return bool(command.ranks)

    def _watch(self) -> None:
        while not self._closing.wait(TICK_SECONDS):
            now = time.monotonic()
            for worker in self._all():
                worker.notice_death()
                if worker.rank not in self.absent and (cause := worker.silence()):
                    self._lose(worker, worker.how_it_ended(cause) if worker.heartbeat else f"{cause}.")
                    worker.channel.close()  # a blocked send fails
            with self._lock:
                failed = [c for c in self.open.values() if c.failed_at and now - c.failed_at > c.patience]
                there = [worker for worker in self.workers.values() if worker.rank not in self.absent]
                at = [(self.open.get(number), since) for number, since in (w.at() for w in there)]
                late = [command for command, since in at if command and now - since > command.deadline[0]]
            for command in failed:
                self._leave_stragglers(command)
            if late and self.broken is None:
                self._stalled(late[0])

    def _leave_stragglers(self, command: Command) -> None:
        """Report the error of a failed rank, and treat the first rank that still waits for it as lost."""
        with self._lock:
            waiting, failed = command.waiting, next(iter(command.errors))
            if not waiting:
                return
            command.finish()
            error = f"{type(command.errors[failed]).__name__}: {command.errors[failed]}"
        role, method = command.what
        cause = f"it still waits in '{method}', in which rank {failed} has failed: {error}"
        self._lose(self.workers[waiting[0]], cause, role)

    def _stalled(self, command: Command) -> None:
        """Log the stack of every rank, and treat the rank that the others wait for as lost."""
        self.stacks.clear()
        asked = [worker for worker in self._all() if worker.rank not in self.absent]
        for worker in asked:  # in threads: sending to a stopped process may block
            threading.Thread(target=_ask_where, args=(worker,), daemon=True).start()
        deadline = time.monotonic() + STACK_SECONDS
        while len(self.stacks) < len(asked) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS / 2)
        blamed, cause, stacks = diagnose(command, self.stacks)
        log.error("Where every rank is:\n%s", stacks)
        worker = self.workers[blamed]
        self._lose(worker, worker.how_it_ended(cause), command.what[0])


def _ask_where(worker: WorkerHandle) -> None:
    with contextlib.suppress(Closed):
        worker.channel.send({"kind": "stacks"})


def encoded(messages: Mapping[int, Mapping[str, Any]], number: int) -> dict[int, Encoded]:
    """Return the messages of a command with its number; one that several ranks share is encoded once."""
    distinct = {id(message): message for message in messages.values()}
    made = {key: encode({**message, "id": number}) for key, message in distinct.items()}
    return {rank: made[id(message)] for rank, message in messages.items()}
