"""What is shown while a run goes."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from engine_core.runs.logs import Progress, clock, figures, step_line
from engine_core.timeline import counting

RL = {
    "reward/mean": 0.4123,
    "actor/loss": 0.02,
    "actor/kl": 0.00123,
    "mismatch/kl": -3e-9,
    "mismatch/mean_abs": 2.1e-6,
    "response_length/mean": 14.23,
    "throughput/generated_tokens_per_second": 1234.4,
    "time/generate": 0.8,
    "time/reward": 0.01,
    "time/train": 0.52,
    "time/step": 1.4,
}


def test_a_step_is_one_line():
    assert step_line(12, 100, RL, eta=80.4) == (
        "step  12/100  reward 0.412  kl 0.0012  mismatch 2.1e-06  len 14.2  1,234 tok/s  gen 0.8s train 0.5s  ETA 1m20s"
    )


def test_without_a_reward_the_loss_is_shown():
    metrics = {"actor/loss": 1.5, "throughput/train_tokens_per_second": 55555.4}
    assert step_line(1, 3, metrics, eta=None) == "step 1/3  loss 1.5000  55,555 tok/s"


def test_an_evaluation_is_shown_with_its_step():
    assert ("acc", "0.875") in figures({"reward/mean": 0.5, "eval/accuracy": 0.875})


def test_a_value_that_is_not_a_number_breaks_nothing():
    metrics = {"reward/mean": float("nan"), "actor/kl": float("inf")}
    assert step_line(1, 3, metrics, eta=None) == "step 1/3  reward nan  kl inf"
    progress = Progress(3, stream=io.StringIO())
    progress.step(1, metrics)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (80, "1m20s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (273600, "3d04h"),
    ],
)
def test_times_read_like_times(seconds, text):
    assert clock(seconds) == text


def test_elsewhere_than_on_a_terminal_lines_are_written_and_nothing_else():
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.phase("generate")
        progress.step(1, {"reward/mean": 0.25})
        progress.step(2, {"reward/mean": 0.5})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/2  reward 0.250")
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_follows_the_steps_of_this_attempt(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(10, done=6, stream=io.StringIO())
    now[0] += 30.0
    progress.step(7, {})
    assert progress.eta is None  # the first step warms up
    now[0] += 2.0
    progress.step(8, {})
    assert progress.eta == pytest.approx(4.0)


def test_the_live_display_shows_the_run():
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    progress = Progress(100, title="math-1", stream=io.StringIO())
    progress.step(12, RL)
    progress.step(13, RL)
    progress.phase("train")
    with counting(4) as outer:
        outer(2)
        with counting(6) as inner:
            console.print(progress)
            inner(4)
            console.print(progress)
    console.print(progress)
    shown = console.file.getvalue()
    for part in ("math-1", "step  13/100", "reward 0.412", "1,234 tok/s", "gen 0.8s", "now: train", "ETA"):
        assert part in shown
    assert "health" not in shown
    progress.conditions = ["truncation", "mismatch"]
    console.print(progress)
    assert "health: truncation, mismatch" in console.file.getvalue()
    for part in ("now: train 2/4 0/6\n", "now: train 2/4 4/6\n", "now: train\n"):
        assert part in re.sub(" +\n", "\n", shown)


SCRIPT = """
import logging, sys, time
from types import SimpleNamespace
from pathlib import Path
from engine_core.runs.logs import setup_logging
from engine_core.runs.logs import Progress
from engine_core.redaction import Redactor
undo = setup_logging(SimpleNamespace(attempt_dir=Path(sys.argv[1]), redactor=Redactor([])))
with Progress(3) as progress:
    for step in (1, 2, 3):
        logging.getLogger("engine").info("note %d", step)
        progress.step(step, {"reward/mean": 0.5})
undo.close()
"""


def on_terminal(tmp_path, **env: str) -> str:
    """Everything a terminal of 100 columns is sent by SCRIPT."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "24", **env}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    chunks = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(master)
    assert process.wait(20) == 0
    return b"".join(chunks).decode()


def test_on_a_terminal_log_lines_stay_whole_above_the_display(tmp_path):
    sent = on_terminal(tmp_path)
    assert "\x1b[?25l" in sent  # the cursor is hidden while it lives ...
    assert sent.rindex("\x1b[?25h") > sent.rindex("step")  # ... and comes back
    for step in (1, 2, 3):
        assert f"INFO note {step}" in sent
    assert sent.rindex("INFO note 3") < sent.rindex("now: finished")
    assert "note 3" in (tmp_path / "run.log").read_text()


def test_no_color_is_obeyed_on_a_terminal(tmp_path):
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7]|38)\b[0-9;]*m", on_terminal(tmp_path, NO_COLOR="1"))


def test_a_dumb_terminal_gets_lines(tmp_path):
    sent = on_terminal(tmp_path, TERM="dumb")
    assert "\x1b" not in sent
    assert "step 3/3  reward 0.500" in sent


def test_the_display_leaves_stderr_as_it_was():
    before = sys.stderr
    with Progress(1):
        logging.getLogger("engine").debug("x")
    assert sys.stderr is before
