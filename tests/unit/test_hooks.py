import inspect

import pytest

from engine_core import hooks as hookspecs
from engine_core.plugins.metadata import known_names
from engine_core.plugins.modules import table_module
from engine_core.specs import TABLE_SPECS

FROZEN = {
    "engine_build_model": ["role", "model_config", "options", "plugin_options"],
    "engine_map_weights": ["sampler", "weights", "model_config", "options", "plugin_options"],
    "engine_register_model": ["sampler", "model_config", "options", "plugin_options"],
    "engine_wrap_policy": ["role", "module", "options", "plugin_options"],
    "engine_shard_model": ["role", "module", "units", "options", "plugin_options"],
    "engine_build_optimizer": ["role", "module", "optim_config", "options", "plugin_options"],
    "engine_train_engines": [],
    "engine_rollout_engines": [],
    "engine_rewards": [],
    "engine_advantages": [],
    "engine_losses": [],
    "engine_stages": [],
    "engine_environments": [],
    "engine_trackers": [],
    "engine_trainers": [],
    "engine_runtimes": [],
    "engine_weight_transports": [],
    "engine_objectives": [],
    "engine_columns": [],
    "engine_data_sources": [],
    "engine_curricula": [],
    "engine_commands": [],
    "engine_parts": [],
    "engine_options": [],
    "engine_on_event": ["event", "step", "data", "plugin_options"],
}
TABLES_OF_PLUGINS = ["engine_architectures", "engine_pair_losses", "engine_tool_formats"]
"""Hooks that plugins define, as frozen as the core's; they take no argument."""
STEP_HOOKS = [
    "engine_build_model",
    "engine_map_weights",
    "engine_register_model",
    "engine_wrap_policy",
    "engine_shard_model",
    "engine_build_optimizer",
]


def hook(name: str):
    if name in TABLES_OF_PLUGINS:
        return getattr(table_module(name.removeprefix("engine_")), name)
    return getattr(hookspecs, name)


def test_signatures_only_ever_grow():
    """An argument or a hook may be added here in a minor version; a change or removal is a major one."""
    actual = {
        name: list(inspect.signature(function).parameters)
        for name, function in vars(hookspecs).items()
        if hasattr(function, "engine_spec")
    }

    assert actual == FROZEN


def test_plugins_define_these_tables_and_none_of_the_cores():
    assert sorted(f"engine_{kind}" for kind in known_names("tables")) == TABLES_OF_PLUGINS
    assert not known_names("tables").keys() & TABLE_SPECS.keys()
    for name in TABLES_OF_PLUGINS:
        assert list(inspect.signature(hook(name)).parameters) == []
        assert not hook(name).engine_spec["firstresult"]


def test_the_step_hooks_stop_at_the_first_answer_and_no_other_does():
    assert [name for name in FROZEN if hook(name).engine_spec["firstresult"]] == STEP_HOOKS


def test_every_table_has_its_hook():
    tables = set(FROZEN) - set(STEP_HOOKS) - {"engine_options", "engine_on_event"}

    assert tables == {f"engine_{kind}" for kind in TABLE_SPECS}


@pytest.mark.parametrize("name", [*FROZEN, *TABLES_OF_PLUGINS])
def test_every_hook_is_documented_in_four_parts(name: str):
    doc = inspect.getdoc(hook(name))
    assert doc is not None

    assert doc.partition("\n")[0].endswith(".")  # what it decides, in one line
    for argument in FROZEN.get(name, ()):
        assert f":param {argument}:" in doc
    assert ":returns:" in doc
    if name in STEP_HOOKS:
        assert "Stops at the first answer. Default: " in doc
    elif name != "engine_options":
        assert "Collects" in doc
    called = doc[doc.index("Called ") :]
    assert "ollective" in called
    assert "rank" in called or "process" in called or "controller" in called
