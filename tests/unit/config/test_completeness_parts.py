"""What the kernel does not contain and a run file asks for is missed before the run starts."""

import re

import pytest

from engine_core.config.assemble import load_config
from engine_core.config.completeness import check_complete
from engine_core.errors import ConfigError, PluginError
from engine_core.plugins import metadata

PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import Curriculum, Environment, Part, Reward, RolloutBackend

@hookimpl
def engine_rewards():
    return {"one": Reward(load=print)}

@hookimpl
def engine_environments():
    return {"talk": Environment(load=print)}

@hookimpl
def engine_curricula():
    return {"rising": Curriculum(load=print)}

@hookimpl
def engine_rollout_engines():
    return {"echo": RolloutBackend(load=print)}
"""
RL = """
plugins = ["own.py"]
[model]
path = "model"
[data]
train = ["train.jsonl"]
prompts_per_step = 4
[rollout]
backend = "echo"
[[reward]]
name = "one"
workers = 0
"""
SFT = RL.replace("plugins", 'trainer = "sft"\nplugins')


@pytest.fixture
def without_parts(monkeypatch):
    everything = metadata.installed
    monkeypatch.setattr(metadata, "installed", lambda: tuple(o for o in everything() if o.kind != "parts"))


@pytest.fixture
def check(tmp_path):
    (tmp_path / "own.py").write_text(PLUGIN)

    def check(text, plugin=PLUGIN):
        (tmp_path / "own.py").write_text(plugin)
        (tmp_path / "run.toml").write_text(text)
        check_complete(load_config(tmp_path / "run.toml"))

    return check


NEEDED = [
    ("reward.one.workers", RL.replace("workers = 0", "workers = 2"), "reward_workers", "rewards"),
    ("reward.one.workers", RL.replace("workers = 0", ""), "reward_workers", "rewards"),
    ("reward.judged", RL + '[[reward]]\nname = "judged"\n[reward.model]\npath = "model"\n', "reward_models", "rewards"),
    ("environment", RL + '[environment]\nname = "talk"\n', "episodes", "agents"),
    ("data.num_workers", RL.replace("prompts_per_step", "num_workers = 2\nprompts_per_step"), "row_workers", "processes"),
    ("data.num_workers", SFT.replace("prompts_per_step", "num_workers = 2\nprompts_per_step"), "row_workers", "processes"),
    ("rollout.stream_update", RL.replace('"echo"', '"echo"\nstream_update = true'), "stream_update", "trainers"),
    ("rollout.over_sampling", RL.replace('"echo"', '"echo"\nover_sampling = 1.5'), "early_stop", "trainers"),
    ("data.curriculum", RL.replace("prompts_per_step", 'curriculum = "rising"\nprompts_per_step') + "[run]\nsteps = 1\n", "curriculum", "trainers"),
    ("eval.every_steps", RL.replace("prompts_per_step", 'validation = "train.jsonl"\nprompts_per_step') + "[eval]\nevery_steps = 1\n", "set_metrics", "tools"),
    ("tracking.trackers", RL + '[tracking]\ntrackers = ["tensorboard"]\n', "trackers", "tools"),
    ("rollout.process", RL.replace('"echo"', '"echo"\n[rollout.process]'), "sampler_process", "processes"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "part", "plugin"), NEEDED)
def test_a_part_that_is_not_installed_is_missed_by_its_key(check, without_parts, key, text, part, plugin):
    with pytest.raises(PluginError) as caught:
        check(text)

    (line,) = str(caught.value).splitlines()
    assert re.search(
        rf"run.toml:\d+: {key}: Part '{part}' is not installed. Try: pip install engine-plugin-{plugin}$",
        line,
    )


@pytest.mark.parametrize(("key", "text", "part", "plugin"), NEEDED)
def test_with_the_part_installed_the_run_is_complete(check, key, text, part, plugin):
    check(text)


@pytest.mark.parametrize(
    "text",
    [
        RL,
        SFT.replace("workers = 0", "workers = 2"),  # scores nothing: no evaluation is asked for
        SFT.replace('"echo"', '"echo"\n[rollout.process]'),
    ],
)
def test_a_part_that_the_run_does_not_ask_for_is_not_missed(check, without_parts, text):
    check(text)


def test_a_part_that_a_plugin_file_offers_is_there(check, without_parts):
    own = PLUGIN + '\n\n@hookimpl\ndef engine_parts():\n    return {"episodes": Part(load=print)}\n'

    check(RL + '[environment]\nname = "talk"\n', own)


TALK = RL + '[environment]\nname = "talk"\ntool_format = "{}"\n'


@pytest.mark.parametrize("name", ["auto", "hermes", "engine-plugin-agents:json"])
def test_a_tool_format_is_chosen_by_name(check, name):
    check(TALK.format(name))


def test_an_unknown_tool_format_is_refused_with_its_line(check):
    with pytest.raises(
        PluginError, match=r"run.toml:\d+: environment.tool_format: Unknown tool format 'hermez'. Did you"
    ):
        check(TALK.format("hermez"))


def test_a_tool_format_that_is_not_installed_comes_with_its_install_command(check, without_our_plugins):
    with pytest.raises(
        PluginError, match=r"Tool format 'hermes' is not installed. Try: pip install engine-plugin-agents"
    ):
        check(TALK.format("hermes"))


def test_all_that_is_missing_is_told_at_once(check, without_parts):
    text = RL.replace('path = "model"', "").replace("prompts_per_step", "num_workers = 2\nprompts_per_step")

    with pytest.raises(ConfigError) as caught:
        check(text + '[environment]\nname = "talk"\n')

    assert [re.split(r"run.toml:\d+: ", line)[1].partition(":")[0] for line in caught.value.problems] == [
        "model.path",
        "environment",
        "data.num_workers",
    ]
