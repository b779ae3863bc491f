"""The threads of a run's trackers: each tracker receives metrics and events in its own thread and delays nothing."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import bare
from engine_core.config.dump import as_data
from engine_core.errors import EngineError, PluginError
from engine_core.runs.logs import FILE_ONLY
from engine_core.runs.tracking import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine_core.config import EngineConfig
    from engine_core.plugins import PluginSet
    from engine_core.runs.tracking import RunFolder

HELD = 16
"""Queued calls of a tracker above which it receives no events except the run's end: they hold the rollouts of a step."""
MOST = 10_000
"""Queued calls of a tracker above which it receives no metrics either: one that hangs must not fill the memory."""

ENDS = frozenset({"run_finished", "run_failed", "run_stopped"})
"""Events of a run's end, after which a tracker stores files."""

logger = logging.getLogger("engine")


class _Feeder(threading.Thread):
    """A thread that feeds one tracker.

    consumes: its queue; waits for: the next step; unblocked by: None in the queue; produces: calls of the tracker, one
    after another. It is a daemon, so a stalled tracker cannot keep the process alive.
    """

    def __init__(self, name: str, tracker: Tracker, begin: Callable[[], None]) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.label, self.tracker, self._begin = name, tracker, begin
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Start the tracker, log queued steps, close it; an error switches it off."""
        try:
            self._begin()
            while (call := self.calls.get()) is not None:
                call()
            self.tracker.close()
        except BaseException as error:  # some libraries raise SystemExit in their thread
            logger.error("Tracker '%s' failed.", self.label, exc_info=True, extra=FILE_ONLY)
            logger.error(
                "Tracker '%s' failed and is off for the rest of the run; training continues. %s: %s",
                self.label, type(error).__name__, error,
            )  # fmt: skip


def make_trackers(config: EngineConfig, plugins: PluginSet) -> dict[str, Tracker]:
    """Return the trackers of a run by name, with their options, not started.

    Raises:
        EngineError: a tracker cannot work here.
    """
    made = {}
    for name in config.tracking.trackers:
        try:
            made[name] = plugins.resolve("trackers", name)(config.tracking.options.get(bare(name)))
        except EngineError as error:
            raise type(error)(f"tracking.trackers: {error}") from error
        if not isinstance(made[name], Tracker):
            kind = f"{Tracker.__module__}.Tracker"
            raise PluginError(f"tracking.trackers: '{name}' is no {kind}, got {made[name]!r}.")
    return made


class Trackers:
    """The trackers of a run, the part ``trackers``; ``TrackerThreads`` describes its methods.

    Args:
        run: the run folder.
        config: config of the run.
        plugins: they offer the trackers.

    Raises:
        EngineError: a tracker refuses its set-up.
    """

    def __init__(self, run: RunFolder, config: EngineConfig, plugins: PluginSet) -> None:
        plain = run.redactor.tree(as_data(config))
        self.feeders = [
            _Feeder(name, tracker, functools.partial(tracker.start, run, plain))
            for name, tracker in make_trackers(config, plugins).items()
        ]

    def start(self) -> None:
        """Start the threads."""
        for feeder in self.feeders:
            feeder.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step."""
        self._queue(MOST, "log", step, metrics)

    def event(self, event: str, step: int, data: Mapping[str, Any]) -> None:
        """Queue an event."""
        self._queue(MOST if event in ENDS else HELD, "on_event", event, step, dict(data))

    def _queue(self, most: int, method: str, *arguments: Any) -> None:
        for feeder in self.feeders:
            if feeder.is_alive() and feeder.calls.qsize() < most:
                feeder.calls.put(functools.partial(getattr(feeder.tracker, method), *arguments))

    def close(self, timeout: float = 5.0) -> None:
        """Close the trackers, which have ``timeout`` seconds together to finish."""
        for feeder in self.feeders:
            feeder.calls.put(None)
        deadline = time.monotonic() + timeout
        for feeder in self.feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))
            if feeder.is_alive():
                message = (
                    "Tracker '%s' has not finished in time and is left behind; metrics.jsonl has all steps."
                )
                logger.warning(message, feeder.label)
