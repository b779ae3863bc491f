"""What must hold between keys of ``[algorithm]``."""

import pytest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[algorithm]\nkl_target = 0.1",
            "2: algorithm.kl_target: the weight of the KL starts at algorithm.kl_coef and is multiplied, so 0 stays 0.",
        ),
        (
            "[algorithm]\nkl_coef = 0.1\nkl_target = 0.1\n[schedule]\n'algorithm.kl_coef' = [[3, 0.2]]",
            '5: schedule."algorithm.kl_coef": algorithm.kl_target adapts this weight: remove one of the two.',
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
