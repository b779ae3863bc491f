"""Stopping a run on a signal without losing work, and the report on a run that ended early.

The first SIGTERM, SIGUSR1 (which schedulers send before they end a job) or SIGINT asks the run to stop. Inside a
*window*, where nothing is half done, the signal raises ``Stop`` at once; elsewhere the stop waits for the next window
or ``check``. The second signal ends the process at once.

After the end the newest checkpoint is verified and the resume hint is logged. A separate thread reads and hashes the
checkpoint's files again, at the speed of the disk, so that a failed run ends in bounded time even if its disk hangs.

Left out on purpose: only polling a flag between steps. A step may wait minutes for samples or rewards,
and a scheduler's grace period is seconds.
"""

from __future__ import annotations

import logging
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from engine_core.errors import EngineError
from engine_core.launch import launched
from engine_core.runs.checkpoint import Checkpoints, problems, size
from engine_core.runs.logs import FILE_ONLY

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")

SAVED = 75  # EX_TEMPFAIL: schedulers take it as "run me again"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Terminated(BaseException):
    """A SIGTERM that ends the process now. Not a SystemExit, which is caught as a plugin's failure."""

    code = 128 + signal.SIGTERM


class Stop(BaseException):
    """A signal that asks the run to end, raised where nothing is half done. Not an ``Exception``, so no handler takes it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(self.name)

    @property
    def name(self) -> str:
        """Name of the signal in messages: ``Ctrl-C`` for SIGINT."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name

    def ending(self, saved: bool) -> BaseException:
        """Return the exception that ends the program.

        KeyboardInterrupt for Ctrl-C (exit 130), else SystemExit(75), or SystemExit(143) if nothing was saved.
        """
        if self.number == signal.SIGINT:
            return KeyboardInterrupt()
        return SystemExit(SAVED if saved else Terminated.code)


class StopSignals:
    """A context that handles the stop signals in the main thread; in other threads it does nothing.

    Example::

        with StopSignals() as signals:
            with signals.window():
                wait_for_samples()  # a signal raises Stop here
            optimizer_step()  # a signal waits
            signals.check()  # and raises Stop here
    """

    def __init__(self) -> None:
        self.requested: int | None = None  # the first signal
        self._open = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def window(self) -> Iterator[None]:
        """Mark a block that ``Stop`` may interrupt at any point, since it does not change the last finished step."""
        before, self._open = self._open, True
        try:
            self.check()
            yield
        finally:
            self._open = before

    def check(self) -> None:
        """Raise ``Stop`` if a signal was received."""
        if self.requested is not None:
            raise Stop(self.requested)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:  # the second signal ends the process now
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        self.requested = number
        if self._open:
            raise Stop(number)


FAILED_SECONDS = 300.0  # limit of the verification after a failure
STOPPED_SECONDS = 5.0  # the same after a signal: the scheduler's grace period is short
ANNOUNCED_BYTES = 10**9  # from this size on, the verification is logged before it begins


@dataclass(slots=True)
class CheckpointStatus:
    """A summary of what is known of a run's checkpoints.

    Example, of a run whose newest checkpoint is damaged: ``step=2, good=True`` with one sentence in ``damaged``.
    """

    newest: int | None = None  # step; None: none exists, or unknown (not `complete`)
    step: int | None = None  # of the newest checkpoint not known to be damaged; None: none exists
    good: bool = False  # all of its hashes were compared
    files: int = 0  # in its manifest
    total: int = 0  # bytes, by its manifest
    read: int = 0  # bytes compared so far
    seconds: float = 0.0
    damaged: list[str] = field(default_factory=list)  # a sentence for each newer one
    complete: bool = False  # the verification finished

    @property
    def text(self) -> str:
        """The status in sentences; "" if the run has no checkpoint."""
        said = [f"{sentence} " for sentence in self.damaged]
        if self.good:
            read = f"all {self.files} files ({_bytes(self.total)}) match their hashes, read in {self.seconds:.1f} s."
            said.append(f"The checkpoint of step {self.step} is verified: {read}")
        elif self.step is not None:
            part = f"{_bytes(self.read)} of {_bytes(self.total)} were read in {self.seconds:.1f} s"
            rest = "`engine resume` verifies it before training continues."
            said.append(f"The checkpoint of step {self.step} is verified in part: {part}. {rest}")
        elif not self.complete and not self.damaged:
            said.append(f"The checkpoint folder did not respond in {self.seconds:.1f} s.")
        return "".join(said).rstrip()


class _LeftOff(Exception):
    """A signal to the verifying thread that its result is no longer wanted."""


def standing(
    checkpoints: Checkpoints,
    seconds: float,
    unless: Callable[[], bool] = lambda: False,
    begins: Callable[[int, int], object] = lambda step, total: None,
) -> CheckpointStatus:
    """Verify the newest checkpoint, and if it is damaged the one before, until one is good.

    Args:
        checkpoints: of the run.
        seconds: time limit.
        unless: polled; the verification ends early once it returns True.
        begins: called in the verifying thread with the step and the size in bytes of the newest checkpoint before it is
            read.

    Returns:
        What was found. Errors of the disk are not raised; they are sentences in ``damaged``.
    """
    found, left = CheckpointStatus(), threading.Event()
    began = time.monotonic()

    def count(read: int) -> None:
        """Count bytes that were read; raise ``_LeftOff`` once the time is over."""
        if left.is_set():
            raise _LeftOff
        found.read += read

    def verify() -> None:
        """Compare the hashes of the checkpoints, newest first, and fill ``found``."""
        steps = checkpoints.steps()
        found.newest = steps[-1] if steps else None
        for step in reversed(steps):
            path = checkpoints.path(step)
            (found.files, found.total), found.read, found.step = size(path), 0, step
            if step == found.newest:
                begins(step, found.total)
            try:
                wrong = problems(path, read=count)
            except _LeftOff:
                return
            if not wrong:
                found.good = True
                break
            found.step = None
            found.damaged.append(f"Checkpoint {path} is not usable: {wrong[0]}.")
        found.complete = True

    def verify_what_answers() -> None:
        """Call ``verify``; note an error of the disk in ``found``."""
        try:
            verify()
        except OSError as error:
            found.damaged.append(f"{checkpoints.folder} cannot be read: {error}.")

    # consumes: the files; waits for: the disk; unblocked by: `left`; produces: `found`. A daemon: a disk may not answer
    reader = threading.Thread(target=verify_what_answers, name="verify-checkpoint", daemon=True)
    reader.start()
    while reader.is_alive() and time.monotonic() < began + seconds and not unless():
        reader.join(0.05)
    left.set()
    return replace(found, seconds=time.monotonic() - began)  # a copy: the thread may still write to `found`


def resume_hint(run: TrainingRun, known: CheckpointStatus | None = None) -> str:
    """Return the advice to log after a run has ended early: usually the command that resumes it.

    Args:
        run: with its folder.
        known: result of the verification; default: the newest checkpoint, not verified.
    """
    assert run.folder is not None
    known = known or _seen(Checkpoints(run.folder.checkpoints))
    command = resume_command(run.folder.path)
    if known.newest is None and not known.complete:
        return f"Its checkpoints could not be read. Once they can: {command}"
    if known.newest is None:
        often = run.config.checkpoint.every_steps or run.config.checkpoint.every_minutes
        return "No checkpoint was saved" + ("." if often else ": set checkpoint.every_steps to keep work.")
    if known.complete and not known.good:
        return "None of its checkpoints can be used: restore one from a copy."
    step = known.newest if known.step is None else known.step
    newest = "newest" if step == known.newest else "newest good"
    return f"The {newest} checkpoint is of step {step}. Resume: {command}"


def _seen(checkpoints: Checkpoints) -> CheckpointStatus:
    """Return the status of the checkpoints by their names alone: no file is read."""
    try:
        steps = checkpoints.steps()
    except OSError:
        return CheckpointStatus()
    return CheckpointStatus(newest=steps[-1]) if steps else CheckpointStatus(complete=True)


def resume_command(folder: Path) -> str:
    """Return the shell command that resumes the run of ``folder``."""
    command = f"engine resume {shlex.quote(str(folder))}"
    return command if not launched() else f"{command}, on every node under torchrun as it was started"


def verified(run: TrainingRun, seconds: float, **how: Callable[..., Any]) -> CheckpointStatus:
    """Call ``standing`` for a run, log the result, and keep the good checkpoint's path in ``run.verified``."""
    assert run.folder is not None
    checkpoints = Checkpoints(run.folder.checkpoints)
    known = standing(checkpoints, seconds, **how)
    if known.text:
        log.log(logging.INFO if known.good and not known.damaged else logging.WARNING, "%s", known.text)
    run.verified = checkpoints.path(known.step) if known.good and known.step is not None else None
    return known


def report_stop(run: TrainingRun, saved: bool) -> None:
    """End the workers of a run that a first signal has stopped, and verify its checkpoints."""
    _end_workers(run)
    known = verified(run, STOPPED_SECONDS)
    if known.damaged or not saved:
        log.warning("%s", resume_hint(run, known))


def report_failure(run: TrainingRun, error: BaseException, began: bool) -> None:
    """Log the step in which a run failed or was ended at once, end its workers, verify its checkpoints.

    Args:
        run: with its folder.
        error: the exception that ended the run.
        began: whether its steps had begun.
    """
    if not isinstance(error, Exception):
        where = f"in step {run.step_now}. {resume_hint(run)}" if began else "before its first step."
        log.warning("The run was ended at once %s", where)
        return
    # the caller prints the error on the screen
    log.error("%s", error, exc_info=error, extra=FILE_ONLY)
    if not began:
        log.error("The run failed before its first step.")
        return
    _end_workers(run)  # GPUs must not idle while files are read
    known = verified(
        run,
        FAILED_SECONDS,
        unless=lambda: run.signals.requested is not None,
        begins=partial(_announce, error),
    )
    way = resume_hint(run, known)
    log.error("The run failed in step %d. %s", run.step_now, way)
    if not isinstance(error, EngineError):  # such an error is printed with a traceback after this log line
        error.add_note(way)


def _end_workers(run: TrainingRun) -> None:
    """End the workers. Log an error of theirs, so that it does not replace the cause: lost workers may not close."""
    try:
        run.end_workers()
    except Exception as error:
        log.error("The workers did not end cleanly: %s", error, exc_info=error)


def _announce(error: BaseException, step: int, total: int) -> None:
    """Log the error and the verification before a large checkpoint is read."""
    if total >= ANNOUNCED_BYTES:
        log.error("%s", str(error).partition("\n")[0])
        log.warning(
            "The checkpoint of step %d (%s) is verified before the run ends: at most %g s, and Ctrl-C leaves it out.",
            step, _bytes(total), FAILED_SECONDS,
        )  # fmt: skip


def _bytes(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
