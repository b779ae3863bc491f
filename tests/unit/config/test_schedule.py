import pytest

from engine_core import load_config
from engine_core.config.schedule import boundaries, changes, config_at, setting, settings
from engine_core.errors import ConfigError

TEXT = """\
[rollout]
temperature = 0.9
[algorithm.ppo_clip]
clip_ratio_high = 0.28
[schedule]
"rollout.temperature" = [[3, 0.7], [10, 0.5]]
"rollout.top_k" = [[0, 50]]
"algorithm.grpo.normalize_by_std" = [[5, false]]
"algorithm.ppo_clip.clip_ratio_high" = [[5, 0.3]]
"algorithm.correction.cap" = [[2, 5]]
"actor.optim.lr" = [[4, 1e-7]]
"""


@pytest.fixture
def config(config_of):
    return config_of(TEXT)


def test_a_value_holds_from_its_step_on(config):
    temperatures = [config_at(config, step).rollout.temperature for step in (1, 2, 3, 9, 10, 11)]
    assert temperatures == [0.9, 0.9, 0.7, 0.7, 0.5, 0.5]
    assert config_at(config, 1).rollout.top_k == 50
    assert config_at(config, 5).algorithm.advantage_options.normalize_by_std is False
    assert config_at(config, 5).algorithm.loss_options.clip_ratio_high == 0.3
    assert config_at(config, 5).algorithm.loss_options.clip_ratio == 0.2
    assert config_at(config, 2).algorithm.correction.cap == 5.0
    assert config_at(config, 4).actor.optim.lr == 1e-7


def test_the_config_itself_is_left_alone(config):
    before = config.model_copy(deep=True)
    later = config_at(config, 100)
    assert config == before
    assert later._source is config._source
    assert later.actor.options is config.actor.options


def test_whole_numbers_stay_whole(config):
    assert isinstance(config_at(config, 1).rollout.top_k, int)


def test_changes_names_what_changed_in_a_step(config):
    assert changes(config, 1) == {"rollout.top_k": 50}
    assert changes(config, 2) == {"algorithm.correction.cap": 5.0}
    assert changes(config, 3) == {"rollout.temperature": 0.7}
    assert changes(config, 4) == {"actor.optim.lr": 1e-7}
    assert changes(config, 5) == {
        "algorithm.grpo.normalize_by_std": False,
        "algorithm.ppo_clip.clip_ratio_high": 0.3,
    }
    assert changes(config, 6) == {}
    assert boundaries(config) == [1, 2, 3, 4, 5, 10]


def test_nothing_scheduled_is_the_same_config(config_of):
    config = config_of("")
    assert config_at(config, 7) is config
    assert changes(config, 1) == {}


def test_tables_and_dotted_keys_mean_the_same(config_of):
    config = config_of(
        "[schedule.rollout]\ntemperature = [[0, 1.0], [2, 0.5]]\n", "schedule.rollout.top_p=[[3, 0.5]]"
    )
    assert str(config._source.origin(("schedule", "rollout.temperature"))).endswith("run.toml:2")
    assert set(config.schedule) == {"rollout.temperature", "rollout.top_p"}
    assert setting(config_at(config, 3), "rollout.top_p") == 0.5


def test_every_number_and_switch_of_the_algorithm_can_be_scheduled(config):
    assert settings(config) == {
        "rollout.temperature": float,
        "rollout.top_p": float,
        "rollout.top_k": int,
        "rollout.max_response_tokens": int,
        "actor.optim.lr": float,
        "actor.max_tokens_per_rank": int,
        "algorithm.loss_length_norm": int,
        "algorithm.mini_batch_prompts": int,
        "algorithm.epochs": int,
        "algorithm.kl_coef": float,
        "algorithm.kl_target": float,
        "algorithm.kl_horizon": float,
        "algorithm.ref_refresh_steps": int,
        "algorithm.ref_refresh_mix": float,
        "algorithm.mask_truncated": bool,
        "algorithm.entropy_coef": float,
        "algorithm.entropy_target": float,
        "algorithm.entropy_delta": float,
        "algorithm.top_entropy_quantile": float,
        "algorithm.correction.cap": float,
        "algorithm.correction.normalize": bool,
        "algorithm.correction.mask_low": float,
        "algorithm.correction.mask_high": float,
        "algorithm.correction.reject_ratio": float,
        "algorithm.correction.off_policy_threshold": float,
        "algorithm.correction.bypass": bool,
        "algorithm.correction.max_masked_share": float,
        "algorithm.correction.min_effective_sample_share": float,
        "algorithm.grpo.normalize_by_std": bool,
        "algorithm.grpo.epsilon": float,
        "algorithm.ppo_clip.clip_ratio": float,
        "algorithm.ppo_clip.clip_ratio_low": float,
        "algorithm.ppo_clip.clip_ratio_high": float,
        "algorithm.ppo_clip.clip_ratio_c": float,
        "algorithm.ppo_clip.delta": float,
    }


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            '"rollout.temprature" = [[0, 1]]',
            "this cannot change during a run. Did you mean 'rollout.temperature'?",
        ),
        ('"actor.backend" = [[0, 1]]', "this cannot change during a run."),
        ('"run.seed" = [[0, 1]]', "this cannot change during a run."),
        ('"rollout.top_p" = [[0, 2]]', "from step 0 on: got 2.0, expected at most 1."),
        ('"rollout.top_k" = [[0, 2.5]]', "from step 0 on: got 2.5, expected a whole number."),
        ('"rollout.top_k" = [[0, true]]', "from step 0 on: got true, expected a whole number."),
        ('"algorithm.grpo.normalize_by_std" = [[0, 1]]', "from step 0 on: got 1.0, expected true or false."),
        (
            '"rollout.top_k" = []',
            "got the steps [], expected at least one entry [step, value], steps increasing.",
        ),
        ('"rollout.top_k" = [[5, 1], [5, 2]]', "got the steps [5, 5], expected"),
        ('"rollout.top_k" = [[5]]', "too few entries."),
        ('"rollout.top_k" = [[-1, 5]]', "got -1, expected at least 0."),
    ],
)
def test_an_entry_that_cannot_be_followed_is_refused(problems_of, entry, expected):
    (problem,) = problems_of(f"[schedule]\n{entry}\n")
    assert problem.startswith("2: schedule.")
    assert expected in problem


def test_a_scheduled_value_is_judged_with_its_neighbours(problems_of):
    (problem,) = problems_of('[schedule]\n"rollout.temperature" = [[9, 0]]\n')
    assert "rollout.temperature: from step 9 on ([schedule]): got 0, expected more" in problem


def test_what_the_algorithm_needs_may_rise_from_nothing(config_of):
    config = config_of(
        '[schedule]\n"algorithm.kl_coef" = [[5, 0.1]]\n"algorithm.entropy_coef" = [[5, 0.1]]\n"algorithm.epochs" = [[5, 2]]\n'
    )
    before, after = config_at(config, 4).algorithm, config_at(config, 5).algorithm
    assert (before.kl_coef, before.entropy_coef, before.epochs) == (0.0, 0.0, 1)
    assert (after.kl_coef, after.entropy_coef, after.epochs) == (0.1, 0.1, 2)


def test_a_scheduled_value_of_the_wrong_type_points_to_the_table_of_schedules():
    with pytest.raises(
        ConfigError, match=r"expected a number or true or false.*see: engine schema schedule$"
    ):
        load_config(overrides={"model.path": "x", "schedule": {"rollout.temperature": [[0, "hot"]]}})
