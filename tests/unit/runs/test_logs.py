"""Where log lines go."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from engine_core.errors import ConfigError
from engine_core.redaction import Redactor
from engine_core.runs import logs

log = logging.getLogger("engine")


@pytest.fixture
def run(tmp_path):
    yield SimpleNamespace(attempt_dir=tmp_path / "logs" / "attempt_0", redactor=Redactor(["s3cret-value"]))
    logs.close_logging()


def test_lines_go_to_the_file_with_their_logger_and_to_stderr(run, capsys):
    logs.setup_logging(run)
    log.info("one")
    log.warning("two")
    text = (run.attempt_dir / "run.log").read_text()
    assert "INFO    engine: one" in text
    assert "WARNING engine: two" in text
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["INFO one", "WARNING two"]
    assert shown.out == ""


def test_modules_named_after_themselves_are_logged_too(run):
    logs.setup_logging(run)
    logging.getLogger("engine_core.somewhere").info("from a module")
    assert "engine_core.somewhere: from a module" in (run.attempt_dir / "run.log").read_text()


def test_log_level_sets_what_is_received(run, capsys, monkeypatch):
    log.setLevel(logging.INFO)
    monkeypatch.setenv("LOG_LEVEL", "debug")
    logs.setup_logging(run)
    log.debug("detail")
    assert "DEBUG detail" in capsys.readouterr().err
    monkeypatch.setenv("LOG_LEVEL", "ERROR")
    logs.setup_logging(run)
    log.warning("not now")
    assert capsys.readouterr().err == ""


def test_what_is_for_the_file_alone_is_not_shown(run, capsys):
    logs.setup_logging(run)
    log.error("with its traceback", extra=logs.FILE_ONLY)
    assert "with its traceback" in (run.attempt_dir / "run.log").read_text()
    assert capsys.readouterr().err == ""


def test_an_unknown_level_is_refused_with_the_known_ones(run, monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "debgu")
    with pytest.raises(ConfigError, match=r"LOG_LEVEL is 'debgu', no level\. Did you mean 'DEBUG'"):
        logs.setup_logging(run)


def test_files_rotate(run, monkeypatch):
    monkeypatch.setattr(logs, "MAX_BYTES", 300)
    logs.setup_logging(run)
    for i in range(40):
        log.info("line %d", i)
    names = sorted(file.name for file in run.attempt_dir.iterdir())
    assert names == ["run.log", "run.log.1", "run.log.2", "run.log.3"]


def test_setting_up_again_writes_each_line_once(run, capsys):
    logs.setup_logging(run)
    logs.setup_logging(run)
    log.info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_the_end_of_the_context_undoes_it(run, monkeypatch):
    def before(*_):
        """Stand for the hook of a program."""

    monkeypatch.setattr(sys, "excepthook", before)
    with logs.setup_logging(run):
        assert sys.excepthook is not before
    log.info("afterwards")
    assert "afterwards" not in (run.attempt_dir / "run.log").read_text()
    assert sys.excepthook is before
    logs.close_logging()
    assert sys.excepthook is before


def test_secrets_are_redacted_in_messages_and_tracebacks(run, capsys):
    logs.setup_logging(run)
    try:
        raise ValueError("connecting with s3cret-value")
    except ValueError:
        log.exception("failed at https://s3cret-value@host")
    text = (run.attempt_dir / "run.log").read_text() + capsys.readouterr().err
    assert "s3cret-value" not in text
    assert text.count("ValueError: connecting with [redacted]") == 2


def test_an_exception_in_a_thread_is_recorded(run, capsys):
    logs.setup_logging(run)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert "ZeroDivisionError" in (run.attempt_dir / "run.log").read_text()


def test_an_uncaught_exception_is_in_the_file_and_on_the_terminal_once(tmp_path):
    code = (
        "import sys; from types import SimpleNamespace; from pathlib import Path\n"
        "from engine_core.runs.logs import setup_logging; from engine_core.redaction import Redactor\n"
        "setup_logging(SimpleNamespace(attempt_dir=Path(sys.argv[1]), redactor=Redactor(['s3cret-value'])))\n"
        "raise RuntimeError('boom s3cret-value')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: boom [redacted]") == 1
    assert "RuntimeError: boom [redacted]" in (tmp_path / "run.log").read_text()
    assert "s3cret-value" not in done.stderr
