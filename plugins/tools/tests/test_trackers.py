"""Trackers write the metrics that they are given."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine_core.config import EngineConfig
from engine_core.errors import PluginError
from engine_core.runs.tracking import RunFolder, TrackerHub
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_tools import trackers
from engine_plugin_tools.commands.grafana import PANELS, dashboard
from engine_plugin_tools.tracker_options import MlflowOptions, PrometheusOptions, TensorBoardOptions
from engine_plugin_tools.tracker_threads import Trackers


class Plugins:
    def require(self, kind, name):
        return Trackers

    def resolve(self, kind, name):
        return {
            "tensorboard": trackers.TensorBoard,
            "wandb": trackers.Wandb,
            "mlflow": trackers.Mlflow,
            "trackio": trackers.Trackio,
            "prometheus": trackers.Prometheus,
        }[name]

    def versions(self):
        return {}


def events_of(run: RunFolder, folder: str = "tensorboard") -> EventAccumulator:
    events = EventAccumulator(str(run.path.parent / folder / run.path.name))
    return events.Reload()


def scalars(run: RunFolder, name: str, folder: str = "tensorboard") -> list[tuple[int, float]]:
    events = events_of(run, folder)
    return [(event.step, event.value) for event in events.Scalars(name)]


def config_in(tmp_path, **tables) -> EngineConfig:
    tables = {"tracking": {"trackers": ["tensorboard"]}, **tables}
    config = EngineConfig(run={"dir": str(tmp_path), "name": "a"}, **tables)
    config.tracking.options = {"tensorboard": TensorBoardOptions()}
    return config


def rollouts(count: int = 3):
    """Return rollouts of 1, 2, ... tokens with rewards 0, 1, ..., the last of which is not valid."""
    made = []
    for index in range(count):
        prompt = Prompt("train:0", [5, 9], "2+2=\n", {})
        rollout = Request(f"0:0:{index}", prompt, Sampling(), index=index).unsampled()
        rollout.token_ids = torch.tensor([5, 9, *range(index + 1)])
        rollout.text, rollout.reward, rollout.valid = f"{index} | *", float(index), index < count - 1
        made.append(rollout)
    return made


def test_tensorboard_has_every_step_and_a_resumed_run_has_each_once(tmp_path):
    config = config_in(tmp_path)
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, Plugins())
    hub.start()
    for step in (1, 2, 3, 4):
        hub.log(step, {"reward/mean": step / 4})
    hub.close()
    assert scalars(run, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    run.close()
    run = RunFolder.open(run.path)
    run.claim(2)
    run.rewind(2, config)
    hub = TrackerHub(run, config, Plugins())
    hub.start()
    hub.log(3, {"reward/mean": 0.125})
    hub.close()
    assert scalars(run, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.125)]


def test_tensorboard_writes_to_the_folder_of_its_table(tmp_path):
    config = config_in(tmp_path)
    config.tracking.options = {"tensorboard": TensorBoardOptions(folder="events")}
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, Plugins())
    hub.start()
    hub.log(1, {"x": 1.0})
    hub.close()
    assert scalars(run, "x", "events") == [(1, 1.0)]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_said_before_the_first_step(tmp_path, monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    config = config_in(tmp_path, tracking={"trackers": [package]})
    with pytest.raises(PluginError) as error:
        TrackerHub(RunFolder.create(config), config, Plugins())
    assert str(error.value) == (
        f"tracking.trackers: Tracker '{package}' needs the package {package}, which is not installed. "
        f"Try: pip install 'engine-plugin-tools[{package}]', or take it out of tracking.trackers."
    )


def test_tensorboard_shows_completions_histograms_and_the_config(tmp_path):
    config = config_in(tmp_path)
    config.tracking.options = {"tensorboard": TensorBoardOptions(details_every_steps=2, completions=1)}
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, Plugins())
    hub.start()
    for step in (1, 2):
        hub.trackers.event("rollouts_finished", step, {"rollouts": rollouts()})
        hub.trackers.event("advantages_computed", step, {"advantages": torch.tensor([-1.0, 3.0])})
    hub.close()
    events = events_of(run)
    assert sorted(events.Tags()["histograms"]) == [
        f"distribution/{name}" for name in ("advantage", "response_length", "reward")
    ]
    for name, expected in {
        "reward": (2, 0, 1),
        "response_length": (3, 1, 3),
        "advantage": (2, -1, 3),
    }.items():
        [event] = events.Histograms(f"distribution/{name}")
        found = event.histogram_value
        assert (event.step, found.num, found.min, found.max) == (2, *expected), name
    texts = {
        tag: [e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert texts["completions/text_summary"] == ["reward 0\n\n    2+2=\n\n    0 | *"]
    assert "    data.prompts_per_step = 64\n" in texts["config/text_summary"][0]


def test_tensorboard_finds_each_run_once(tmp_path):
    from tensorboard.backend.event_processing.io_wrapper import GetLogdirSubdirectories

    config = config_in(tmp_path)
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, Plugins())
    hub.start()
    hub.log(1, {"x": 1.0})
    hub.close()
    assert (tmp_path / "latest").is_symlink()
    assert [Path(folder) for folder in GetLogdirSubdirectories(str(tmp_path))] == [
        tmp_path / "tensorboard" / "a"
    ]


def test_a_tracker_that_cannot_show_rollouts_is_off_and_metrics_are_written(tmp_path, caplog):
    config = config_in(tmp_path)
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, Plugins())
    hub.start()
    hub.trackers.event("rollouts_finished", 10, {"rollouts": [None]})
    hub.log(1, {"x": 1.0})
    hub.close()
    assert "Tracker 'tensorboard' failed and is off for the rest of the run" in caplog.text
    assert [line["step"] for line in run.read_metrics()] == [1]


def test_a_database_of_mlflow_that_was_not_finished_is_made_again(tmp_path, monkeypatch):
    database, answers = tmp_path / "m.db", ["cut", "whole", "opened"]

    class Client:
        def __init__(self, uri):
            self.answer = answers.pop(0)
            if self.answer != "opened":
                Path(uri.removeprefix("sqlite:///")).write_text(self.answer)
            if self.answer == "cut":
                raise SystemExit  # as if the process had ended

    entities, tracking = SimpleNamespace(Param=None), SimpleNamespace(MlflowClient=Client)
    modules = {"mlflow": SimpleNamespace(), "mlflow.entities": entities, "mlflow.tracking": tracking}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(trackers, "require_package", lambda *words: None)
    run = SimpleNamespace(path=tmp_path / "a")
    run.path.mkdir()
    (run.path / "mlflow_id.txt").write_text("7 a")
    mlflow = trackers.Mlflow(MlflowOptions(uri=f"sqlite:///{database}"))
    with pytest.raises(SystemExit):
        mlflow.begin(run, {})
    assert not database.exists()
    mlflow.begin(run, {})
    assert (mlflow._client.answer, database.read_text()) == ("opened", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "m.db"}


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("eval/gsm8k/pass@4", "eval/gsm8k/pass_4"),
        ("reward/mean", "reward/mean"),
        ('run.fail_above."actor/approx_kl"', "run.fail_above.actor/approx_kl"),
        ('schedule."rollout.temperature"', "schedule.rollout.temperature"),
    ],
)
def test_mlflow_receives_names_of_characters_that_it_allows(name, sent):
    assert trackers.mlflow_name(name) == sent


def test_prometheus_answers_on_loopback_with_the_newest_step(tmp_path, caplog):
    caplog.set_level("INFO")
    config = config_in(tmp_path, tracking={"trackers": ["prometheus"]})
    config.tracking.options = {"prometheus": PrometheusOptions(port=0)}
    hub = TrackerHub(RunFolder.create(config), config, Plugins())
    hub.start()
    for step in (1, 2):
        hub.log(step, {"reward/mean": step / 4})
    [feeder] = hub.trackers.feeders
    feeder.calls.put(lambda: seen.append(urllib.request.urlopen(url()).read().decode()))
    seen: list[str] = []

    def url() -> str:
        return re.search(r"http://127\.0\.0\.1:\d+/metrics", caplog.text)[0]

    hub.close()
    assert 'engine_reward_mean{run="a"} 0.5\n' in seen[0]
    assert 'engine_step{run="a"} 2.0\n' in seen[0]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url())


def test_a_port_that_is_taken_is_said_with_what_to_do(tmp_path, caplog):
    config = config_in(tmp_path, tracking={"trackers": ["prometheus"]})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.tracking.options = {"prometheus": PrometheusOptions(port=port)}
        hub = TrackerHub(RunFolder.create(config), config, Plugins())
        hub.start()
        hub.close()
    assert (
        f"127.0.0.1:{port} cannot be opened: Address already in use. Set tracking.prometheus.port"
        in caplog.text
    )


def test_the_dashboard_asks_for_metrics_that_the_reference_explains():
    reference = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text("utf-8")
    explained = set(re.findall(r"`([\w/]+)`", reference))
    assert {name for names in PANELS.values() for name in names} - {"step"} <= explained
    shown = dashboard()
    assert shown["panels"][0]["targets"][0]["expr"] == 'engine_reward_mean{run=~"$run"}'
    assert len({str(panel["gridPos"]) for panel in shown["panels"]}) == len(shown["panels"]) == len(PANELS)


def test_a_run_sends_its_rollouts_and_advantages(engine, rl_run):
    table = "tracking={trackers = ['tensorboard'], tensorboard = {details_every_steps = 2}}"
    assert engine("train", "rl.toml", "--set", table).code == 0
    events = events_of(RunFolder.open(rl_run.parent / "runs" / "first"))
    for name in ("advantage", "response_length", "reward"):
        [event] = events.Histograms(f"distribution/{name}")
        assert event.step == 2
        assert event.histogram_value.num == (
            60 if name == "advantage" else 12
        )  # 4 prompts x 3 responses of 5 tokens
    assert len(events.Tensors("completions/text_summary")) == 1
