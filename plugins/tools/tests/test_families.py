"""What `engine validate` says of a model's type: only what the backends declare, and never an error."""

import json

import pytest

from engine_core.config.assemble import load_config, plugins_for
from engine_plugin_tools.families import declared_families

PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import RolloutBackend, TrainBackend

SEEN = {"llama": "", "qwen3": "", "apertus": "log-probs differ"}

@hookimpl
def engine_train_engines():
    return {
        "mine": TrainBackend(load=print, families=SEEN),
        "silent": TrainBackend(load=print),
        "builds": TrainBackend(load=print, own_model=True),
    }

@hookimpl
def engine_rollout_engines():
    return {"mine": RolloutBackend(load=print, families="engine_plugin_hf_rollout.families:FAMILIES")}
"""
ACTOR = '[actor]\nbackend = "mine"\n'
BOTH = ACTOR + '[rollout]\nbackend = "mine"\n'


@pytest.fixture
def said(tmp_path, monkeypatch):
    """``said(tables, config)``: role -> what is said; ``config`` is the text of the model's ``config.json``."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def of(tables, config, path="model", trainer="rl"):
        (tmp_path / "model").mkdir(exist_ok=True)
        if config is not None:
            (tmp_path / "model" / "config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
        (tmp_path / "own.py").write_text(PLUGIN)
        (tmp_path / "run.toml").write_text(
            f'trainer = "{trainer}"\nplugins = ["own.py"]\n[model]\npath = "{path}"\n{tables}'
        )
        read = load_config(tmp_path / "run.toml")
        found = list(declared_families(read, plugins_for(read)))
        assert all(each["tested"] == ("are tested with" in each["message"]) for each in found)
        return {each["role"]: each["message"] for each in found}

    return of


def of_type(name):
    return json.dumps({"model_type": name})


def test_nothing_is_said_of_a_sampler_of_a_model_that_is_not_that_of_the_folder(said):
    assert said(BOTH.replace("mine", "builds", 1), of_type("qwen3")) == {}


def test_a_type_that_both_backends_passed_has_a_line_for_each_role(said):
    assert said(BOTH, of_type("qwen3")) == {
        "actor": "models of type 'qwen3' are tested with mine",
        "rollout": "models of type 'qwen3' are tested with mine",
    }


def test_a_known_difference_is_said(said):
    assert said(ACTOR, of_type("apertus"))["actor"] == "models of type 'apertus' with mine: log-probs differ"


@pytest.mark.parametrize(("name", "hint"), [("qwen4", "; nearest: 'qwen3'"), ("xyz", ""), ("apertus2", "")])
def test_a_type_that_was_not_tested_is_said_with_the_nearest_that_was(said, name, hint):
    assert said(ACTOR, of_type(name))["actor"] == f"models of type '{name}' are not tested with mine{hint}"


def test_the_text_model_of_a_larger_one_is_judged_if_only_that_is_known(said):
    config = json.dumps({"model_type": "gemma3", "text_config": {"model_type": "qwen3"}})
    assert said(ACTOR, config)["actor"] == "models of type 'qwen3' are tested with mine"


def test_a_role_with_another_model_is_judged_by_that(said, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(of_type("apertus"))
    found = said(ACTOR + '[ref]\npath = "other"\n', of_type("llama"))
    assert found["ref"] == "models of type 'apertus' with mine: log-probs differ"
    assert found["actor"] == "models of type 'llama' are tested with mine"


def test_a_backend_that_declares_nothing_and_a_trainer_without_a_sampler_have_no_line(said):
    assert said(BOTH.replace("mine", "silent", 1), of_type("qwen3")).keys() == {"rollout"}
    assert said(ACTOR, of_type("qwen3"), trainer="sft").keys() == {"actor"}


@pytest.mark.parametrize(
    "config",
    [None, "", "{", "[]", "3", "{}", '{"model_type": 3}', '{"model_type": null}', "[" * 100_000, "\udcff"],
    ids=lambda text: repr(text)[:30],
)
def test_nothing_is_said_of_a_config_that_does_not_say_its_type(said, config):
    assert said(BOTH, config) == {}


def test_a_hub_name_is_looked_up_in_the_local_cache_alone(said, tmp_path):
    assert said(ACTOR, None, "org/name") == {}
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc" / "config.json").write_text(of_type("llama"))
    assert said(ACTOR, None, "org/name")["actor"] == "models of type 'llama' are tested with mine"


@pytest.mark.parametrize("path", ["", "org--/name", "no/such/folder"])
def test_nothing_is_said_of_a_path_that_names_no_model(said, path):
    assert said(ACTOR, None, path) == {}
