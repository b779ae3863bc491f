"""Which samplers cannot follow a model that a plugin builds: refused before anything starts, with what to do."""

import re

import pytest

from engine_core.config.assemble import load_config
from engine_core.config.completeness import check_complete
from engine_core.errors import ConfigError

PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import RolloutBackend, TrainBackend

@hookimpl
def engine_train_engines():
    able = frozenset({"generation_module"})
    return {
        "common": TrainBackend(load=print, capabilities=able),
        "mine": TrainBackend(load=print, capabilities=able, own_model=True),
        "apart": TrainBackend(load=print, own_model=True),
    }

@hookimpl
def engine_rollout_engines():
    return {
        "asks": RolloutBackend(load=print, capabilities=frozenset({"share_module", "custom_model"})),
        "library": RolloutBackend(load=print),
    }
"""
HOOKS = {
    "build": "def engine_build_model(role): pass",
    "map": "def engine_map_weights(weights): return weights",
    "register": "def engine_register_model(sampler): pass",
}
OWN = 'weights = "own"'
PROCESS = "[rollout.process]"
POOLS = '[runtime]\nbackend = "torchrun"\n[placement]\npools = { a = 1, b = 1 }\nactor = "a"\nrollout = "b"'
TO_BUILD = "no plugin has the hook engine_build_model. Implement it in the plugin of that backend"
TO_MAP = "nothing says which weights the sampler gets. Implement engine_map_weights"


@pytest.fixture
def problem(tmp_path):
    """``problem(hooks, actor, sampler, how)``: what is refused; empty where nothing is."""

    def check(hooks, actor, sampler, how):
        own = PLUGIN + "".join(f"\n@hookimpl\n{HOOKS[name]}\n" for name in hooks)
        (tmp_path / "own.py").write_text(own)
        (tmp_path / "run.toml").write_text(
            f'plugins = ["own.py"]\n[model]\npath = "model"\n[data]\ntrain = "x.jsonl"\n[[reward]]\nname = "numeric"\n'
            f'[actor]\nbackend = "{actor}"\n[rollout]\nbackend = "{sampler}"\n{how}\n'
        )
        try:
            check_complete(load_config(tmp_path / "run.toml"))
        except ConfigError as error:
            return str(error)
        return ""

    return check


@pytest.mark.parametrize("how", [OWN, PROCESS, POOLS])
def test_a_sampler_that_asks_for_the_module_needs_one_who_answers(problem, how):
    found = problem([], "mine", "asks", how)
    assert re.search(r"run.toml:\d+: rollout.backend = 'asks' has separate weights here", found)
    assert "actor.backend 'mine' builds a model" in found
    assert TO_BUILD in found
    assert not problem(["build"], "mine", "asks", how)
    assert not problem(["map"], "mine", "asks", how)
    assert not problem([], "common", "asks", how)
    assert not problem(["build"], "common", "asks", how)


def test_nothing_is_refused_where_the_sampler_uses_the_actors_module(problem):
    assert not problem([], "mine", "asks", "")
    assert TO_BUILD in problem([], "apart", "asks", "")  # an actor that does not give its module


def test_a_sampler_that_builds_its_model_itself_needs_names_that_it_knows_or_an_architecture(problem):
    for hooks, actor in ((["build"], "common"), ([], "mine"), (["build"], "mine")):
        found = problem(hooks, actor, "library", "")
        assert TO_MAP in found
        assert ("Plugin file" in found) == ("build" in hooks)
        assert not problem([*hooks, "map"], actor, "library", "")
        assert not problem([*hooks, "register"], actor, "library", "")
    assert not problem([], "common", "library", "")
