"""A request for samplers reaches the runtime with the next update of weights."""

from types import SimpleNamespace

import pytest

from engine_core.config import EngineConfig
from engine_plugin_processes.options import TorchrunOptions
from engine_plugin_processes.placement import Pool
from engine_plugin_processes.scale_requests import write_request
from engine_plugin_processes.torchrun import TorchrunRuntime


@pytest.fixture
def runtime():
    config = EngineConfig(runtime={"backend": "torchrun"})
    config.runtime.options = TorchrunOptions()
    found = TorchrunRuntime(config, None, {})
    found.pools = [Pool("serve", range(3), ("rollout",)), Pool("train", range(3, 4), ("actor",))]
    return found


def replacements(changeable):
    asked = []
    return SimpleNamespace(changeable=changeable, want=asked.append, asked=asked)


def test_each_request_is_passed_on_once(runtime, tmp_path):
    runtime.replacements = replacements(changeable=True)
    runtime.look_for_requests(tmp_path)
    write_request(tmp_path, 3)
    runtime.look_for_requests(tmp_path)
    runtime.look_for_requests(tmp_path)
    write_request(tmp_path, 1)
    runtime.look_for_requests(tmp_path)
    assert runtime.replacements.asked == [3, 1]


def test_more_samplers_than_the_pool_may_have_are_not_asked_for(runtime, tmp_path, caplog):
    runtime.replacements = replacements(changeable=True)
    write_request(tmp_path, 4)
    runtime.look_for_requests(tmp_path)
    assert runtime.replacements.asked == []
    assert "is ignored" in caplog.text


def test_where_samplers_may_not_come_and_go_a_request_is_left_alone(runtime, tmp_path):
    write_request(tmp_path, 2)
    runtime.look_for_requests(tmp_path)  # none may be replaced
    runtime.replacements = replacements(changeable=False)
    runtime.look_for_requests(tmp_path)
    assert runtime.replacements.asked == []
