"""pass@k, maj@k and intervals, against counts over all subsets, tables and simulation."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from engine_plugin_tools.eval_metrics import (
    Estimate,
    bootstrap_interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    score_interval,
    student_quantile,
)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(samples):
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(passed, samples, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_unbiased():
    chance = 0.3  # of a response: k responses pass with 1 - 0.7^k
    for k in (1, 2, 4):
        weights = [math.comb(6, c) * chance**c * (1 - chance) ** (6 - c) for c in range(7)]
        mean = sum(weight * pass_at_k(c, 6, k) for c, weight in enumerate(weights))
        assert mean == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


def test_pass_at_k_of_many_samples_has_no_large_numbers():
    exact = 1 - math.comb(9_990, 100) / math.comb(10_000, 100)  # exact integers
    assert pass_at_k(10, 10_000, 100) == pytest.approx(exact, rel=1e-9)


def test_more_than_there_are_cannot_be_asked_of():
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k is {k}; expected 1 to the number of samples, 4"):
            pass_at_k(2, 4, k)
        with pytest.raises(ValueError, match=f"k is {k}"):
            majority_at_k(["a"] * 4, [True] * 4, k)


def by_enumeration(answers, passed, k):
    def vote(subset):
        said = [answers[i] for i in subset if answers[i] is not None]
        if not said:
            return 0.0
        most = max(said.count(answer) for answer in said)
        winners = {answer for answer in said if said.count(answer) == most}
        return statistics.fmean(
            statistics.fmean(right for other, right in zip(answers, passed, strict=True) if other == winner)
            for winner in winners
        )

    return statistics.fmean(vote(subset) for subset in itertools.combinations(range(len(answers)), k))


@pytest.mark.parametrize("seed", range(12))
def test_majority_at_k_is_the_mean_over_all_subsets(seed):
    rng = random.Random(seed)
    answers = [rng.choice(["4", "5", "6", "7", None][: rng.randint(2, 5)]) for _ in range(7)]
    passed = [answer == "4" for answer in answers]
    if seed % 3 == 0:
        passed[0] = not passed[0]  # samples with one answer may be judged differently
    for k in range(1, 8):
        assert majority_at_k(answers, passed, k) == pytest.approx(by_enumeration(answers, passed, k))


def test_majority_ties_are_shared_and_silence_does_not_win():
    assert majority_at_k(["4", "5"], [True, False], 2) == 0.5
    assert majority_at_k(["4", None, None], [True, False, False], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(["4"] * 64, [True] * 64, 64) == 1.0


def test_majority_at_k_of_thousands_of_samples_does_not_overflow():
    alone = majority_at_k(["4", *[None] * 2199], [True, *[False] * 2199], 1100)
    assert alone == pytest.approx(0.5)  # the subsets with the only vote
    two = majority_at_k(["4"] * 2199 + ["5"], [True] * 2199 + [False], 2)
    assert two == pytest.approx(1 - 0.5 * 2 / 2200)  # half of each subset with a tie


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (4, 2.7764),
        (9, 2.2622),
        (30, 2.0423),
        (120, 1.9799),
        (5000, 1.95996),
    ],
)
def test_students_quantile_is_that_of_the_tables(freedom, quantile):
    assert student_quantile(freedom) == pytest.approx(quantile, abs=6e-5)


def test_the_interval_of_a_mean_by_hand():
    found = mean_interval([0.0, 1.0, 1.0, 1.0])  # s = 0.5, t(3) = 3.1824
    assert (found.mean, found.prompts) == (0.75, 4)
    assert found.high - found.mean == pytest.approx(3.1824 * 0.5 / 2, abs=1e-4)
    assert found.mean - found.low == pytest.approx(found.half_width)
    assert str(found) == "0.75 ± 0.80"


def test_one_prompt_has_no_interval_unless_all_agree():
    assert math.isnan(mean_interval([0.5]).low)
    assert math.isnan(bootstrap_interval([0.5]).high)
    assert str(bootstrap_interval([0.5])) == "0.5"
    assert bootstrap_interval([1.0]).low == pytest.approx(0.025)


def test_where_all_prompts_pass_the_bound_is_the_exact_one():
    passed, failed = bootstrap_interval([1.0] * 10), bootstrap_interval([0.0] * 10)
    assert passed.low**10 == pytest.approx(0.025)  # 10 passes in a row have that probability
    assert (passed.mean, passed.high) == (1.0, 1.0)
    assert (failed.low, failed.high) == (0.0, pytest.approx(1 - passed.low))


def coverage(interval, prompts, samples, statistic, truth, trials=300):
    """Share of simulated evaluations whose interval holds the truth; each prompt has a pass rate of its own."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(trials):
        passed = rng.binomial(samples, rng.beta(1.0, 2.0, size=prompts))
        found = interval([statistic(int(count)) for count in passed])
        held += found.low <= truth <= found.high
    return held / trials


def test_scores_of_0_and_1_get_the_bounds_of_shares_and_others_those_of_means():
    none = score_interval([[0.0], [0.0, 0.0], [0.0]])
    assert (none.mean, none.low, none.high) == (0, 0, pytest.approx(1 - 0.025 ** (1 / 3)))
    halves = score_interval([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert (halves.low, halves.high) == (0.5, 1.0)  # 8 in 27 draws lack the last prompt, 1 in 27 has it alone
    assert score_interval([[0.5], [0.25, 0.75], [0.5]]) == Estimate(0.5, 0.5, 0.5, 3)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rate = 1 / 3  # mean of the Beta; 1 - E[(1 - p)^4] = 1 - 2/6
    assert 0.92 <= coverage(mean_interval, 40, 8, lambda c: c / 8, rate) <= 0.98
    assert 0.91 <= coverage(bootstrap_interval, 40, 8, lambda c: pass_at_k(c, 8, 4), 2 / 3, 200) <= 0.98


def test_responses_taken_for_prompts_would_be_too_sure():
    rng = np.random.default_rng(3)
    rates = rng.beta(0.3, 0.3, size=30)  # prompts are easy or hard
    responses = [rng.binomial(1, rate, size=16) for rate in rates]
    clustered = mean_interval([float(row.mean()) for row in responses])
    naive = mean_interval([float(one) for row in responses for one in row])
    assert naive.mean == pytest.approx(clustered.mean)
    assert clustered.half_width > 2 * naive.half_width


def test_a_bootstrap_is_repeatable():
    values = [float(value) for value in np.random.default_rng(0).random(40)]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values)
