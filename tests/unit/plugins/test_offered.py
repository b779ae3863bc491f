"""Names that no key of the run file chose: ``PluginSet.offered``, ``PluginSet.require``, and tables that plugins define."""

import sys
import textwrap

import pytest

from engine_core.plugins.plugin_set import PluginProblems, PluginSet

SHAPES = """
    from engine_core import hookimpl
    from engine_core.specs import Column, Objective

    EVENTS = []

    def squared(outputs, batch, scale):
        return scale

    def halves(batch):
        return 0.5

    @hookimpl
    def engine_objectives():
        return {"squared": Objective(load=squared)}

    @hookimpl
    def engine_columns():
        return {"halves": Column(load="shapes:halves")}

    @hookimpl
    def engine_on_event(event):
        EVENTS.append(event)
"""
OFFERS = {"objectives": {"squared": "shapes"}, "columns": {"halves": "shapes"}}

MOODS = """
    from dataclasses import dataclass

    from engine_core.hooks import hookspec
    from engine_core.specs import Spec


    @dataclass(frozen=True, kw_only=True)
    class Mood(Spec):
        kind = "moods"
        noun = "mood"
        loud: bool = False


    SPECS = {"moods": Mood}


    @hookspec
    def engine_moods():
        pass
"""
GLAD = """
    from engine_core import hookimpl
    from mood_table import Mood


    def smile():
        return ":-)"


    @hookimpl
    def engine_moods():
        return {"glad": Mood(load=smile, loud=True)}
"""


@pytest.fixture
def moods(install):
    """A distribution that defines a table, and another one that offers a name of it."""
    install("mood-core", {"tables": {"moods": "mood_table"}}, {"mood_table": MOODS})
    install("glad-dist", {"moods": {"glad": "glad_plugin"}}, {"glad_plugin": GLAD})


def problems_of(call, *arguments):
    with pytest.raises(PluginProblems) as caught:
        call(*arguments)
    return [message for _, _, message in caught.value.problems]


def modules_of(plugins):
    return [plugin.module.__name__ for plugin in plugins.plugins]


# ------------------------------------------------------------------ loading later


def test_a_plugin_is_imported_when_its_name_is_first_asked_for(install):
    install("shapes-dist", OFFERS, {"shapes": SHAPES})
    plugins = PluginSet.load({"advantages": ["grpo"]})
    assert "shapes" not in sys.modules

    assert plugins.require("objectives", "squared")(None, None, scale=3) == 3
    assert plugins.versions()["shapes-dist"] == "1.0"
    assert plugins.offered("columns", "halves").load == "shapes:halves"
    assert plugins.function("columns", "halves")(None) == 0.5


def test_loading_later_registers_nothing_twice(install):
    install("shapes-dist", OFFERS | {"plugins": {"shapes": "shapes"}}, {"shapes": SHAPES})
    plugins = PluginSet.load({"advantages": ["grpo"]}, ["shapes"])
    before = modules_of(plugins)

    for _ in range(2):
        plugins.require("objectives", "squared")
        plugins.offered("columns", "halves")
        plugins.require("objectives", "nll")
    plugins.emit("run_started", 0, {})

    assert modules_of(plugins) == before
    assert [plugin.module.__name__ for plugin in plugins.named] == ["shapes"]
    assert sys.modules["shapes"].EVENTS == ["run_started"]
    assert plugins.observer_failures == 0


OF_FILE = SHAPES.replace('"shapes:halves"', "print")


def test_a_plugin_file_that_names_a_module_beside_it_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(SHAPES))
    plugins = PluginSet.load({}, ["mine.py"], tmp_path)
    message, *_ = problems_of(plugins.require, "columns", "halves")
    assert "'load' of 'halves' is 'shapes:halves', and no such module is installed." in message
    assert "gives the object itself, from this file, or becomes a package" in message


def test_a_name_of_a_one_file_plugin_is_found_later_too(tmp_path):
    (tmp_path / "shapes.py").write_text(textwrap.dedent(OF_FILE))
    plugins = PluginSet.load({}, ["shapes.py"], tmp_path)
    (module,) = modules_of(plugins)

    assert plugins.offered("columns", "halves").kind == "columns"
    assert plugins.require("objectives", "squared")(None, None, scale=3) == 3
    assert modules_of(plugins).count(module) == 1


def test_a_name_that_no_plugin_offers_is_none_or_an_error_and_changes_nothing(install):
    install("shapes-dist", OFFERS, {"shapes": SHAPES})
    plugins = PluginSet.load({"advantages": ["grpo"]})
    before = modules_of(plugins), dict(plugins.chosen)

    assert plugins.offered("columns", "thirds") is None
    for _ in range(2):
        (message,) = problems_of(plugins.require, "objectives", "sqared")
        assert message.startswith("Unknown objective 'sqared'. Did you mean 'squared'? Known: ")
    assert (modules_of(plugins), plugins.chosen) == before


def test_a_problem_is_reported_once_by_each_call_and_the_rest_stays_usable(install):
    install("broken-dist", {"columns": {"bad": "bad_plugin", "worse": "bad_plugin"}}, {"bad_plugin": "1 / 0"})
    install("shapes-dist", OFFERS, {"shapes": SHAPES})
    plugins = PluginSet.load({"advantages": ["grpo"]})

    for ask, name in ((plugins.offered, "bad"), (plugins.offered, "bad"), (plugins.require, "worse")):
        (message,) = problems_of(ask, "columns", name)
        assert message.startswith(
            f"Plugin '{name}' (broken-dist 1.0) is broken, it does not import: ZeroDivisionError"
        )
    assert plugins.require("objectives", "squared")(None, None, scale=3) == 3
    assert "bad_plugin" not in modules_of(plugins)


def test_a_plugin_file_that_changes_during_a_run_is_not_loaded_again(tmp_path):
    file = tmp_path / "shapes.py"
    file.write_text(textwrap.dedent(OF_FILE))
    plugins = PluginSet.load({}, ["shapes.py"], tmp_path)
    before = modules_of(plugins)
    file.write_text("raise RuntimeError('edited')")

    assert plugins.require("objectives", "squared")(None, None, scale=3) == 3
    assert plugins.offered("columns", "halves").kind == "columns"
    assert modules_of(plugins) == before


@pytest.mark.parametrize("ask", [PluginSet.offered, PluginSet.require])
def test_two_plugins_that_offer_one_name_are_both_named(install, ask):
    install("shapes-dist", OFFERS, {"shapes": SHAPES})
    install("other-dist", {"columns": {"halves": "other"}}, {"other": SHAPES})
    plugins = PluginSet.load({})

    (message,) = problems_of(ask, plugins, "columns", "halves")
    assert message == (
        "Column 'halves' is offered by other-dist 1.0 and by shapes-dist 1.0. "
        "Write 'other-dist:halves' or 'shapes-dist:halves'."
    )


# ------------------------------------------------------------------ tables of plugins


def test_a_name_of_a_plugins_table_is_chosen_or_asked_for_later(moods):
    chosen = PluginSet.load({"moods": ["glad"]})
    later = PluginSet.load({"advantages": ["grpo"]})

    assert chosen.spec("moods", "glad").loud
    assert later.require("moods", "glad")() == ":-)"
    assert later.offered("moods", "glad") == chosen.spec("moods", "glad")
    assert modules_of(later).count("glad_plugin") == 1


def test_a_one_file_plugin_offers_names_of_a_plugins_table(moods, tmp_path):
    (tmp_path / "sad.py").write_text(
        GLAD.replace("\n    ", "\n").replace("glad", "sad").replace(":-)", ":-(")
    )
    plugins = PluginSet.load({}, ["sad.py"], tmp_path)

    assert plugins.require("moods", "sad")() == ":-("
    assert plugins.require("moods", "glad")() == ":-)"


def test_an_unknown_name_of_a_plugins_table_shows_the_nearest_one(moods):
    (message,) = problems_of(PluginSet.load, {"moods": ["glud"]})

    assert message == "Unknown mood 'glud'. Did you mean 'glad'? Known: glad."


def test_a_table_of_a_plugin_takes_specs_of_its_own_class_alone(moods, install):
    wrong = GLAD.replace("from mood_table import Mood", "from engine_core.specs import Column").replace(
        "Mood(load=smile, loud=True)", "Column(load=smile)"
    )
    install("wrong-dist", {"moods": {"wrong": "wrong_plugin"}}, {"wrong_plugin": wrong})

    (message,) = problems_of(PluginSet.load, {"moods": ["wrong"]})
    assert "engine_moods must return {name: Mood(...)}, but 'glad' is Column(" in message


def test_a_name_that_the_metadata_promised_must_be_in_a_plugins_table(moods, install):
    install("empty-dist", {"moods": {"sad": "sad_plugin"}}, {"sad_plugin": GLAD})

    (message,) = problems_of(PluginSet.load, {"moods": ["sad"]})
    assert "promises the mood 'sad' in its metadata, but engine_moods of 'sad_plugin' gives glad" in message


def test_a_hook_of_a_table_that_nothing_installed_defines_is_refused(tmp_path):
    (tmp_path / "glad.py").write_text(
        "from engine_core import hookimpl\n\n@hookimpl\ndef engine_moods():\n    return {}\n"
    )

    (message,) = problems_of(PluginSet.load, {}, ["glad.py"], tmp_path)
    assert "there is no hook 'engine_moods'" in message


def test_two_plugins_that_define_one_table_are_refused(moods, install):
    install("mood-copy", {"tables": {"moods": "mood_copy"}}, {"mood_copy": MOODS})

    messages = problems_of(PluginSet.load, {"moods": ["glad"]})
    assert set(messages) == {
        "The table 'moods' is defined by mood-copy 1.0 and by mood-core 1.0. Uninstall one of them."
    }
