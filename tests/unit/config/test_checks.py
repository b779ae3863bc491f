"""What must hold between keys of ``[algorithm]``."""

import pytest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[algorithm]\nkl_target = 0.1",
            "2: algorithm.kl_target: the KL weight starts at algorithm.kl_coef and is only multiplied, so 0 stays 0.",
        ),
        (
            "[algorithm]\nkl_coef = 0.1\nkl_target = 0.1\n[schedule]\n'algorithm.kl_coef' = [[3, 0.2]]",
            '5: schedule."algorithm.kl_coef": algorithm.kl_target adapts this weight. Remove one of the two.',
        ),
        (
            "[algorithm]\nentropy_target = 0.1\n[schedule]\n'algorithm.entropy_coef' = [[3, 0.2]]",
            '4: schedule."algorithm.entropy_coef": algorithm.entropy_target adapts this weight',
        ),
        (
            "[algorithm.correction]\nmask = 'token'\nmask_low = 2.0\nmask_high = 0.5",
            "3: algorithm.correction.mask_low: got 2.0, expected less than mask_high (0.5).",
        ),
        (
            "[algorithm.correction]\nreject = 'k3'\nreject_ratio = 1.0",
            "3: algorithm.correction.reject_ratio: got 1.0, expected a number above 1.",
        ),
        (
            "[rollout]\ngroup_size = 1",
            "2: rollout.group_size: got 1, expected at least 2: algorithm.advantage = 'grpo' compares the responses to a prompt",
        ),
        (
            "[run]\nseed = 9223372036854775808",
            "2: run.seed: got 9223372036854775808, expected a number below 9223372036854775808.",
        ),
        (
            "[model]\nseed = 9223372036854775808",
            "2: model.seed: got 9223372036854775808, expected a number below 9223372036854775808.",
        ),
        (
            "[tracking.wandb]\nmode = 'offlin'\n[tracking]\ntrackers = ['wandb']",
            "2: tracking.wandb.mode: got 'offlin', expected",
        ),
    ],
)
def test_what_cannot_work_is_refused(problems_of, text, expected):
    (problem,) = problems_of(text)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        (
            "[algorithm]\nref_refresh_steps = 5\nkl_horizon = 3.0",
            [
                "algorithm.ref_refresh_steps: algorithm.kl_coef is 0",
                "algorithm.kl_horizon: algorithm.kl_target is not set",
            ],
        ),
        (
            "[algorithm.correction]\nmask_low = 0.1\nreject_ratio = 2.0\nmax_masked_share = 1.0",
            [
                "algorithm.correction.mask_low: algorithm.correction.mask is 'off'",
                "algorithm.correction.reject_ratio: algorithm.correction.reject is 'off'",
                "algorithm.correction.max_masked_share: algorithm.correction has no mask and no reject",
            ],
        ),
        ("[algorithm.correction]\nmask = 'token'\nmask_low = 0.1\nmax_masked_share = 1.0", []),
    ],
)
def test_what_has_no_effect_is_said(config_of, text, unread):
    assert sorted(config_of(text).unread) == sorted(unread)


@pytest.mark.parametrize("name", ["batch_mean", "gae", "reinforce", "reinforce_plus_plus", "remax"])
def test_an_estimator_that_compares_no_responses_may_have_groups_of_one(config_of, name):
    config_of(f"[algorithm]\nadvantage = '{name}'\n[rollout]\ngroup_size = 1")
    config_of("trainer = 'sft'\n[rollout]\ngroup_size = 1")


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (
            "[actor.optim]\nlr = 0.0",
            ["actor.optim.lr is 0 in every step: the weights of 'actor' do not change."],
        ),
        ("[actor.optim]\nlr = 0.0\n[schedule]\n'actor.optim.lr' = [[5, 1e-6]]", []),
        ("[actor.optim]\nlr = 1e-6", []),
    ],
)
def test_a_learning_rate_of_0_is_warned_about(config_of, text, warnings):
    assert config_of(text).warnings == warnings


@pytest.mark.parametrize(
    ("variable", "warnings"),
    [
        (
            "ENGINE_RUN_STEPS",
            ["ENGINE_RUN_STEPS sets nothing: the environment variable of run.steps is ENGINE__RUN__STEPS."],
        ),
        (
            "ENGINE_ACTOR__OPTIM_LR",
            [
                "ENGINE_ACTOR__OPTIM_LR sets nothing: the environment variable of actor.optim.lr is ENGINE__ACTOR__OPTIM__LR."
            ],
        ),
        (
            "ENGINE_ACTOR_TORCH_PARAM_DTYPE",
            [
                "ENGINE_ACTOR_TORCH_PARAM_DTYPE sets nothing: the environment variable of actor.torch.param_dtype is ENGINE__ACTOR__TORCH__PARAM_DTYPE."
            ],
        ),
        ("ENGINE_FAULT", []),
        ("ENGINE_REWARD_NAME", []),
    ],
)
def test_an_environment_variable_with_too_few_underscores_is_warned_about(config_of, variable, warnings):
    config = config_of("", env={variable: "1"})
    assert config.warnings == warnings
    assert config.run.steps is None
