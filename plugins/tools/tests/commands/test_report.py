"""report, watch, runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from report_runs import rollout

from engine_core.config import EngineConfig
from engine_core.runs.tracking import RunFolder, write_rollouts


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run of one step, in ``runs``."""
    config = EngineConfig(run={"dir": str(tmp_path / "runs"), "name": "first"}, tracking={"trackers": []})
    folder = RunFolder.create(config)
    folder.metrics_file.write_text('{"step": 1, "reward/mean": 0.25}\n')
    folder.close()
    return folder.path


def test_report_prints_the_page_that_it_wrote(engine, run, tmp_path):
    assert engine("report", "first").out == f"{run / 'report.html'}\n"
    assert (run / "report.html").stat().st_size > 1000
    assert engine("report", "first", "--out", tmp_path / "page.html").out == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").exists()


def test_a_run_named_twice_is_shown_once(engine, run):
    assert engine("report", "first", "latest").out == f"{run / 'report.html'}\n"


def test_a_file_that_cannot_be_written_or_read_is_one_line(engine, run, tmp_path):
    answer = engine("report", "first", "--out", tmp_path / "none" / "page.html")
    assert answer.code == 5
    assert answer.err == f"engine: '{tmp_path}/none/page.html' cannot be written: No such file or directory. Choose another place.\n"  # fmt: skip
    (run / "config.resolved.toml").write_text("steps =")
    answer = engine("report", "first")
    assert answer.code == 4
    assert answer.err.startswith(f"engine: {run}/config.resolved.toml is no TOML: Invalid value (at end of document).")  # fmt: skip


def test_runs_lists_the_newest_first(engine, run, tmp_path):
    older = tmp_path / "runs" / "older"
    older.mkdir()
    (older / "config.resolved.toml").touch()
    (older / "metrics.jsonl").write_text('{"step": 3, "time": 1.0}\n')
    lines = [line.split() for line in engine("runs").out.splitlines()]
    assert lines[0] == ["run", "state", "steps", "reward", "age", "folder"]
    assert lines[1][:4] == ["first", "stopped", "1/?", "0.250"]
    assert lines[2][:4] == ["older", "stopped", "3/?", "-"]
    assert [each["name"] for each in json.loads(engine("runs", "runs", "--json").out)] == ["first", "older"]


def test_runs_of_a_folder_without_runs_says_what_to_name(engine):
    answer = engine("runs", "nowhere")
    assert answer.code == 4
    assert answer.err == "engine: 'nowhere' holds no run. Name the folder of the runs: engine runs FOLDER.\n"


def test_neither_torch_nor_pandas_nor_matplotlib_is_imported(run):
    episode = rollout("said", 1.0)
    episode.messages = [{"role": "assistant", "content": "said"}]
    episode.extras = {"turns": torch.tensor([0, 1])}
    write_rollouts(run / "rollouts", 1, [episode])
    code = (
        "import sys\nfrom engine_core.cli.main import main\nimport engine_plugin_tools.watch\n"
        f"assert main(['report', {str(run)!r}]) == 0\nassert main(['runs', {str(run.parent)!r}]) == 0\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
