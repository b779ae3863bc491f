"""The distribution against a slow one in float64, and drawing against numbers worked out by hand."""

import math

import pytest
import torch

from engine_core.types import Sampling
from engine_plugin_hf_rollout.distribution import draw, log_distribution, support, uniforms

CUTS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, top_k=5),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.3, top_p=0.6, top_k=7),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0, top_k=1000),
]


def columns(samplings):
    return (
        torch.tensor([s.temperature for s in samplings]),
        torch.tensor([s.top_p for s in samplings]),
        torch.tensor([s.top_k for s in samplings]),
    )


@pytest.fixture
def logits():
    return 2 * torch.randn(len(CUTS), 40, generator=torch.Generator().manual_seed(0))


def test_each_row_has_its_own_temperature_and_cut(logits, slow_distribution):
    found, mass = log_distribution(logits, *columns(CUTS))
    for row, sampling in enumerate(CUTS):
        kept, share = slow_distribution(logits[row].double().tolist(), sampling)
        expected = torch.full((40,), -torch.inf)
        for token, probability in kept.items():
            expected[token] = math.log(probability)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0)
        assert mass[row].item() == pytest.approx(math.log(share), abs=1e-5)


def test_nothing_cut_leaves_no_mass_behind(logits):
    found, mass = log_distribution(logits, *columns([CUTS[1]] * len(CUTS)))
    torch.testing.assert_close(found, torch.log_softmax(logits / 0.5, -1))
    assert torch.equal(mass, torch.zeros(len(CUTS)))


def test_the_token_that_crosses_top_p_stays():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    found, mass = log_distribution(logits, *columns([Sampling(top_p=0.6)]))
    torch.testing.assert_close(found.exp(), torch.tensor([[0.625, 0.375, 0.0]]))
    assert mass.item() == pytest.approx(math.log(0.8))


def test_greedy_has_the_log_probs_of_temperature_one(logits):
    greedy, _ = log_distribution(logits, *columns([Sampling(temperature=0.0)] * len(CUTS)))
    torch.testing.assert_close(greedy, torch.log_softmax(logits, -1))


def test_half_precision_logits_are_normalised_in_float32(logits):
    found, _ = log_distribution(logits.bfloat16(), *columns(CUTS))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(CUTS)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.25, 2), (0.7499, 2), (0.75, 4), (0.99999994, 4)]
)
def test_a_number_falls_into_the_part_of_its_token(uniform, token):
    log_probs = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]]).log()
    assert draw(log_probs, torch.tensor([uniform]), torch.tensor([False])).item() == token


def test_greedy_rows_take_the_most_likely_token_whatever_the_number():
    log_probs = torch.tensor([[0.25, 0.5, 0.25]] * 2).log()
    assert draw(log_probs, torch.tensor([0.99, 0.99]), torch.tensor([True, False])).tolist() == [1, 2]


def test_rounding_never_draws_a_token_that_was_cut():
    """A number that rounding brought to the very end of the sum falls on the most likely token instead."""
    log_probs = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25]]).log()
    assert draw(log_probs, torch.tensor([1.0, 1.0]), torch.tensor([False, False])).tolist() == [1, 3]


def test_tokens_come_as_often_as_their_probability_says():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    numbers = uniforms(list(range(count)), 1)[:, 0]
    drawn = draw(probabilities.log().expand(count, -1), numbers, torch.zeros(count, dtype=torch.bool))
    found = drawn.bincount(minlength=4) / count
    deviation = (probabilities * (1 - probabilities) / count).sqrt()
    assert bool(((found - probabilities).abs() < 4 * deviation).all()), found


def test_numbers_of_a_seed_do_not_depend_on_the_others_nor_on_how_many():
    rows = uniforms([3, 5, 3], 8)
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(uniforms([5], 4)[0], rows[1, :4])
    assert bool(((rows >= 0) & (rows < 1)).all())


def test_without_a_seed_numbers_come_from_torchs_own_generator():
    torch.manual_seed(0)
    first = uniforms([None, None], 4)
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(0)
    assert torch.equal(uniforms([None, None], 4), first)


def test_the_support_is_what_was_kept(logits, slow_distribution):
    log_probs, _ = log_distribution(logits, *columns(CUTS))
    found = support(log_probs, torch.full((len(CUTS),), 6))
    for row, sampling in enumerate(CUTS):
        kept, _ = slow_distribution(logits[row].double().tolist(), sampling)
        told = [token for token in found[row].tolist() if token >= 0]
        wanted = sorted(kept, key=kept.get, reverse=True) if len(kept) <= 6 else []
        assert told == wanted, sampling
    assert found.dtype == torch.int32
    assert support(log_probs, torch.zeros(len(CUTS), dtype=torch.int64)).shape == (len(CUTS), 0)
