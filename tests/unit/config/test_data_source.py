"""``[data] source``: the choice, its option table, and what it is held against."""

import jsonschema
import pytest

from engine_core.config.dump import as_data, dump_toml
from engine_core.config.evaluation import held_out_sets
from engine_plugin_tools.schema import json_schema, schema_at

RUN = """\
[model]
path = "some/model"
[[reward]]
name = "math"
[data]
source = "squares"
"""


def test_options_stand_in_the_table_of_the_sources_name(config_of):
    config = config_of(RUN + "[data.squares]\ncount = 3\n")

    assert config.data.source == "squares"
    assert config.data.options["squares"].count == 3
    assert config_of(RUN).data.options["squares"].count == 8
    assert (
        config_of(RUN.replace("squares", "dist:squares") + "[data.squares]\ncount = 4\n")
        .data.options["squares"]
        .count
        == 4
    )


def test_without_a_source_nothing_is_chosen(config_of, good):
    for text in (good, good + 'source = ""\n'):
        config = config_of(text)
        assert (config.data.source, config.data.options) == ("", {})


def test_a_table_of_a_source_that_the_run_does_not_use_is_noted(config_of, good):
    config = config_of(good + "[data.squares]\ncount = 3\n[data.columns]\nprompt = 'q'\n")

    assert config.unread == ["[data.squares]: the run uses none"]
    assert config.data.columns.prompt == "q"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[data.squares]\ncount = 0\n", "8: data.squares.count: got 0, expected a number above 0."),
        ("[data.squares]\ncuont = 3\n", "8: data.squares.cuont: unknown key. Did you mean 'count'?"),
        ("[data.squars]\ncount = 3\n", "7: data.squars: unknown key. Did you mean 'squares'?"),
        ("options = 3\n", "7: data.options: unknown key."),
        ("[data.columns]\nprompts = 'q'\n", "8: data.columns.prompts: unknown key. Did you mean 'prompt'?"),
    ],
)
def test_a_wrong_key_is_named_with_the_owner_of_the_table(problems_of, text, problem):
    (found,) = problems_of(RUN + text)

    assert found.startswith(problem)
    if "data.squares." in problem:
        assert found.endswith("Table of data source 'squares'.")  # no hint: the plugin is a file


def test_files_and_a_source_together_are_refused_with_both_keys(problems_of):
    (found,) = problems_of(RUN + 'train = ["a.jsonl"]\n')

    assert found == (
        "6: data.source: data.train is set too, and rows come from one key. Remove all others, or empty them "
        '(train = [], source = "", mix = []).'
    )


def test_a_source_may_give_the_held_out_set_and_files_come_before_it(config_of):
    (of_source,) = held_out_sets(config_of(RUN))
    (of_files,) = held_out_sets(config_of(RUN + 'validation = "held.jsonl"\n'))

    assert (of_source.name, of_source.path) == ("", [])
    assert of_files.path == "held.jsonl"


def test_a_dump_is_read_back_as_the_same_config(config_of):
    config = config_of(RUN + "[data.squares]\ncount = 3\n[data.columns]\nanswer = 'result'\n")

    assert as_data(config)["data"]["squares"] == {"count": 3}
    assert config_of(dump_toml(config)) == config


def test_a_source_called_like_a_table_of_the_core_has_no_table(config_of, specs):
    text = RUN.replace("squares", "columns") + "[data.columns]\nprompt = 'q'\n"
    config = config_of(text)

    assert config.data.columns.prompt == "q"
    assert config.data.options["columns"].count == 8
    assert config_of(dump_toml(config)) == config
    assert "count" not in schema_at(json_schema(specs), "data.columns")["properties"]


def test_the_schema_offers_the_names_the_empty_one_and_their_tables(config_of, good, specs):
    validator = jsonschema.Draft202012Validator(json_schema(specs))

    for config in (config_of(good), config_of(RUN)):
        assert not list(validator.iter_errors(as_data(config)))
    for data in ({"source": "cubes"}, {"squares": {"count": "3"}}, {"squares": {"cuont": 3}}):
        assert list(validator.iter_errors({"data": data}))
    without = jsonschema.Draft202012Validator(json_schema({}))
    assert not list(without.iter_errors({"data": {"source": ""}}))
