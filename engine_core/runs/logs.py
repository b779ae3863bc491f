"""Log lines of a run on stderr and in files, and its progress display.

``logs/attempt_N/run.log`` has every line, those of other processes too, which send them to the controller. It
rotates at 20 MiB and keeps three old files. ``LOG_LEVEL``
(default INFO) sets the level of both the file and stderr. Secrets are removed from every line.

Progress is a live display on a terminal, else one line per step. Both go to stderr, because results go to stdout.
``NO_COLOR`` is obeyed. Log lines appear above the live display.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import re
import statistics
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self, TextIO

from engine_core.errors import ConfigError, did_you_mean
from engine_core.redaction import harmless
from engine_core.timeline import counts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from rich.console import RenderableType
    from rich.live import Live

    from engine_core.redaction import Redactor
    from engine_core.runs.tracking import RunFolder

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOGGERS = ("engine", "engine_core")  # the run's messages, and loggers named after a module
MAX_BYTES, OLD_FILES = 20 * 1024**2, 3
FILE_ONLY = {"file_only": True}
"""``extra=`` of what belongs into the file alone."""
_hooks_before: list[tuple[Any, Any]] = []  # of the process, while logging is set up
_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup_logging(run: RunFolder) -> contextlib.ExitStack:
    """Send the loggers ``engine`` and ``engine_core`` to stderr and to the run's file; record uncaught exceptions.

    A further call replaces the set-up of the previous one, so one process may run several trainings in sequence.

    Returns:
        A context whose end calls ``close_logging``; it need not be entered.

    Raises:
        ConfigError: ``LOG_LEVEL`` is not a log level.
    """
    level = os.environ.get("LOG_LEVEL", "").upper() or "INFO"
    if level not in LEVELS:
        raise ConfigError(f"LOG_LEVEL is '{os.environ['LOG_LEVEL']}', no level.{did_you_mean(level, LEVELS)}")
    close_logging()
    run.attempt_dir.mkdir(parents=True, exist_ok=True)
    path = run.attempt_dir / "run.log"
    file = logging.handlers.RotatingFileHandler(
        path, maxBytes=MAX_BYTES, backupCount=OLD_FILES, encoding="utf-8"
    )
    file.setFormatter(_Formatter(run.redactor, _FILE_FORMAT))
    console = _Console(level)
    console.setFormatter(_Formatter(run.redactor, "%(levelname)s %(message)s"))
    for logger in map(logging.getLogger, LOGGERS):
        logger.setLevel(level)
        logger.addHandler(file)
        logger.addHandler(console)
    _hooks_before.append((sys.excepthook, threading.excepthook))
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda hook: _log_uncaught(hook.exc_type, hook.exc_value, hook.exc_traceback)
    undo = contextlib.ExitStack()
    undo.callback(close_logging)
    return undo


def close_logging() -> None:
    """Close the log file and undo ``setup_logging``; do nothing if logging is not set up."""
    for logger in map(logging.getLogger, LOGGERS):
        for handler in [h for h in logger.handlers if isinstance(h.formatter, _Formatter)]:
            logger.removeHandler(handler)
            handler.close()
    if _hooks_before:
        sys.excepthook, threading.excepthook = _hooks_before.pop()


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    logger = logging.getLogger("engine")
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        logger.warning("Ended by %s.", kind.__name__)
        return
    logger.critical("Uncaught %s", kind.__name__, exc_info=(kind, error or kind(), trace))


class _Console(logging.Handler):
    """A handler that looks up ``sys.stderr`` at each line: a live display replaces it to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless it is only for the file."""
        if getattr(record, "file_only", False):
            return
        try:
            print(harmless(self.format(record)), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, redact: Redactor, format: str) -> None:
        super().__init__(format)
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record without secrets."""
        return self._redact(super().format(record))


PHASES = {  # name in metrics -> displayed name
    "generate": "gen",
    "reward": "reward",
    "log_probs": "logp",
    "train": "train",
    "sync": "sync",
    "eval": "eval",
    "checkpoint": "save",
}
ACCURACY = re.compile(r"eval/(?:([^/]+)/)?accuracy")

# label, metric names (the first one present is shown), format
FIGURES = (
    ("reward", ("reward/mean",), "{:.3f}"),
    ("loss", ("actor/loss",), "{:.4f}"),
    ("kl", ("actor/kl",), "{:.2g}"),
    ("mismatch", ("mismatch/mean_abs", "mismatch/kl"), "{:.1e}"),
    ("len", ("response_length/mean",), "{:.1f}"),
    ("", ("throughput/generated_tokens_per_second", "throughput/train_tokens_per_second"), "{:,.0f} tok/s"),
)


class Progress:
    """A display of a run's progress: a context manager, or call ``close`` at the end.

    Args:
        total_steps: the last step of the run.
        done: steps done before this attempt.
        title: name of the run, shown on a terminal.
        stream: where to write; default: ``sys.stderr``.
    """

    def __init__(
        self, total_steps: int, done: int = 0, title: str = "", stream: TextIO | None = None
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self.total, self.current, self.title = total_steps, done, title
        self.metrics: Mapping[str, float] = {}
        self.conditions: list[str] = []  #: of the run's health
        self._now = "starting"
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=20)
        self._stream = stream or sys.stderr
        console = Console(file=self._stream)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(self, console=console, refresh_per_second=4, redirect_stdout=False)
            self._live.start()

    def phase(self, name: str) -> None:
        """Set the name of the current phase."""
        self._now = name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        now = time.monotonic()
        if self._last is not None:  # the first step also warms up
            self._seconds.append(now - self._last)
        self._last, self.current, self.metrics = now, step, dict(metrics)
        if self._live is None:
            with contextlib.suppress(OSError):  # its reader is gone; the run continues
                print(step_line(step, self.total, metrics, self.eta), file=self._stream, flush=True)

    @property
    def eta(self) -> float | None:
        """Estimated seconds to the end at the pace of the last 20 steps without the first; None before the second."""
        if not self._seconds:
            return None
        return statistics.fmean(self._seconds) * max(0, self.total - self.current)

    def close(self) -> None:
        """End the display and leave its last state on the screen; safe to call twice."""
        self._now = "finished" if self.current >= self.total else f"stopped after step {self.current}"
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __rich__(self) -> RenderableType:
        """Return the live display: title, progress bar, the line of the last step, current phase, conditions."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = step_line(self.current, self.total, self.metrics, self.eta)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(Text(self.title, "bold"), ProgressBar(self.total, self.current, 40))
        noted = [Text(f"health: {', '.join(self.conditions)}", "yellow")] if self.conditions else []
        return Group(bar, Text(f"{line}  now: {self._now}{counts()}"), *noted)


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the figures found in a step's metrics, as (label, text); the loss only if there is no reward."""
    shown = []
    for label, names, form in FIGURES:
        name = next((name for name in names if name in metrics), None)
        if name is not None and not (label == "loss" and "reward/mean" in metrics):
            shown.append((label, form.format(metrics[name])))
    at = next((i + 1 for i, (label, _) in enumerate(shown) if label in ("reward", "loss")), 0)
    shown[at:at] = [
        (f"acc {found[1] or ''}".strip(), with_interval(metrics, name, "{:.3f}"))
        for name in metrics
        if (found := ACCURACY.fullmatch(name))
    ]
    return shown


def half_width(metrics: Mapping[str, float], name: str) -> float | None:
    """Return half the width of a metric's 95% interval; None if it has no interval."""
    bounds = [metrics.get(f"{name}_{end}") for end in ("low", "high")]
    return None if None in bounds else (bounds[1] - bounds[0]) / 2  # type: ignore[operator]


def with_interval(metrics: Mapping[str, float], name: str, form: str = "{:.6g}") -> str:
    """Return a metric as ``0.83 ± 0.04``, or formatted with ``form`` if it has no interval."""
    half = half_width(metrics, name)
    return form.format(metrics[name]) if half is None else f"{metrics[name]:.2f} ± {half:.2f}"


def step_line(step: int, total: int, metrics: Mapping[str, float], eta: float | None) -> str:
    """Return one step as a line: ``step 12/100  reward 0.412  kl 0.001  ...  gen 0.8s train 0.5s  ETA 1m20s``."""
    spent = {name: metrics.get(f"time/{phase}", 0.0) for phase, name in PHASES.items()}
    times = [f"{name} {seconds:.1f}s" for name, seconds in spent.items() if seconds >= 0.05]
    parts = (
        f"step {step:>{len(str(total))}}/{total}",
        *(f"{label} {value}".strip() for label, value in figures(metrics)),
        " ".join(times),
        "" if eta is None else f"ETA {clock(eta)}",
    )
    return "  ".join(part for part in parts if part)


def clock(seconds: float) -> str:
    """Return a duration as text: ``8s``, ``1m20s``, ``2h05m``, ``3d04h``."""
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"
