"""Trackers write the metrics that they are given."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import shutil
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine_core.config import EngineConfig
from engine_core.errors import PluginError
from engine_core.runs.tracking import RunFolder, TrackerHub
from engine_plugin_tools import trackers
from engine_plugin_tools.tracker_options import TensorBoardOptions, WandbOptions


class Plugins:
    def resolve(self, kind, name):
        return {"tensorboard": trackers.TensorBoard, "wandb": trackers.Wandb}[name]

    def versions(self):
        return {}


def scalars(run: RunFolder, name: str, folder: str = "tensorboard") -> list[tuple[int, float]]:
    events = EventAccumulator(str(run.path / folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def config_in(tmp_path, **tables) -> EngineConfig:
    tables = {"tracking": {"trackers": ["tensorboard"]}, **tables}
    return EngineConfig(run={"dir": str(tmp_path), "name": "a"}, **tables)


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


class FakeWandb(types.ModuleType):
    """A stand-in that records the calls; the real package needs a network."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.calls = []

    def init(self, **arguments):
        self.calls.append(arguments)
        return types.SimpleNamespace(
            log=lambda metrics, step: self.calls.append((step, metrics)),
            finish=lambda: self.calls.append("finish"),
        )


def test_wandb_gets_options_config_and_steps_and_a_resumed_run_keeps_its_id_a_copied_one_not(
    tmp_path, monkeypatch
):
    fake = FakeWandb()
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    config = config_in(tmp_path, tracking={"trackers": ["wandb"]})
    config.tracking.options = {"wandb": WandbOptions(project="p", mode="offline")}
    run = RunFolder.create(config)
    for resume in (False, True):
        if resume:
            run.close()
            run = RunFolder.open(run.path)
            run.claim(0)
            run.rewind(0, config)
        hub = TrackerHub(run, config, Plugins())
        hub.start()
        hub.log(1, {"x": 1.0})
        hub.close()
    shutil.copytree(run.path, run.path.with_name("fork"))
    hub = TrackerHub(RunFolder.open(run.path.with_name("fork")), config, Plugins())
    hub.start()
    hub.close()
    first, second, fork = (call for call in fake.calls if isinstance(call, dict))
    assert fork["name"] == "fork"
    assert fork["id"] != first["id"]
    assert (first["project"], first["mode"], first["name"]) == ("p", "offline", "a")
    assert first["id"] == second["id"]
    assert len(first["id"]) == 16
    assert second["resume"] == "allow"
    assert first["config"]["data"]["prompts_per_step"] == 64
    json.dumps(first["config"])
    assert fake.calls[1:3] == [(1, {"x": 1.0}), "finish"]
