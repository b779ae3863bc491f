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


@pytest.mark.parametrize("name", ["batch_mean", "gae", "reinforce", "reinforce_plus_plus", "remax"])
def test_an_estimator_that_compares_no_responses_may_have_groups_of_one(config_of, name):
    config_of(f"[algorithm]\nadvantage = '{name}'\n[rollout]\ngroup_size = 1")
    config_of("trainer = 'sft'\n[rollout]\ngroup_size = 1")
