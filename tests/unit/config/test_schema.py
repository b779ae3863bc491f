import tomllib

import jsonschema
import pytest

from engine_core.config.dump import dump_toml
from engine_core.errors import ConfigError
from engine_core.specs import TrainBackend
from engine_plugin_tools.schema import NO_NAME, json_schema, schema_at, type_text


@pytest.fixture
def schema(specs):
    return json_schema(specs)


def errors(schema, text):
    validator = jsonschema.Draft202012Validator(schema)
    return [
        ".".join(map(str, e.absolute_path)) + ": " + e.message
        for e in validator.iter_errors(tomllib.loads(text))
    ]


def test_the_schema_is_one(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_a_good_run_is_accepted(schema, config_of, good):
    assert errors(schema, 'extends = ["base.toml"]\n' + good) == []
    assert (
        errors(
            schema, dump_toml(config_of(good + "[schedule]\n'rollout.top_k' = [[0, 1]]\n[ref]\npath='x'\n"))
        )
        == []
    )
    assert errors(schema, 'trainer = "dist:sft"\n[sft]\nmax_tokens = 3\n[actor.fsdp.inner]\nlow = 3') == []
    assert errors(schema, "[algorithm]\nloss = 'twin'\n[algorithm.twin]\nalpha = 1.0\nbeta = 1.0\n") == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[actor]\nmax_token_per_rank = 3", "actor: "),
        ("[actor.torch]\ndevce = 'cpu'", "actor.torch: "),
        ("[actor.torch]\nparam_dtype = 'fp8'", "actor.torch.param_dtype: "),
        ("[actor.fsdp.inner]\nlo = 3", "actor.fsdp.inner: "),
        ("[actor]\noptions = 3", "actor: "),
        ("[actor]\nbackend = 'tohrch'", "actor.backend: "),
        ("[[reward]]\nname = 'format'\n[reward.format]\nshare = 'x'", "reward.0.format"),
        ("[[reward]]\nweight = 3", "reward.0: "),
        ("[tracking]\ntrackers = ['gone']", "tracking.trackers.0: "),
        ("[algorithm.twin]\ngamma = 3", "algorithm.twin: "),
        ("trianer = 'rl'", ": "),
    ],
)
def test_a_misspelt_key_or_value_is_refused(schema, text, place):
    found = errors(schema, text)
    assert found
    assert all(error.startswith(place) for error in found)


def test_keys_carry_their_documentation_and_defaults(schema):
    table = schema_at(schema, "actor.torch")
    assert table["properties"]["device"]["default"] == "auto"
    assert "accelerator" in table["properties"]["device"]["description"]


def test_one_table_can_be_asked_for(schema):
    assert "weight" in schema_at(schema, "reward")["properties"]
    assert "pattern" in schema_at(schema, "reward.format")["properties"]
    assert "lr" in schema_at(schema, "ref.optim")["properties"]
    assert "actor" in schema_at(schema, "")["properties"]
    jsonschema.Draft202012Validator.check_schema(schema_at(schema, "actor.fsdp"))


def test_an_engine_that_never_trains_is_offered_to_a_teacher_and_not_to_a_critic(specs):
    never = TrainBackend(load=print, frozen_only=True)
    schema = json_schema({**specs, "train_engines": {**specs["train_engines"], "served": never}})
    assert errors(schema, "[teacher]\nbackend = 'served'\n[teacher.served]") == []
    assert errors(schema, "[critic]\nbackend = 'fsdp'\n[critic.fsdp]") == []
    assert errors(schema, "[critic]\nbackend = 'served'")
    assert "served" not in schema_at(schema, "critic")["properties"]


def test_the_type_of_a_name_is_the_names_that_exist():
    by_class = {"type": "string", "pattern": ":"}
    assert type_text({"anyOf": [{"enum": ["", "a", "b"]}, by_class]}) == '"a" | "b"'
    assert type_text({"anyOf": [{"enum": [""]}, by_class]}) == NO_NAME
    assert type_text({"enum": []}) == NO_NAME


def test_a_table_that_is_not_there_has_its_nearest(schema):
    with pytest.raises(ConfigError, match=r"^\[actor\] has no table or key 'fspd'. Did you mean 'fsdp'\?"):
        schema_at(schema, "actor.fspd")
