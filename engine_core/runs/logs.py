"""Logging of a run: warnings and progress notes on stderr, everything in one file a rank.

``logs/attempt_N/rank_R.log`` rotates at 20 MiB and keeps three old files. ``LOG_LEVEL`` (default
INFO) sets what both receive. Every line passes the redactor.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import threading
from typing import TYPE_CHECKING

from engine_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from types import TracebackType

    from engine_core.redaction import Redactor
    from engine_core.runs.tracking import RunFolder

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOGGERS = ("engine", "engine_core")  # the run's own notes, and those of modules named after themselves
MAX_BYTES, OLD_FILES = 20 * 1024**2, 3
FILE_ONLY = {"file_only": True}
"""``extra=`` of what belongs into the file alone."""
_FILE_FORMAT = "%(asctime)s %(levelname)-7s rank %(rank)d  %(name)s: %(message)s"


def setup_logging(run: RunFolder, rank: int = 0) -> contextlib.ExitStack:
    """Send the loggers ``engine`` and ``engine_core`` to stderr and to this rank's file; record uncaught exceptions.

    Ranks other than 0 show only warnings on stderr. Called again, it replaces what it set up
    before, so one process may run several trainings after another.

    Returns:
        A context whose end undoes it (``close_logging``); it need not be entered.

    Raises:
        ConfigError: ``LOG_LEVEL`` names no level.
    """
    level = os.environ.get("LOG_LEVEL", "").upper() or "INFO"
    if level not in LEVELS:
        raise ConfigError(f"LOG_LEVEL is '{os.environ['LOG_LEVEL']}', no level.{did_you_mean(level, LEVELS)}")
    close_logging()
    run.attempt_dir.mkdir(parents=True, exist_ok=True)
    path = run.attempt_dir / f"rank_{rank}.log"
    file = logging.handlers.RotatingFileHandler(
        path, maxBytes=MAX_BYTES, backupCount=OLD_FILES, encoding="utf-8"
    )
    file.setFormatter(_Formatter(run.redactor, rank, _FILE_FORMAT))
    console = _Console(level if rank == 0 else max(logging.WARNING, getattr(logging, level)))
    shown = "%(levelname)s %(message)s" if rank == 0 else _FILE_FORMAT
    console.setFormatter(_Formatter(run.redactor, rank, shown))
    for logger in map(logging.getLogger, LOGGERS):
        logger.setLevel(level)
        logger.addHandler(file)
        logger.addHandler(console)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda hook: _log_uncaught(hook.exc_type, hook.exc_value, hook.exc_traceback)
    undo = contextlib.ExitStack()
    undo.callback(close_logging)
    return undo


def close_logging() -> None:
    """Close the file and undo what ``setup_logging`` did; nothing to undo is no error."""
    for logger in map(logging.getLogger, LOGGERS):
        for handler in [h for h in logger.handlers if isinstance(h.formatter, _Formatter)]:
            logger.removeHandler(handler)
            handler.close()
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    logger = logging.getLogger("engine")
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        logger.warning("Ended by %s.", kind.__name__)
        return
    logger.critical("Uncaught %s", kind.__name__, exc_info=(kind, error or kind(), trace))


class _Console(logging.Handler):
    """Writes to whatever ``sys.stderr`` is now: a live display replaces it and prints lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, redact: Redactor, rank: int, format: str) -> None:
        super().__init__(format)
        self._redact, self._rank = redact, rank

    def format(self, record: logging.LogRecord) -> str:
        record.rank = self._rank
        return self._redact(super().format(record))
