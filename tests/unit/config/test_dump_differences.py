import pytest

from engine_core import load_config
from engine_core.config.dump import as_data, check, differences, judge
from engine_core.errors import ConfigError

WAS = {"model": {"path": "a"}, "actor": {"optim": {"lr": 0.1}}, "reward": [{"name": "math", "weight": 1.0}]}


def test_equal_configs_have_no_differences():
    assert differences(WAS, WAS) == []


def test_a_change_shows_the_key_both_values_and_what_it_means():
    now = {**WAS, "actor": {"optim": {"lr": 0.2}}}
    assert [str(d) for d in differences(WAS, now)] == ["actor.optim.lr: 0.1 -> 0.2 (allowed)"]


def test_a_key_that_came_or_went_is_a_difference():
    now = {**WAS, "reward": [{"name": "math", "weight": 1.0}, {"name": "length", "weight": 0.1}]}
    keys = [(d.key, d.was, d.now) for d in differences(WAS, now)]
    assert keys == [("reward.length.name", "unset", "length"), ("reward.length.weight", "unset", 0.1)]


def test_the_table_of_a_role_that_the_run_did_not_have_contradicts_nothing():
    now = {**WAS, "critic": {"backend": "x"}, "ref": {"path": "b"}}
    verdicts = {d.key: d.verdict for d in differences(WAS, now, roles=["actor", "ref"])}
    assert verdicts == {"critic.backend": "warned", "ref.path": "refused"}


def test_a_role_that_may_move_may_have_another_engine_and_nothing_else():
    was = {"actor": {"backend": "a", "path": "x"}, "ref": {"backend": "a"}}
    now = {"actor": {"backend": "b", "path": "y"}, "ref": {"backend": "b"}}
    verdicts = {d.key: d.verdict for d in differences(was, now, movable=["actor"])}
    assert verdicts == {"actor.backend": "warned", "actor.path": "refused", "ref.backend": "refused"}


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        ("run.steps", "allowed"),
        ("actor.optim.lr", "allowed"),
        ("actor.max_tokens_per_rank", "allowed"),
        ("checkpoint.every_steps", "allowed"),
        ("runtime.backend", "allowed"),
        ("reward.math.workers", "allowed"),
        ("data.prompts_per_step", "warned"),
        ("rollout.group_size", "warned"),
        ("rollout.backend", "warned"),
        ("algorithm.advantage", "warned"),
        ("reward.math.weight", "warned"),
        ("model.attention", "warned"),
        ("actor.torch.param_dtype", "warned"),
        ("ref.torch.quantize", "warned"),
        ("teacher.torch.quantize", "warned"),
        ("actor.torch.quantize", "refused"),
        ("model.path", "refused"),
        ("model.override.num_hidden_layers", "refused"),
        ("actor.backend", "refused"),
        ("ref.path", "refused"),
        ("trainer", "refused"),
    ],
)
def test_each_key_has_its_verdict(key, verdict):
    assert judge(key)[0] == verdict


def test_every_key_of_a_run_file_has_a_verdict():
    for difference in differences({}, as_data(load_config(overrides={"model.path": "x"}))):
        assert difference.verdict in ("allowed", "warned", "refused")


def test_a_refused_change_says_both_values_and_how_to_force_it():
    found = differences(WAS, {**WAS, "model": {"path": "b"}})
    with pytest.raises(
        ConfigError, match=r"model\.path: .*written with a, now it is b; .*--force model\.path"
    ):
        check(found, [])
    assert check(found, ["model.path"]) == found
    assert check(found, ["model"]) == found


def test_forcing_what_did_not_change_is_an_error():
    found = differences(WAS, {**WAS, "model": {"path": "b"}})
    with pytest.raises(
        ConfigError, match=r"--force model\.paht: nothing of that name.*Did you mean 'model.path'"
    ):
        check(found, ["model.paht"])


def test_options_of_a_backend_that_changed_are_held_against_those_of_the_same_name():
    was = {
        "actor": {"backend": "a", "a": {"types": "auto", "deep": {"x": 1}, "spread": "full"}},
        "ref": {"backend": "a", "a": {"types": "auto"}},
    }
    now = {
        "actor": {"backend": "acme:b", "b": {"types": "bf16", "deep": {"x": 1}, "speed": 2}},
        "ref": {"backend": "a", "a": {"types": "fp32"}},
    }
    found = {d.key: (d.was, d.now) for d in differences(was, now, movable=["actor"])}
    assert found == {
        "actor.backend": ("a", "acme:b"),
        "actor.b.types": ("auto", "bf16"),
        "ref.a.types": ("auto", "fp32"),
    }
