import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.config.dump import as_data, dump_toml, origins
from engine_core.config.models import EngineConfig

RICH = """\
trainer = "rl"
[model]
path = "a/b"
override = { rope_theta = 1e6, deep = { x = [1, 2] } }
[actor]
backend = "dist:fsdp"
[actor.fsdp.inner]
low = 5
[ref]
backend = "torch"
[[reward]]
name = "math"
clip = [-1, 1]
[[reward]]
name = "format"
[reward.format]
pattern = 'a "quoted" \\d'
[[stage]]
name = "keep"
[algorithm]
advantage = "twin"
loss = "twin"
[algorithm.twin]
beta = 7.0
[tracking]
trackers = ["wandb", "tensorboard"]
[tracking.wandb]
project = "p"
[placement]
pools = { "my pool" = 2 }
[schedule]
"rollout.temperature" = [[0, 1], [10, 0.5]]
"algorithm.twin.alpha" = [[3, 1.5]]
"""


@pytest.mark.parametrize("text", ["", RICH, 'trainer = "sft"\n[sft]\nmax_tokens = 3\n'])
def test_what_is_dumped_reads_back_equal(config_of, text):
    config = config_of(text)
    again = config_of(dump_toml(config))
    assert again == config
    assert again.actor.options == config.actor.options
    assert again.options == config.options
    assert dump_toml(again) == dump_toml(config)


def test_options_stand_in_the_tables_of_their_names(config_of):
    data = tomllib.loads(dump_toml(config_of(RICH)))
    assert data["actor"]["fsdp"] == {"sharding": "full", "inner": {"low": 5, "high": 2}}
    assert data["reward"][1]["format"]["pattern"] == 'a "quoted" \\d'
    assert data["algorithm"]["twin"] == {"alpha": 0.5, "beta": 7.0}
    assert data["tracking"]["wandb"]["project"] == "p"
    assert data["tracking"]["tensorboard"]["folder"] == "tensorboard"


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
FLOAT = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@given(
    folder=TEXT,
    decay=FLOAT,
    stop=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    override=st.dictionaries(
        TEXT.filter(bool), TEXT | st.booleans() | st.integers(-(2**60), 2**60), max_size=3
    ),
    cap=st.floats(min_value=0, exclude_min=True, allow_infinity=True),
    pools=st.dictionaries(TEXT.filter(bool), st.integers(1, 9), max_size=1),
    clip=st.none() | st.tuples(st.floats(-9, 0), st.floats(1, 9)),
    seed=st.integers(0, 2**62),
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_survive_the_round_trip(config_of, folder, decay, stop, override, cap, pools, clip, seed):
    config = config_of('[[reward]]\nname = "math"\n')
    config.run.dir, config.run.seed, config.rollout.stop = folder, seed, stop
    config.actor.optim.weight_decay = decay
    config.model.override, config.placement.pools, config.reward[0].clip = override, pools, clip
    if cap != float("inf"):
        config.algorithm.correction.cap = cap
    assert config_of(dump_toml(config)) == config


def test_two_configs_are_equal_wherever_their_values_came_from(config_of):
    assert config_of("run.seed = 3") == config_of("", "run.seed=3")
    assert config_of("run.seed = 3") != config_of("run.seed = 4")
    assert config_of("actor.torch.device = 'cpu'") != config_of("")


def test_a_config_made_in_python_is_dumped_too():
    assert tomllib.loads(dump_toml(EngineConfig()))["rollout"]["group_size"] == 8
    assert "options" not in as_data(EngineConfig())["actor"]


def test_every_key_has_its_origin(config_of, tmp_path):
    config = config_of(RICH, "reward.math.weight=2", env={"ENGINE__RUN__SEED": "5"})
    rows = {key: (value, origin) for key, value, origin in origins(config)}
    file = f"{tmp_path}/run.toml"
    assert rows["model.path"] == ("a/b", f"{file}:3")
    assert rows["actor.fsdp.inner.low"] == (5, f"{file}:8")
    assert rows["actor.fsdp.inner.high"] == (2, "default")
    assert rows["reward.math.weight"] == (2.0, "--set reward.math.weight")
    assert rows["reward.format.format.pattern"] == ('a "quoted" \\d', f"{file}:17")
    assert rows["run.seed"] == (5, "environment ENGINE__RUN__SEED")
    assert rows["rollout.group_size"] == (8, "default")
    assert rows['schedule."rollout.temperature"'][1] == f"{file}:32"
    assert set(config._source.origins) >= {key for key, (_, origin) in rows.items() if origin != "default"}


def test_values_of_keys_named_like_secrets_are_not_shown(config_of):
    config = config_of("model.override = { api_key = 'hunter2hunter2', deep = [{ token = 'abc' }], key = 3 }")
    rows = {key: value for key, value, _ in origins(config)}
    assert rows["model.override.api_key"] == "[redacted]"
    shown = tomllib.loads(dump_toml(config, masked=True))
    assert shown["model"]["override"] == {
        "api_key": "[redacted]",
        "deep": [{"token": "[redacted]"}],
        "key": 3,
    }
    assert tomllib.loads(dump_toml(config))["model"]["override"]["api_key"] == "hunter2hunter2"
