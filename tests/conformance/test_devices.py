"""``ENGINE_TEST_DEVICE``: on which devices the suites of engines run."""

import pytest

from engine_plugin_testing import RewardSuite, TrainEngineSuite
from engine_plugin_testing.devices import VARIABLE, asked_accelerator, lacking

pytest_plugins = ["pytester"]
MANY = """
from engine_plugin_testing import TrainEngineSuite

class TestMany(TrainEngineSuite):
    backend = "torch"
    world_size = 1000
"""


class Exact(TrainEngineSuite):
    options = {"log_prob_chunk_tokens": 8}
    on_accelerator = {"compute_dtype": "fp32", "log_prob_chunk_tokens": 4}


class OnOneDevice(Exact):
    device = "cpu"


class Short(RewardSuite):
    name = "short"


@pytest.mark.parametrize(("said", "found"), [("", ""), ("cpu", ""), ("cuda", "cuda"), ("cuda:0", "cuda")])
def test_the_variable_names_a_kind_of_device_and_cpu_is_no_accelerator(monkeypatch, said, found):
    monkeypatch.setenv(VARIABLE, said)
    assert asked_accelerator() == found


def test_on_accelerators_a_suite_computes_as_it_says_for_them_and_its_own_options_go_before(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    settings = Exact.settings()
    assert settings["device"] == "cuda"
    assert settings["options"] == {"compute_dtype": "fp32", "log_prob_chunk_tokens": 8}


def test_a_suite_that_names_its_device_and_one_of_rewards_do_not_follow_the_variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    assert OnOneDevice.settings()["device"] == "cpu"
    assert OnOneDevice.settings()["options"] == {"log_prob_chunk_tokens": 8}
    assert "device" not in Short.settings()


def test_without_the_variable_nothing_is_added(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Exact.settings()["options"] == {"log_prob_chunk_tokens": 8}
    assert Exact.accelerator() == ""


def test_a_suite_of_more_ranks_than_devices_is_skipped_and_says_how_many_there_are(pytester, monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda")
    pytester.makepyfile(test_many=MANY)
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider", "test_many.py")
    result.assert_outcomes(skipped=len(TrainEngineSuite.contracts))
    result.stdout.fnmatch_lines(["*needs 1000 devices of kind 'cuda', and there are*"])
    assert lacking("cuda", 0) == ""
