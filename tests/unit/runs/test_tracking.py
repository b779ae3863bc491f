"""The run folder, and the hub that writes metrics."""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from engine_core.config import EngineConfig
from engine_core.errors import DataError, EnvironmentProblem
from engine_core.runs.tracking import RunFolder, Tracker, TrackerHub
from engine_core.specs import Options
from engine_plugin_tools.tracker_threads import Trackers

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "canary-4711-do-not-write"


class Plugins:
    """Resolves trackers from a dict, as a PluginSet does from entry points."""

    def __init__(self, **trackers):
        self.trackers = trackers

    def require(self, kind, name):
        assert (kind, name) == ("parts", "trackers")
        return Trackers

    def resolve(self, kind, name):
        assert kind == "trackers"
        return self.trackers[name]

    def versions(self):
        return {"engine-plugin-x": "1.2.3"}


class SpyOptions(Options):
    password: str


def config_in(folder: Path, name: str | None = "a", **tables) -> EngineConfig:
    return EngineConfig(run={"dir": str(folder / "runs"), "name": name, "seed": 7}, **tables)


def hub_of(run: RunFolder, folder: Path, **options) -> TrackerHub:
    trackers = options.pop("trackers", {})
    config = config_in(folder, tracking={"trackers": list(trackers)})
    hub = TrackerHub(run, config, Plugins(**trackers), **options)
    hub.start()
    return hub


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(config_in(tmp_path))
    yield run
    run.close()


# Folder


def test_a_run_folder_describes_the_run(tmp_path, monkeypatch):
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1"}\n')
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NOT_ON_THE_LIST", "private")
    run = RunFolder.create(config_in(tmp_path, data={"train": str(data)}), Plugins())
    text = (run.path / "env.json").read_text()
    env = json.loads(text)
    assert env["plugins"] == {"engine-plugin-x": "1.2.3"}
    assert env["seeds"] == {"run": 7, "model": 0}
    assert env["data"][str(data)] == {"sha256": hashlib.sha256(data.read_bytes()).hexdigest(), "bytes": 16}
    assert env["packages"]["torch"].startswith("2.")
    assert env["environment"]["OMP_NUM_THREADS"] == "1"
    assert "private" not in text
    assert "prompts_per_step" in (run.path / "config.resolved.toml").read_text()
    assert isinstance(json.loads((run.path / "config.origin.json").read_text()), dict)
    assert run.checkpoints.is_dir()
    assert run.rollouts_dir.is_dir()


def test_describing_a_run_needs_no_torch(tmp_path):
    code = (
        "import sys, engine_core.runs.tracking, engine_core.runs.logs, engine_core.runs.logs, engine_core.runs.machine, engine_plugin_tools.report\n"
        "engine_core.runs.machine.memory_metrics()\n"
        "print([m for m in ('torch', 'matplotlib', 'pyarrow', 'numpy', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_git_commit_is_written_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json.loads((RunFolder.create(config_in(tmp_path)).path / "env.json").read_text())["git"] is None
    for command in (
        "init -q",
        "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x",
    ):
        subprocess.run(["git", *command.split()], check=True)
    sha = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    env = json.loads((RunFolder.create(config_in(tmp_path, "b")).path / "env.json").read_text())
    assert env["git"] == {"sha": sha, "changed_files": 0}


def test_paths_with_spaces_and_unicode_work(tmp_path):
    run = RunFolder.create(config_in(tmp_path / "mit Leerzeichen", "Übung 1"))
    assert RunFolder.open(run.path).path == run.path


def test_latest_is_the_newest_run(tmp_path, monkeypatch):
    first = RunFolder.create(config_in(tmp_path, "first"))
    RunFolder.create(config_in(tmp_path, "second"))
    monkeypatch.chdir(tmp_path)
    assert RunFolder.open("latest").path.name == "second"
    assert RunFolder.open("runs/latest").path.name == "second"
    assert RunFolder.open("first").path.name == "first"
    first.close()
    again = RunFolder.open("first")
    again.claim(0)
    again.rewind(0, config_in(tmp_path, "first"))
    again.close()
    assert RunFolder.open("latest").path.name == "first"


def test_a_run_that_is_not_there_names_the_nearest(tmp_path):
    RunFolder.create(config_in(tmp_path, "arithmetic"))
    with pytest.raises(DataError, match="Did you mean 'arithmetic'"):
        RunFolder.open("arithmetik", runs=tmp_path / "runs")


def test_a_misspelt_run_in_another_folder_names_its_neighbours(tmp_path, monkeypatch):
    RunFolder.create(config_in(tmp_path, "arithmetic"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="Did you mean 'arithmetic'"):
        RunFolder.open(tmp_path / "runs" / "arithmetik")


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path, run):
    hub = hub_of(run, tmp_path)
    for step in range(1, 6):
        hub.log(step, {"reward/mean": step / 10})
        run.rollout_file(step).touch()
    (run.rollouts_dir / "step_000005_good.parquet").touch()  # of the user
    hub.close()
    with run.metrics_file.open("a") as file:
        file.write('{"step": 6, "rew')  # killed while writing
    run.close()
    resumed = RunFolder.open(run.path)
    resumed.claim(3)
    assert len(run.read_metrics()) == 5, "claiming alone drops nothing"
    resumed.rewind(3, config_in(tmp_path))
    hub = hub_of(resumed, tmp_path)
    hub.log(4, {"reward/mean": 0.9})
    assert [(line["step"], line["reward/mean"]) for line in run.read_metrics()] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.9),
    ]
    assert sorted(file.name for file in run.rollouts_dir.iterdir()) == [
        *(f"step_{i:06d}.parquet" for i in (1, 2, 3)),
        "step_000005_good.parquet",
    ]
    assert resumed.attempt_dir.name == "attempt_1"
    assert (resumed.attempt_dir / "config.resolved.toml").exists()
    hub.close()


@pytest.mark.parametrize(
    "garbled", ["\0" * 40, '{"step": 2, "loss', "3", '{"loss": 1}'], ids=["zeros", "cut", "number", "no step"]
)
def test_lines_that_a_loss_of_power_garbled_are_left_out_with_a_warning(tmp_path, run, caplog, garbled):
    hub = hub_of(run, tmp_path)
    hub.log(1, {})
    hub.close()
    run.close()
    with run.metrics_file.open("a") as file:
        file.write(garbled + "\n")
    resumed = RunFolder.open(run.path)
    resumed.claim(1)
    resumed.rewind(1, config_in(tmp_path))
    assert "1 lines of" in caplog.text
    assert [line["step"] for line in resumed.read_metrics()] == [1]
    run.metrics_file.unlink()
    resumed.rewind(1, config_in(tmp_path))
    assert resumed.read_metrics() == []
    resumed.close()


def test_the_line_of_a_step_that_was_not_finished_is_written_again(tmp_path, run):
    hub = hub_of(run, tmp_path)
    for step in (1, 2):
        hub.log(step, {})
        run.rollout_file(step).touch()
    hub.close()
    run.close()
    resumed = RunFolder.open(run.path)
    resumed.claim(2)
    resumed.rewind(2, config_in(tmp_path), unfinished=True)
    assert [line["step"] for line in run.read_metrics()] == [1]
    assert run.rollout_file(2).exists()
    resumed.close()


def test_a_run_continues_with_the_config_of_its_last_attempt_that_trained_and_keeps_those_before(
    tmp_path, run
):
    run.close()
    for rows in (11, 12):
        resumed = RunFolder.open(run.path)
        resumed.claim(0)
        resumed.rewind(0, config_in(tmp_path, data={"prompts_per_step": rows}))
        resumed.close()
    failed = RunFolder.open(run.path)
    failed.claim(0)  # and never came to training
    failed.close()
    assert "prompts_per_step = 12\n" in failed.config_file.read_text()
    first, second, third = (
        (run.logs_dir / f"attempt_{number}" / "config.resolved.toml").read_text() for number in range(3)
    )
    assert "prompts_per_step = 11\n" not in first
    assert "prompts_per_step = 11\n" in second
    assert third == failed.config_file.read_text()
    assert not (failed.attempt_dir / "config.resolved.toml").exists()


def test_a_run_whose_lock_is_held_for_an_instant_is_opened(run):
    run.close()
    with (run.path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.02, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        again = RunFolder.open(run.path)
        again.claim(0)
        again.close()


def test_a_run_in_use_is_refused_with_its_holder(run):
    with pytest.raises(EnvironmentProblem, match=r"is in use by process \d+ on"):
        RunFolder.open(run.path).claim(0)
    assert not (run.logs_dir / "attempt_1").exists()
    run.close()
    again = RunFolder.open(run.path)
    again.claim(0)
    again.close()


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, caplog):
    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    run = RunFolder.create(config_in(tmp_path))
    assert f"Cannot lock {run.path} ([Errno 37] No locks available)" in caplog.text
    run.close()


def test_secrets_are_in_no_file_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setattr(sys, "argv", ["engine", "train", f"--set=x={CANARY}"])
    seen = {}

    class Spy(Tracker):
        def start(self, run, config):
            seen.update(config)

        def log(self, step, metrics):
            pass

    config = config_in(
        tmp_path, model={"path": f"https://{CANARY}@host/x", "override": {"api_key": "hunter2secret"}}
    )
    config.tracking.trackers = ["spy"]
    config.tracking.options = {"spy": SpyOptions(password="in-an-option-table")}
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, Plugins(spy=Spy))
    hub.start()
    hub.close()
    written = "".join(file.read_text() for file in run.path.rglob("*") if file.is_file())
    for secret in (CANARY, "hunter2secret", "in-an-option-table"):
        assert secret not in written + json.dumps(seen)
    assert seen["tracking"]["spy"] == {"password": "[redacted]"}
    assert seen["model"]["path"] == "https://[redacted]@host/x"


# Metrics


def test_every_step_is_one_line_written_at_once(tmp_path, run):
    hub = hub_of(run, tmp_path)
    hub.log(1, {"reward/mean": 0.5, "n": 3})
    line = json.loads(run.metrics_file.read_text())
    assert abs(line.pop("time") - time.time()) < 5
    assert line == {"step": 1, "reward/mean": 0.5, "n": 3}
    hub.close()


def test_metrics_deleted_during_a_run_end_it(tmp_path, run):
    hub = hub_of(run, tmp_path)
    hub.log(1, {"a": 1.0})
    run.metrics_file.unlink()
    with pytest.raises(EnvironmentProblem, match=r"metrics\.jsonl was deleted during the run"):
        hub.log(2, {"a": 2.0})


def test_values_that_are_not_finite_are_null_and_counted(tmp_path, run):
    seen = []

    class Spy(Tracker):
        def log(self, step, metrics):
            seen.append(metrics)

    hub = hub_of(run, tmp_path, trackers={"spy": Spy})
    hub.log(1, {"a": float("nan"), "b": float("-inf"), "c": 1.0})
    hub.close()
    text = run.metrics_file.read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (line["a"], line["b"], line["c"], line["tracking/non_finite"]) == (None, None, 1.0, 2)
    assert seen == [{"c": 1.0, "tracking/non_finite": 2}]


def test_a_metric_that_is_no_number_is_named(tmp_path, run):
    hub = hub_of(run, tmp_path)
    with pytest.raises(TypeError, match=r"Metric 'reward/mean' is 'high' \(str\), not a number\."):
        hub.log(1, {"reward/mean": "high"})
    hub.close()
    assert run.metrics_file.read_text() == ""
