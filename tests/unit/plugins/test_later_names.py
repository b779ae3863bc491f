"""Names that no key of the run file chose, loaded when code asks for them: objectives, parts, columns."""

import sys

import pytest

from engine_core.errors import PluginError
from engine_core.plugins import PluginProblems, PluginSet

PART = """
    from engine_core import hookimpl
    from engine_core.specs import Part

    def score(completions):
        return [1.0 for _ in completions]

    @hookimpl
    def engine_parts():
        return {"mine": Part(load=score)}
"""


def test_a_name_is_loaded_when_it_is_required(install):
    install("acme", {"parts": {"mine": "mod_acme"}}, {"mod_acme": PART})
    plugins = PluginSet.load({"advantages": {"grpo"}})
    assert "mod_acme" not in sys.modules

    assert plugins.require("parts", "mine") is sys.modules["mod_acme"].score
    assert plugins.versions()["acme"] == "1.0"
    assert plugins.require("parts", "mine") is plugins.resolve("parts", "mine")
    assert [plugin.source for plugin in plugins.plugins].count("acme") == 1


def test_a_name_that_may_be_absent_is_none_and_one_that_may_not_is_an_error(install):
    plugins = PluginSet()

    assert plugins.offered("parts", "own") is None
    with pytest.raises(PluginProblems, match=r"^Unknown part 'own'\. Known: "):
        plugins.require("parts", "own")


def test_an_absent_part_of_ours_comes_with_its_install_command(without_our_plugins):
    with pytest.raises(PluginProblems) as caught:
        PluginSet().require("parts", "episodes")

    assert str(caught.value) == "Part 'episodes' is not installed. Try: pip install engine-plugin-agents"


@pytest.mark.parametrize("ask", ["require", "offered"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('boom')", "is broken, it does not import: RuntimeError: boom"),
        (PART.replace("engine_parts", "engine_partz"), "there is no hook 'engine_partz'"),
        (PART.replace('"mine"', '"other"'), "promises the part 'mine' in its metadata, but engine_parts"),
    ],
    ids=["import", "hook", "table"],
)
def test_what_failed_says_so_each_time_and_leaves_the_set_as_it_was(install, ask, source, message):
    install("acme", {"parts": {"mine": "mod_acme"}}, {"mod_acme": source})
    plugins = PluginSet.load({"advantages": {"grpo"}})

    for _ in range(2):
        with pytest.raises(PluginProblems, match=message):
            getattr(plugins, ask)("parts", "mine")

    assert plugins.find("parts", "mine") is None
    assert plugins.spec("advantages", "grpo").noun == "advantage estimator"
    assert plugins.require("objectives", "nll").__name__ == "nll"


def test_a_plugin_file_that_is_edited_during_a_run_is_not_run_again(tmp_path, caplog):
    file = tmp_path / "own.py"
    file.write_text(
        "from engine_core import hookimpl\n"
        "from engine_core.specs import Part, Reward\n"
        "@hookimpl\n"
        "def engine_rewards():\n"
        "    return {'first': Reward(load=lambda completions: completions)}\n"
        "@hookimpl\n"
        "def engine_parts():\n"
        "    return {'second': Part(load=lambda: 'as it was')}\n"
    )
    plugins = PluginSet.load({"rewards": {"first"}}, ["own.py"], tmp_path)
    versions = plugins.versions()
    file.write_text("raise RuntimeError('edited')")

    assert plugins.require("parts", "second")() == "as it was"
    assert plugins.offered("parts", "third") is None
    assert plugins.require("objectives", "nll")
    assert plugins.versions() == versions
    assert [plugin.source for plugin in plugins.named] == ["own.py"]


# ------------------------------------------------------------------ tables that a plugin defines

TABLE = """
    from dataclasses import dataclass
    from engine_core.hooks import hookspec
    from engine_core.specs import Spec

    @dataclass(frozen=True, kw_only=True)
    class QueryParser(Spec):
        kind, noun = "query_parsers", "query parser"
        dialect: str = ""

    SPECS = {"query_parsers": QueryParser}

    @hookspec
    def engine_query_parsers():
        "Offer parsers."
"""
PARSER = """
    from engine_core import hookimpl
    from acme_tables import QueryParser

    @hookimpl
    def engine_query_parsers():
        return {"sql": QueryParser(load="acme_sql:parse", dialect="ansi")}

    def parse(text):
        return text.split()
"""


@pytest.fixture
def tables(install):
    install("acme", {"tables": {"query_parsers": "acme_tables"}}, {"acme_tables": TABLE})
    return install


def test_names_of_a_table_that_a_plugin_defines_are_loaded_as_the_cores_are(tables):
    tables("sql", {"query_parsers": {"sql": "acme_sql"}}, {"acme_sql": PARSER})

    plugins = PluginSet.load({"query_parsers": {"sql"}})

    assert plugins.spec("query_parsers", "sql").dialect == "ansi"
    assert plugins.resolve("query_parsers", "sql")("select 1") == ["select", "1"]
    with pytest.raises(
        PluginProblems, match=r"^Unknown query parser 'sqk'\. Did you mean 'sql'\? Known: sql\."
    ):
        PluginSet.load({"query_parsers": {"sqk"}})


def test_a_plugin_file_may_offer_a_name_of_such_a_table(tables, tmp_path):
    (tmp_path / "own.py").write_text(
        "from engine_core import hookimpl\n"
        "from acme_tables import QueryParser\n"
        "@hookimpl\n"
        "def engine_query_parsers():\n"
        "    return {'own': QueryParser(load=str.split)}\n"
    )

    plugins = PluginSet.load({"query_parsers": {"own"}}, ["own.py"], tmp_path)

    assert plugins.resolve("query_parsers", "own")("a b") == ["a", "b"]


def test_what_such_a_table_gives_is_checked(tables):
    source = PARSER.replace('QueryParser(load="acme_sql:parse", dialect="ansi")', "5")
    tables("sql", {"query_parsers": {"sql": "acme_sql"}}, {"acme_sql": source})

    with pytest.raises(PluginProblems) as caught:
        PluginSet.load({"query_parsers": {"sql"}})

    assert str(caught.value) == (
        "Plugin 'sql' (sql 1.0): engine_query_parsers must return {name: QueryParser(...)}, but 'sql' is 5 (int)."
    )


def test_the_hook_of_a_table_that_nothing_defines_is_no_hook(install):
    source = PARSER.replace("from acme_tables import QueryParser", "")
    install("sql", {"plugins": {"sql": "acme_sql"}}, {"acme_sql": source})

    with pytest.raises(PluginProblems, match="there is no hook 'engine_query_parsers'"):
        PluginSet.load({}, ["sql"])


def test_a_broken_table_hurts_those_alone_who_use_it(install):
    install("acme", {"tables": {"query_parsers": "acme_tables"}}, {"acme_tables": "SPECS = {}"})
    source = PARSER.replace("from acme_tables import QueryParser", "")
    install("sql", {"query_parsers": {"sql": "acme_sql"}}, {"acme_sql": source})

    with pytest.raises(PluginProblems) as caught:
        PluginSet.load({"query_parsers": {"sql"}, "advantages": {"grpo"}})

    problem = "'acme_tables' must have SPECS with a subclass of Spec for 'query_parsers'"
    assert problem in str(caught.value)
    assert caught.value.loaded.find("advantages", "grpo")
    assert PluginSet.load({"advantages": {"grpo"}})


def test_a_table_that_two_distributions_define_is_an_error_that_names_both(tables):
    tables("zeta", {"tables": {"query_parsers": "zeta_tables"}}, {"zeta_tables": TABLE}, version="2.1")
    tables("sql", {"query_parsers": {"sql": "acme_sql"}}, {"acme_sql": PARSER})

    with pytest.raises(
        PluginError, match=r"The table 'query_parsers' is defined by acme 1\.0 and by zeta 2\.1\."
    ):
        PluginSet.load({"query_parsers": {"sql"}})
