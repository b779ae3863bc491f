"""Trackers receive the events of a run."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from engine_core.config import EngineConfig
from engine_core.runs import tracking
from engine_core.runs.tracking import HELD, RunFolder, Tracker, TrackerHub


def hub_of(tracker, folder) -> TrackerHub:
    config = EngineConfig(run={"dir": str(folder), "name": "a"}, tracking={"trackers": ["x"]})
    plugins = SimpleNamespace(resolve=lambda kind, name: tracker, versions=dict)
    hub = TrackerHub(RunFolder.create(config), config, plugins)
    hub.start()
    return hub


def test_a_tracker_receives_events_between_metrics_in_their_order(tmp_path):
    seen = []

    class Spy(Tracker):
        def log(self, step, metrics):
            seen.append(("log", step))

        def on_event(self, event, step, data):
            seen.append((event, step, data))

    hub = hub_of(Spy, tmp_path)
    hub.event("rollouts_finished", 1, {"rollouts": []})
    hub.log(1, {"a": 1.0})
    hub.event("run_finished", 1, {"metrics": {}})
    hub.close()
    assert seen == [
        ("rollouts_finished", 1, {"rollouts": []}),
        ("log", 1),
        ("run_finished", 1, {"metrics": {}}),
    ]


def test_a_tracker_that_is_behind_misses_events_and_no_metrics(tmp_path):
    seen, go = [], threading.Event()

    class Slow(Tracker):
        def log(self, step, metrics):
            go.wait(10)
            seen.append(step)

        def on_event(self, event, step, data):
            seen.append(event)

    hub = hub_of(Slow, tmp_path)
    for step in range(1, 41):
        hub.log(step, {"a": 1.0})
        hub.event("rollouts_finished", step, {"rollouts": []})
    go.set()
    hub.close()
    assert [each for each in seen if each != "rollouts_finished"] == list(range(1, 41))
    assert 0 < seen.count("rollouts_finished") <= HELD


def test_a_tracker_that_hangs_holds_a_bounded_number_of_steps(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "MOST", 20)
    go = threading.Event()

    class Hung(Tracker):
        def log(self, step, metrics):
            go.wait(60)

    hub = hub_of(Hung, tmp_path)
    for step in range(1, 41):
        hub.log(step, {"a": 1.0})
    [feeder] = hub._feeders
    assert feeder.calls.qsize() <= 20
    hub.close(0.1)
    go.set()
    assert "is left behind; metrics.jsonl has all steps" in caplog.text
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 40
