"""Every pair loss against its definition in plain Python, its gradient against differences, and its limits."""

import math
from fractions import Fraction

import pytest
import torch

from engine_plugin_trainers.algorithms.preference import f_score
from engine_plugin_trainers.options import PAIR_LOSSES

BETA, E, GAMMA, TAU = 0.3, 0.1, 0.7, 0.05
POINTS = [(-1.0, -2.0), (-2.0, -1.0), (-0.5, -0.5), (-6.0, -0.1), (-0.2, -9.0)]


def sigma(x):
    return 1 / (1 + math.exp(-x))


def smoothed(x, e):
    return -(1 - e) * math.log(sigma(x)) - e * math.log(sigma(-x))


def bradley_terry(c, r):
    """-log of the share of the chosen one: e^βc / (e^βc + e^βr)."""
    better, worse = math.exp(BETA * c), math.exp(BETA * r)
    return -math.log(better / (better + worse))


def exo(c, r):
    """KL of two distributions over {chosen, rejected}, by its sum."""
    better, worse = math.exp(BETA * c), math.exp(BETA * r)
    own, aim = [better / (better + worse), worse / (better + worse)], [1 - E, E]
    return sum(p * math.log(p / q) for p, q in zip(own, aim, strict=True))


def discopop(c, r):
    logits = BETA * (c - r)
    m = sigma(logits / TAU)
    return (1 - m) * -math.log(sigma(logits)) + m * math.exp(-logits)


def orpo(c, r):
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (c, r)]
    return -BETA * math.log(sigma(math.log(odds[0] / odds[1])))


def nca(c, r):
    return -math.log(sigma(BETA * c)) - 0.5 * sum(math.log(sigma(-BETA * x)) for x in (c, r))


EXPECTED = {
    "apo_down": lambda c, r: sigma(BETA * c) + 1 - sigma(BETA * (c - r)),
    "apo_zero": lambda c, r: 1 - sigma(BETA * c) + sigma(BETA * r),
    "cdpo": lambda c, r: (1 - E) * bradley_terry(c, r) + E * bradley_terry(r, c),
    "cpo": lambda c, r: (1 - E) * bradley_terry(c, r) + E * bradley_terry(r, c),
    "discopop": discopop,
    "exo_pair": exo,
    "hinge": lambda c, r: max(0.0, 1 - BETA * (c - r)),
    "ipo": lambda c, r: (c - r - 1 / (2 * BETA)) ** 2,
    "nca_pair": nca,
    "orpo": orpo,
    "robust": lambda c, r: ((1 - E) * bradley_terry(c, r) - E * bradley_terry(r, c)) / (1 - 2 * E),
    "sigmoid": bradley_terry,
    "sigmoid_norm": bradley_terry,
    "simpo": lambda c, r: smoothed(BETA * (c - r) - GAMMA, E),
    "sppo_hard": lambda c, r: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
}


def loss(name, chosen, rejected, dtype=torch.float64, **changes):
    better, worse = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in (chosen, rejected))
    options = {"beta": BETA, "label_smoothing": E, "simpo_gamma": GAMMA, "discopop_tau": TAU}
    given = {**options, **changes}
    spec = PAIR_LOSSES[name]
    return spec.resolve()(better, worse, **{key: given[key] for key in spec.keywords}), (better, worse)


def test_every_loss_is_offered_and_tested():
    assert set(EXPECTED) == set(PAIR_LOSSES)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_loss_is_its_definition(name):
    found, _ = loss(name, [c for c, _ in POINTS], [r for _, r in POINTS])
    assert found.tolist() == pytest.approx([EXPECTED[name](c, r) for c, r in POINTS], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_gradient_is_the_slope_of_the_definition(name):
    found, (better, worse) = loss(name, [c for c, _ in POINTS], [r for _, r in POINTS])
    found.sum().backward()
    h = 1e-6
    for i, (c, r) in enumerate(POINTS):
        f = EXPECTED[name]
        assert better.grad[i].item() == pytest.approx(
            (f(c + h, r) - f(c - h, r)) / (2 * h), rel=1e-5, abs=1e-8
        )
        assert worse.grad[i].item() == pytest.approx(
            (f(c, r + h) - f(c, r - h)) / (2 * h), rel=1e-5, abs=1e-8
        )


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("point", [(0.0, 0.0), (0.0, -4000.0), (-4000.0, 0.0), (-4000.0, -4000.0)])
def test_a_loss_and_its_gradient_stay_finite_far_out_in_float32(name, point):
    found, sides = loss(name, [point[0]], [point[1]], torch.float32)
    found.sum().backward()
    assert found.isfinite().all()
    assert all(side.grad.isfinite().all() for side in sides)


# sppo_hard and ipo have an aim, not a side; discopop is not convex, its loss rises next to 0.
@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"discopop", "ipo", "sppo_hard"}))
def test_a_step_down_prefers_the_chosen_response(name):
    found, (better, worse) = loss(name, [-1.0], [-1.1], beta=0.1, label_smoothing=0.01)
    found.sum().backward()
    assert better.grad.item() < worse.grad.item()


def test_the_gradient_of_dpo_is_weighed_by_how_wrong_the_pair_is():
    # https://arxiv.org/abs/2305.18290, section 4: -beta sigma(beta (s_r - s_c)) at the chosen one, the opposite at the other
    found, (better, worse) = loss("sigmoid", [0.7], [1.9])
    found.sum().backward()
    assert better.grad.item() == pytest.approx(-BETA * sigma(BETA * (1.9 - 0.7)), rel=1e-12)
    assert worse.grad.item() == -better.grad.item()


@pytest.mark.parametrize("e", [0.05, 0.2, 0.45])
def test_robust_is_the_clean_loss_on_average_over_flipped_labels(e):
    right, _ = loss("robust", [-1.0], [-3.0], label_smoothing=e)
    flipped, _ = loss("robust", [-3.0], [-1.0], label_smoothing=e)
    clean, _ = loss("sigmoid", [-1.0], [-3.0])
    assert ((1 - e) * right + e * flipped).item() == pytest.approx(clean.item(), rel=1e-12)


def test_without_smoothing_cdpo_and_robust_are_dpo():
    plain, _ = loss("sigmoid", [-1.0], [-3.0])
    for name in ("cdpo", "robust", "cpo"):
        found, _ = loss(name, [-1.0], [-3.0], label_smoothing=0.0)
        assert found.item() == pytest.approx(plain.item(), rel=1e-14)


def test_exo_is_0_where_the_pair_is_as_sure_as_the_labels():
    gap = math.log((1 - E) / E) / BETA
    found, (better, _) = loss("exo_pair", [gap], [0.0])
    found.sum().backward()
    assert found.item() == pytest.approx(0.0, abs=1e-12)
    assert better.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_ipo_has_its_least_value_at_a_margin_of_one_half_over_beta():
    found, (better, _) = loss("ipo", [1 / (2 * BETA)], [0.0])
    found.sum().backward()
    assert (found.item(), better.grad.item()) == (0.0, 0.0)


GENERATORS = {
    "reverse_kl": lambda t: t * math.log(t),
    "forward_kl": lambda t: -math.log(t),
    "js": lambda t: t * math.log(t) - (t + 1) * math.log((t + 1) / 2),
    "alpha": lambda t: (t**0.3 - 0.3 * t - 0.7) / (0.3 * (0.3 - 1)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_score_is_the_slope_of_the_divergence_up_to_a_constant(name):
    def slope(t, h=1e-6):
        return (GENERATORS[name](t + h) - GENERATORS[name](t - h)) / (2 * h)

    ratios = [0.2, 0.9, 1.0, 3.0]
    score = f_score(torch.tensor(ratios, dtype=torch.float64).log(), name, alpha=0.3)
    found = (score - score[2]).tolist()
    assert found == pytest.approx([slope(t) - slope(1.0) for t in ratios], rel=1e-7, abs=1e-8)


def test_the_alpha_divergence_ends_in_the_reverse_kl():
    ratio = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    near = f_score(ratio, "alpha", 1 + 1e-5)
    assert (near - near[1]).tolist() == pytest.approx(ratio.tolist(), rel=1e-4, abs=1e-12)
    assert f_score(ratio, "alpha", 1.0) is ratio


@pytest.mark.parametrize("name", ["forward_kl", "js", "alpha"])
def test_a_score_of_a_response_that_is_lost_stays_finite(name):
    ratio = torch.tensor([-3000.0, 3000.0], requires_grad=True)
    score = f_score(ratio, name)
    score.sum().backward()
    assert score.isfinite().all()
    assert ratio.grad.isfinite().all()


def test_an_unknown_divergence_is_named():
    with pytest.raises(
        ValueError, match=r"Unknown f-divergence 'kl'\. Known: reverse_kl, forward_kl, js, alpha\."
    ):
        f_score(torch.zeros(1), "kl")


def test_the_odds_of_orpo_are_exact_for_fractions():
    # p = 1/2 and 1/4: odds 1 and 1/3, log odds ratio log 3, -log sigma(log 3) = log(4/3)
    p, q = Fraction(1, 2), Fraction(1, 4)
    found, _ = loss("orpo", [math.log(p)], [math.log(q)], beta=1.0)
    assert found.item() == pytest.approx(math.log(4 / 3), rel=1e-12)
