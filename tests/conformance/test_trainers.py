"""Trainers and environments of this repository keep the contracts of the kit."""

from types import SimpleNamespace

import pytest

from engine_core.errors import ConfigError
from engine_core.runs.rollout_files import read_rollouts
from engine_core.types import sequences_of
from engine_plugin_agents.conversations import Conversations
from engine_plugin_testing import EnvironmentSuite, TrainerSuite, environment_cases, trainer_bench

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


@pytest.mark.slow
class TestAgent(EnvironmentSuite):
    """An existing agent, whose conversations diverge."""

    name = "agent"
    plugins = ["guess.py"]
    chat = True


def agent_bench(folder):
    folder.mkdir()
    return trainer_bench.EnvironmentBench(
        TestAgent.settings(), SimpleNamespace(folder=folder, cache=folder.parent)
    )


def test_conversations_that_diverge_become_branches_whose_turns_are_learned_once(tmp_path):
    environment_cases.each_turn_is_learned_once(agent_bench(tmp_path / "run"))
    rollouts = read_rollouts(tmp_path / "run/runs/sequences/rollouts/step_000001.parquet")
    for rollout in rollouts:
        sequences = sequences_of([rollout])
        # the newest of two conversations of two turns, and the other, whose first turn is the same
        assert [each.extras["turns"].unique().tolist() for each in sequences] == [[0, 1, 3], [0, 1, 2]]
        learned = [each.extras["turns"][each.loss_mask].unique().tolist() for each in sequences]
        assert learned == [[1, 3], [2]]


def test_an_endpoint_whose_branches_learn_their_beginning_again_is_caught(tmp_path, monkeypatch):
    def all_turns(conversations):
        episode, made = conversations.episode, []
        for branch in (end for end in conversations._ends if end is not conversations._longest):
            episode.follow(branch.turns, branch.messages)
            made.append(episode.rollout())
        episode.follow(conversations._longest.turns, conversations._longest.messages)
        return made

    monkeypatch.setattr(Conversations, "others", all_turns)
    with pytest.raises(AssertionError, match="1:0:0/1 learns turn 1, and so does another one"):
        environment_cases.each_turn_is_learned_once(agent_bench(tmp_path / "run"))


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
