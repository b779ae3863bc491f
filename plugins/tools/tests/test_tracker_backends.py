"""Each tracker with a store writes to its own local or offline backend, which is opened and read back.

The libraries are in ``.venv/trackers`` (``make .venv/.trackers``): some need other versions than the engine's, which come first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = Path(sys.prefix) / "trackers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LIBRARIES.is_dir(), reason="make .venv/.trackers installs the backends"),
]

WRITE = """
import json, os, sys
from pathlib import Path
sys.path.append(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from test_trackers import Plugins, config_in, rollouts
from engine_core.runs.tracking import RunFolder, TrackerHub
from engine_plugin_tools import tracker_options
import torch

folder, name, table, options = Path(sys.argv[3]), sys.argv[4], sys.argv[5], json.loads(sys.argv[6])
config = config_in(folder, tracking={"trackers": [name]})
config.run.fail_above = {"actor/approx_kl": 0.5}
config.tracking.options = {name: getattr(tracker_options, table)(details_every_steps=2, **options)}
run = RunFolder.create(config)
for first in (1, 3):  # the second time it is resumed
    if first > 1:
        run.close()
        run = RunFolder.open(run.path)
        run.claim(2)
    hub = TrackerHub(run, config, Plugins())
    hub.start()
    for step in (first, first + 1):
        hub.trackers.event("rollouts_finished", step, {"rollouts": rollouts()})
        hub.trackers.event("advantages_computed", step, {"advantages": torch.tensor([-1.0])})
        hub.log(step, {"reward/mean": step / 4, "eval/pass@4": 0.5})
    hub.trackers.event("run_finished", first + 1, {"metrics": {}})
    hub.trackers.close(60)
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes four steps with a tracker in two attempts, and runs ``read`` in the same environment."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))

    def call(program: str, *words: str):
        done = subprocess.run(
            [sys.executable, "-c", program, str(LIBRARIES), *words],
            capture_output=True, text=True, timeout=120, cwd=tmp_path, env=os.environ, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Tracker '" not in done.stderr, done.stderr
        return done.stdout

    def write(name: str, table: str, read: str, **options):
        out = call(WRITE, str(Path(__file__).parent), str(tmp_path), name, table, json.dumps(options))
        assert out == ""  # stdout has results alone
        return json.loads(call("import json, sys; sys.path.append(sys.argv[1])\n" + read).splitlines()[-1])

    return write


def test_wandb_offline_has_metrics_completions_histograms_config_and_artifacts(written, tmp_path):
    read = """
import struct
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):  # a log of LevelDB after a header of 7 bytes: blocks of 32 KiB, records that may span some
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""

found = {"files": [], "rows": [], "ids": []}
for file in sorted(Path("a/wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["ids"].append([record.run.run_id, record.run.display_name])
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            found["config"] = config.get("data", found.get("config"))
        elif kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found["rows"].append([record.history.step.num, sorted(row), row.get("reward/mean")])
        elif kind == "artifact":
            found["files"].append(record.artifact.name)
print(json.dumps(found))
"""
    found = written("wandb", "WandbOptions", read, project="p", mode="offline")
    assert [row[0] for row in found["rows"]] == [1, 2, 3, 4]
    assert [row[2] for row in found["rows"]] == [0.25, 0.5, 0.75, 1.0]
    names = ("advantage", "response_length", "reward")
    shown = {"completions/path", *(f"distribution/{name}/values" for name in names)}
    assert [shown <= set(row[1]) for row in found["rows"]] == [False, True, False, True]
    assert found["config"]["prompts_per_step"] == 64
    assert {"a-config.resolved.toml", "a-env.json"} <= set(found["files"])
    first, *others = found["ids"]
    assert first[1] == "a"
    assert all(other == first for other in others)
    table, _ = sorted(tmp_path.glob("a/wandb/offline-run-*/files/media/table/*.json"))
    rows = json.loads(table.read_text())
    assert rows["columns"] == ["step", "reward", "prompt", "response"]
    assert rows["data"][0] == [2, 0.0, "2+2=\n", "0 | *"]


def test_trackio_has_metrics_completions_histograms_config_and_artifacts(written):
    read = """
from trackio.sqlite_storage import SQLiteStorage

print(json.dumps([SQLiteStorage.get_runs("p"), SQLiteStorage.get_logs("p", "a"), SQLiteStorage.get_run_config("p", "a"),
                  str(SQLiteStorage.get_artifacts("p"))]))
"""
    runs, lines, config, artifacts = written("trackio", "TrackioOptions", read, project="p")
    assert len(runs) == 1
    assert {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line} == {
        1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0,
    }  # fmt: skip
    tables = [line["completions"]["_value"] for line in lines if "completions" in line]
    assert [len(table) for table in tables] == [3, 3]
    assert tables[0][0] == {"step": 2, "reward": 0.0, "prompt": "2+2=\n", "response": "0 | *"}
    counts = [sum(line["distribution/reward"]["values"]) for line in lines if "distribution/reward" in line]
    assert counts == [2, 2]  # without the rollout that is not valid
    assert config["data"]["prompts_per_step"] == 64
    assert "a-config.resolved.toml" in artifacts


def test_mlflow_has_metrics_completions_histograms_config_and_artifacts(written):
    read = """
from mlflow.tracking import MlflowClient

client = MlflowClient("sqlite:///m.db")
[run] = client.search_runs([client.get_experiment_by_name("p").experiment_id])
id = run.info.run_id
metrics = [[m.step, m.value] for m in client.get_metric_history(id, "reward/mean")]
files = {a.path for folder in (None, "distribution/reward") for a in client.list_artifacts(id, folder)}
texts = {name: json.loads(open(client.download_artifacts(id, name)).read())
         for name in ("completions.json", "distribution/reward/step_000002.json")}
print()
print(json.dumps([run.info.run_name, run.info.status, metrics, sorted(files), texts, run.data.params]))
"""
    name, status, metrics, files, texts, params = written(
        "mlflow", "MlflowOptions", read, uri="sqlite:///m.db", experiment="p"
    )
    assert (name, status) == ("a", "FINISHED")
    assert metrics == [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]]
    assert {"config.resolved.toml", "env.json", "distribution/reward/step_000004.json"} <= set(files)
    table = texts["completions.json"]
    assert len(table["data"]) == 6
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == {
        "step": 2, "reward": 0.0, "prompt": "2+2=\n", "response": "0 | *",
    }  # fmt: skip
    assert sum(texts["distribution/reward/step_000002.json"]["counts"]) == 2
    assert params["data.prompts_per_step"] == "64"
    assert params["run.fail_above.actor/approx_kl"] == "0.5"
