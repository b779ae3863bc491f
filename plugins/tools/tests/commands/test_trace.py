"""engine trace, on a run folder with a timeline."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.resolved.toml").touch()
    spans = [["controller", "run", f"step {step}", float(step), step + 1.0] for step in range(1, 5)]
    (tmp_path / "timeline.jsonl").write_text("\n".join(["", *map(json.dumps, spans)]))
    return tmp_path


def test_the_trace_of_steps_is_written_to_a_file(engine, run):
    answer = engine("trace", run, "--steps", "2:3", "-o", "two.json")
    assert (answer.code, answer.out) == (0, "two.json\n")
    events = json.loads((run / "two.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step 2", "step 3"]


@pytest.mark.parametrize("steps", ["x", "5:", "1:2:3", "-1"])
def test_what_is_no_range_of_steps_is_refused(engine, run, steps):
    answer = engine("trace", run, f"--steps={steps}")
    assert answer.code == 2
    assert f"--steps '{steps}': expected a step or FIRST:LAST, such as 5 or 5:8." in answer.err


def test_a_run_without_a_timeline_is_an_error(engine, run):
    (run / "timeline.jsonl").unlink()
    answer = engine("trace", run)
    assert answer.code == 4
    assert "has no span: no step of this run has ended" in answer.err


def test_the_command_imports_nothing_heavy(run):
    code = f"import sys; from engine_core.cli.main import main; main(['trace', {str(run)!r}]); print(*sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "engine_plugin_tools.timeline" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "pyarrow"}
