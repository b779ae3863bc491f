"""Trainers and environments of this repository keep the contracts of the kit."""

from types import SimpleNamespace

import pytest

from engine_core.errors import ConfigError
from engine_plugin_testing import EnvironmentSuite, TrainerSuite, trainer_bench

SAMPLING = {"rollout.group_size": 4, "rollout.max_response_tokens": 8}


class TestRL(TrainerSuite):
    name = "rl"
    keys = SAMPLING
    unsupported = {"test_unknown_options_are_refused": "it has no table"}


class TestAllSections(TrainerSuite):
    """A trainer whose spec names no sections reads all of them, so the suite gives it the reward for digits."""

    name = "whitened"
    plugins = ["whitened.py"]
    keys = SAMPLING


class TestSFT(TrainerSuite):
    name = "sft"


@pytest.mark.slow
class TestAsync(TrainerSuite):
    name = "async"
    options = {"max_staleness": 0}
    keys = SAMPLING


class TestGuess(EnvironmentSuite):
    name = "guess"
    plugins = ["guess.py"]


@pytest.mark.slow
class TestAgain(EnvironmentSuite):
    name = "again"
    plugins = ["guess.py"]
    chat = True


class Calculator(EnvironmentSuite):
    """An environment with tools; docs/environments.md runs a whole suite of one."""

    name = "calculator"
    plugins = ["guess.py"]
    chat = True


def test_an_environment_with_tools_runs_with_the_kits_template_and_not_with_one_that_hides_them(
    tmp_path, monkeypatch
):
    def bench(name):
        (tmp_path / name).mkdir()
        place = SimpleNamespace(folder=tmp_path / name, cache=tmp_path / name)
        return trainer_bench.EnvironmentBench(Calculator.settings(), place)

    assert [line["environment/errors"] for line in bench("shown").train("run", 1)] == [0]
    monkeypatch.setattr(trainer_bench, "CHAT", trainer_bench.CHAT.replace("{% if tools %}", "{% if false %}"))
    with pytest.raises(ConfigError, match="shows no tools in prompts"):
        bench("hidden").train("run", 1)
