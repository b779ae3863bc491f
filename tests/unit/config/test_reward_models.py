"""``[reward.model]``: a model that gives a reward, its own backend, and what a file may not say."""

import pytest

from engine_core.config.choices import used_names
from engine_core.config.dump import as_data, differences, dump_toml
from engine_core.errors import ConfigError, PluginError

RM = '[[reward]]\nname = "helpful"\n[reward.model]\npath = "rm"\n'


def test_a_reward_with_a_model_has_a_free_name_and_a_backend_of_its_own(config_of, good):
    config = config_of(good + RM + 'backend = "fsdp"\n[reward.model.fsdp]\nsharding = "none"\n')
    reward = config.reward[-1]
    assert (reward.name, reward.role, reward.has_model) == ("helpful", "reward.helpful", True)
    role = config.role("reward.helpful")
    assert (role.backend, role.path, role.options.sharding, role.lora) == ("fsdp", "rm", "none", None)
    assert config.rewarding("reward.math") is config.reward[0]
    assert config.rewarding("actor") is None


def test_its_model_table_is_its_own(config_of):
    text = (
        '[model]\npath = "m"\nattention = "sdpa"\noverride = { rope_theta = 5.0 }\ntrust_remote_code = true\n'
    )
    config = config_of(text + RM)
    model = config.model_of("reward.helpful")
    assert (model.path, model.attention, model.override, model.trust_remote_code) == ("rm", "sdpa", {}, False)
    assert config.model_of("actor") is config.model


def test_its_backend_is_a_name_that_the_run_uses_and_its_own_name_is_none():
    data = {"reward": [{"name": "helpful", "model": {"path": "rm", "backend": "fsdp"}}, {"name": "math"}]}
    assert used_names(data)["train_engines"] == {"torch", "fsdp"}
    assert used_names(data)["rewards"] == {"math"}
    assert "fsdp" not in used_names(data, {"actor"}).get("train_engines", set())


def test_the_resolved_config_reads_back_as_an_equal_one(config_of, good):
    config = config_of(good + RM + 'score_at = "sampled"\n[reward.model.torch]\nparam_dtype = "bf16"\n')
    again = config_of(dump_toml(config))
    assert again == config
    assert again.reward[-1].model.options.param_dtype == "bf16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[reward]]\nname = "h"\n[reward.model]\n', "reward.h.model.path: missing"),
        (RM + "pth = 1\n", "reward.helpful.model.pth: unknown key. Did you mean 'path'?"),
        (RM + "lora = {}\n", "reward.helpful.model.lora: unknown key."),
        (RM + 'score_at = "first"\n', "reward.helpful.model.score_at: got 'first'"),
        (
            RM + "[reward.model.torch]\nparam_dtyp = 1\n",
            "reward.helpful.model.torch.param_dtyp: unknown key.",
        ),
        (RM + "[reward.model.fdsp]\n", "reward.helpful.model.fdsp: unknown key. Did you mean 'fsdp'?"),
        (RM + RM, "reward.helpful: 'helpful' is listed 2 times"),
    ],
)
def test_what_cannot_be_meant_is_refused(config_of, good, text, expected):
    with pytest.raises(ConfigError) as error:
        config_of(good + text)
    assert expected in str(error.value)


def test_a_resumed_run_may_have_another_reward_model_and_says_so(config_of, good):
    was = as_data(config_of(good + RM))
    now = as_data(config_of(good + RM.replace('"rm"', '"other"') + "max_tokens_per_rank = 9\n"))
    found = {d.key: d.verdict for d in differences(was, now)}
    assert found == {
        "reward.helpful.model.path": "warned",
        "reward.helpful.model.max_tokens_per_rank": "allowed",
    }


def test_a_missing_table_is_named_where_the_name_is_no_reward():
    from engine_core import load_config

    with pytest.raises(
        PluginError, match=r"'reward_model' is known as trainer, not as reward.*has a table \[reward\.model\]"
    ):
        load_config(overrides={"reward": [{"name": "reward_model"}]})
    with pytest.raises(
        PluginError, match=r"Unknown reward 'helpful'\..*has a table \[reward\.model\] with its path"
    ):
        load_config(overrides={"reward": [{"name": "helpful"}]})


VERDICT = '[[reward]]\nname = "v"\n[reward.verdict]\npath = "lm"\nprompt = "{completion}"\n'
JUDGE = '[[reward]]\nname = "j"\n[reward.judge]\npath = "lm"\nbackend = "vllm"\nprompt = "{completion}"\n'


def test_judges_are_roles_of_their_own_kind(config_of, good):
    config = config_of(good + VERDICT + JUDGE + "votes = 3\ntemperature = 0.5\n")
    assert config.role("reward.v").backend == "torch"
    sampler = config.sampler("reward.j")
    assert (sampler.backend, sampler.group_size, sampler.temperature) == ("vllm", 3, 0.5)
    assert config.sampler("rollout") is config.rollout
    assert config.model_of("reward.j").path == "lm"
    data = {"reward": [{"name": "j", "judge": {"backend": "vllm"}}]}
    assert used_names(data)["rollout_engines"] == {"hf", "vllm"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            VERDICT.replace("{completion}", "Is it right?"),
            "{completion} is missing: the model would not see the response",
        ),
        (VERDICT + "verdicts = { Yes = 1.0 }\n", "verdicts must have two values at least"),
        (VERDICT + "verdicts = { Yes = nan, No = 0.0 }\n", "reward.v.verdict.verdicts.Yes: got nan"),
        (JUDGE + "votes = 2\n", "votes = 2 with temperature = 0 gives the same answer each time"),
        (JUDGE + 'pattern = "("\n', "reward.j.judge.pattern: got '('"),
        (JUDGE + "scale = [5.0, 1.0]\n", "expected [low, high] with low below high"),
        (JUDGE + "scale = [0.0, 1.0]\nverdicts = { a = 1.0 }\n", "verdicts have their own values"),
        (
            JUDGE + VERDICT.partition("\n")[2].partition("\n")[2],
            "[reward.judge] and [reward.verdict] are in one [[reward]]",
        ),
    ],
)
def test_judges_that_cannot_be_meant_are_refused(config_of, good, text, expected):
    with pytest.raises(ConfigError) as error:
        config_of(good + text)
    assert expected in str(error.value)
