"""The threads of trackers: order, back-pressure, and trackers that misbehave."""

from __future__ import annotations

import http.server
import json
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from engine_core.config import EngineConfig
from engine_core.errors import PluginError
from engine_core.runs.tracking import RunFolder, Tracker, TrackerHub
from engine_plugin_tools import tracker_threads
from engine_plugin_tools.tracker_threads import HELD, Trackers


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


def config_in(folder: Path, **tables) -> EngineConfig:
    return EngineConfig(run={"dir": str(folder / "runs"), "name": "a"}, **tables)


def hub_of(run: RunFolder, folder: Path, trackers) -> TrackerHub:
    hub = TrackerHub(run, config_in(folder, tracking={"trackers": list(trackers)}), Plugins(**trackers))
    hub.start()
    return hub


def closed(hub: TrackerHub, timeout: float) -> None:
    """Close a hub with another time for its trackers."""
    hub.trackers.close(timeout)
    hub.trackers = None
    hub.close()


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(config_in(tmp_path))
    yield run
    run.close()


def test_a_healthy_tracker_gets_every_step_in_order(tmp_path, run):
    calls = []

    class Spy(Tracker):
        def start(self, run, config):
            calls.append("start")

        def log(self, step, metrics):
            calls.append((step, metrics["x"]))

        def close(self):
            calls.append("close")

    hub = hub_of(run, tmp_path, trackers={"spy": Spy})
    for step in range(50):
        hub.log(step, {"x": step * 2})
    hub.close()
    assert calls == ["start", *((step, step * 2) for step in range(50)), "close"]


def test_a_tracker_that_stalls_delays_nothing(tmp_path, run, caplog):
    release = threading.Event()
    healthy = []

    class Stalled(Tracker):
        def log(self, step, metrics):
            release.wait(30)

    class Healthy(Tracker):
        def log(self, step, metrics):
            healthy.append(step)

    hub = hub_of(run, tmp_path, trackers={"stalled": Stalled, "healthy": Healthy})
    start = time.monotonic()
    for step in range(20):
        hub.log(step, {"x": 1.0})
    with caplog.at_level(logging.WARNING, "engine"):
        closed(hub, 0.5)
    assert time.monotonic() - start < 20  # of 30 that the stalled one waits in each step
    lines = run.read_metrics()
    assert len(lines) == 20
    assert healthy == list(range(20))
    assert "Tracker 'stalled' has not finished in time" in caplog.text
    assert "healthy" not in caplog.text
    release.set()


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_a_tracker_that_raises_is_switched_off_and_training_goes_on(tmp_path, run, caplog, where, kind):
    class Broken(Tracker):
        def log(self, step, metrics):
            pass

    def fail(*args):
        raise kind("503 from upstream")

    setattr(Broken, where, fail)
    hub = hub_of(run, tmp_path, trackers={"broken": Broken})
    hub.log(1, {"x": 1.0})
    hub.log(2, {"x": 1.0})
    hub.close()
    said = "Tracker 'broken' failed and is off for the rest of the run; training continues. {}: 503 from upstream"
    shown = [record for record in caplog.records if not getattr(record, "file_only", False)]
    assert [record.getMessage() for record in shown if "failed" in record.getMessage()] == [
        said.format(kind.__name__)
    ]
    assert all(record.exc_info is None for record in shown)  # the traceback is in the file
    assert len(run.read_metrics()) == 2


def test_a_server_that_never_answers_holds_up_neither_steps_nor_the_end(tmp_path, run):
    listener = socket.create_server(
        ("127.0.0.1", 0)
    )  # connections are accepted by the kernel, never answered
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"

    class Web(Tracker):
        def log(self, step, metrics):
            urllib.request.urlopen(url, json.dumps(metrics).encode(), timeout=30).read()

    hub = hub_of(run, tmp_path, trackers={"web": Web})
    slowest = 0.0
    for step in range(100):
        start = time.monotonic()
        hub.log(step, {"x": 1.0})
        slowest = max(slowest, time.monotonic() - start)
    start = time.monotonic()
    closed(hub, 1.0)
    assert slowest < 10  # of 30 that the request would wait
    assert time.monotonic() - start < 10
    assert len(run.read_metrics()) == 100
    listener.close()


def test_a_server_that_answers_500_switches_the_tracker_off(tmp_path, run, caplog):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_error(500)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    class Web(Tracker):
        def log(self, step, metrics):
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", b"{}", timeout=10).read()

    hub = hub_of(run, tmp_path, trackers={"web": Web})
    hub.log(1, {"x": 1.0})
    hub.close()
    server.shutdown()
    server.server_close()
    assert "HTTP Error 500" in caplog.text


def test_a_process_ends_although_a_tracker_hangs(tmp_path):
    code = """
import threading, sys
from engine_core.runs.tracking import Tracker
from engine_plugin_tools.tracker_threads import _Feeder
class Hang(Tracker):
    def log(self, step, metrics): threading.Event().wait()
feeder = _Feeder("hang", Hang(), lambda: None)
feeder.start(); feeder.calls.put(lambda: feeder.tracker.log(1, {})); feeder.calls.put(None); feeder.join(0.2)
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "ended\n"


def test_a_tracker_that_refuses_its_set_up_ends_the_run_before_it_starts(tmp_path, run):
    class Refusing(Tracker):
        def __init__(self, options=None):
            raise PluginError("Tracker 'x' needs a package.")

    with pytest.raises(PluginError, match="needs a package"):
        hub_of(run, tmp_path, trackers={"x": Refusing})


def test_what_is_no_tracker_is_refused_before_the_run_starts(tmp_path, run):
    with pytest.raises(
        PluginError, match=r"tracking.trackers: 'x' is no engine_core.runs.tracking.Tracker, got "
    ):
        hub_of(run, tmp_path, trackers={"x": lambda options: object()})


def test_a_tracker_receives_events_between_metrics_in_their_order(tmp_path, run):
    seen = []

    class Spy(Tracker):
        def log(self, step, metrics):
            seen.append(("log", step))

        def on_event(self, event, step, data):
            seen.append((event, step, data))

    hub = hub_of(run, tmp_path, trackers={"spy": Spy})
    hub.trackers.event("rollouts_finished", 1, {"rollouts": []})
    hub.log(1, {"a": 1.0})
    hub.trackers.event("run_finished", 1, {"metrics": {}})
    hub.close()
    assert seen == [
        ("rollouts_finished", 1, {"rollouts": []}),
        ("log", 1),
        ("run_finished", 1, {"metrics": {}}),
    ]


def test_a_tracker_that_is_behind_misses_events_but_no_metrics_and_not_the_end(tmp_path, run):
    seen, go = [], threading.Event()

    class Slow(Tracker):
        def log(self, step, metrics):
            go.wait(10)
            seen.append(step)

        def on_event(self, event, step, data):
            seen.append(event)

    hub = hub_of(run, tmp_path, trackers={"slow": Slow})
    for step in range(1, 41):
        hub.log(step, {"a": 1.0})
        hub.trackers.event("rollouts_finished", step, {"rollouts": []})
    hub.trackers.event("run_finished", 40, {"metrics": {}})
    go.set()
    hub.close()
    assert [each for each in seen if each != "rollouts_finished"] == [*range(1, 41), "run_finished"]
    assert 0 < seen.count("rollouts_finished") <= HELD


def test_a_tracker_that_hangs_holds_a_bounded_number_of_steps(tmp_path, run, monkeypatch, caplog):
    monkeypatch.setattr(tracker_threads, "MOST", 20)
    go = threading.Event()

    class Hung(Tracker):
        def log(self, step, metrics):
            go.wait(60)

    hub = hub_of(run, tmp_path, trackers={"hung": Hung})
    for step in range(1, 41):
        hub.log(step, {"a": 1.0})
    [feeder] = hub.trackers.feeders
    assert feeder.calls.qsize() <= 20
    closed(hub, 0.1)
    go.set()
    assert "is left behind; metrics.jsonl has all steps" in caplog.text
    assert len(run.metrics_file.read_text().splitlines()) == 40
