"""Divergences against plain loops over probabilities in float64, what the rest of the vocabulary does, and the objective."""

import math

import pytest
import torch

from engine_core.metrics import declared
from engine_core.types import Batch
from engine_plugin_torch.log_probs import gather_outputs
from engine_plugin_trainers.algorithms.distillation import DIVERGENCES, NOTHING, distill, token_divergence

V = 6
BETA = 0.3


def logits(seed, rows=4):
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def by_hand(student, teacher, kind, beta=BETA):
    """Of two lists of probabilities."""
    if kind == "reverse_kl":
        return kl(student, teacher)
    if kind == "forward_kl":
        return kl(teacher, student)
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def in_probabilities(student, teacher, kind, beta=BETA):
    """The same with torch, for its gradient: [N, V] logits -> [N]."""
    s, t = torch.softmax(student, -1), torch.softmax(teacher, -1)
    if kind == "reverse_kl":
        return (s * (s / t).log()).sum(-1)
    if kind == "forward_kl":
        return (t * (t / s).log()).sum(-1)
    m = beta * t + (1 - beta) * s
    return beta * (t * (t / m).log()).sum(-1) + (1 - beta) * (s * (s / m).log()).sum(-1)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_divergence_is_its_definition(kind):
    student, teacher = logits(0), logits(1)
    found = token_divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind, BETA)
    rows = zip(student.softmax(-1).tolist(), teacher.softmax(-1).tolist(), strict=True)
    assert found.tolist() == pytest.approx([by_hand(s, t, kind) for s, t in rows], rel=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_its_gradient_is_that_of_its_definition(kind):
    mine, other, teacher = logits(0).requires_grad_(), logits(0).requires_grad_(), logits(1)
    token_divergence(mine.log_softmax(-1), teacher.log_softmax(-1), kind, BETA).sum().backward()
    in_probabilities(other, teacher, kind).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_student_that_is_the_teacher_costs_nothing_and_learns_nothing(kind):
    student = logits(0).requires_grad_()
    found = token_divergence(student.log_softmax(-1), student.detach().log_softmax(-1), kind, BETA)
    found.sum().backward()
    assert found.abs().max() < 1e-15
    assert student.grad.abs().max() < 1e-15


def test_the_mixture_holds_the_teachers_share_so_that_small_shares_are_forward_and_large_ones_reverse():
    student, teacher = logits(0).log_softmax(-1), logits(1).log_softmax(-1)
    small = token_divergence(student, teacher, "jsd", 1e-6) / 1e-6
    large = token_divergence(student, teacher, "jsd", 1 - 1e-6) / 1e-6
    torch.testing.assert_close(small, token_divergence(student, teacher, "forward_kl"), rtol=1e-4, atol=0)
    torch.testing.assert_close(large, token_divergence(student, teacher, "reverse_kl"), rtol=1e-4, atol=0)


def test_an_unknown_divergence_is_named():
    with pytest.raises(ValueError, match=r"Unknown divergence 'kl'\. Known: reverse_kl, forward_kl, jsd"):
        token_divergence(logits(0), logits(1), "kl")


# -- the objective, from logits on -------------------------------------------


def asked(student, teacher, k, lengths, mask, kind="reverse_kl", chunk=3):
    """The objective as a run computes it: what the teacher's K likeliest tokens are, the student there, the sum.

    Args:
        student: [T, V] logits that predict each token.
    """
    count = len(student)
    targets = torch.zeros(count, dtype=torch.int64)
    rows = {"temperature": 1.0, "chunk": chunk}
    names = ("top_ids", "top_log_probs", "top_log_rest")
    with torch.no_grad():
        said = gather_outputs(lambda x: x, teacher, targets, watched=names, top_k=k, **rows)
    names = ("log_probs_at", "log_rest")
    columns = {"candidate_ids": said["top_ids"]}
    outputs = gather_outputs(lambda x: x, student, targets, grad=names, columns=columns, **rows)
    weights = mask.double() / mask.sum().clamp(min=1)
    batch = Batch(
        torch.zeros(count, dtype=torch.int64),
        torch.tensor(lengths),
        {
            "candidate_log_probs": said["top_log_probs"],
            "candidate_log_rest": said["top_log_rest"],
            "weights": weights,
            "token_share": weights,
        },
    )
    return distill(outputs, batch, divergence=kind, jsd_beta=BETA)


MASK = torch.tensor([False, True, True, False, True, False])  # a prompt of one; a response of one token


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_whole_vocabulary_as_candidates_gives_the_divergence_and_its_gradient(kind):
    mine, other, teacher = logits(0, 6).requires_grad_(), logits(0, 6).requires_grad_(), logits(1, 6)
    loss, metrics = asked(mine, teacher, V, [3, 2, 1], MASK, kind)
    expected = in_probabilities(other, teacher, kind)[MASK].mean()
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-13)
    assert float(metrics["actor/divergence"]) == pytest.approx(expected.item(), rel=1e-12)
    assert float(metrics["teacher/top_mass"]) == float(metrics["actor/top_mass"]) == 1.0


@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_fewer_candidates_give_the_divergence_of_them_and_one_sum_of_all_others(kind, k):
    mine, other, teacher = logits(0, 6).requires_grad_(), logits(0, 6).requires_grad_(), logits(1, 6)
    loss, _ = asked(mine, teacher, k, [3, 2, 1], MASK, kind)
    ids = teacher.argsort(-1, descending=True)

    def merged(rows):
        p = rows.softmax(-1).gather(-1, ids)
        return torch.cat([p[:, :k], p[:, k:].sum(-1, keepdim=True)], -1).log()

    expected = in_probabilities(merged(other), merged(teacher), kind)[MASK].mean()
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_merging_tokens_never_adds_and_more_candidates_never_lose(kind):
    student, teacher = logits(2, 6), logits(3, 6)
    costs = [asked(student, teacher, k, [6], MASK, kind)[0].item() for k in range(1, V + 1)]
    *fewer, all_but_one, whole = costs
    assert fewer == sorted(fewer)
    assert fewer[0] < fewer[-1] < whole
    assert all_but_one == pytest.approx(whole, rel=1e-12)  # the rest is one token


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_nothing_is_lost_where_both_share_the_rest_in_the_same_proportions(kind):
    teacher = logits(3, 6)
    order = teacher.argsort(-1, descending=True)
    student = teacher.clone().scatter_add(-1, order[:, :2], torch.tensor([[1.0, -2.0]] * 6).double())
    student = student.scatter_add(-1, order[:, 2:], torch.full((6, V - 2), 0.7).double())
    few, whole = (asked(student, teacher, k, [6], MASK, kind)[0].item() for k in (2, V))
    assert few == pytest.approx(whole, rel=1e-12)
    assert whole > 0.01


def test_weight_on_what_the_teacher_thinks_unlikely_costs_though_it_is_no_candidate():
    teacher = torch.tensor([[5.0, 4.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    student = torch.tensor([[5.0, 4.0, 0.0, 0.0, 9.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss, metrics = asked(student, teacher, 2, [1], torch.tensor([True]))
    loss.backward()
    assert loss.item() > 3
    assert student.grad[0, 4] > 0  # less of it; cut to two tokens and normalised anew, both would be the same
    assert float(metrics["actor/top_mass"]) < 0.1


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_token_that_cannot_come_is_no_nan(kind):
    teacher = logits(0, 2)
    teacher[:, 3] = -math.inf
    student = teacher.clone().requires_grad_()
    loss, _ = asked(student, teacher, V, [2], torch.tensor([True, True]), kind)
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert student.grad.isfinite().all()


def columns(count, k=2):
    return {
        "candidate_log_probs": torch.full((count, k), math.log(0.4)),
        "candidate_log_rest": torch.full((count,), math.log(0.2)),
    }


def test_tokens_without_weight_add_nothing_even_where_they_are_no_numbers():
    outputs = {"log_probs_at": torch.full((3, 2), math.log(0.3)), "log_rest": torch.full((3,), math.log(0.4))}
    for value in outputs.values():
        value[0] = math.nan
    share = torch.tensor([0.0, 0.5, 0.5])
    batch = Batch(torch.zeros(3), torch.tensor([3]), {**columns(3), "weights": share, "token_share": share})
    loss, metrics = distill(outputs, batch, divergence="reverse_kl")
    expected = 0.6 * math.log(0.3 / 0.4) + 0.4 * math.log(0.4 / 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert all(value.isfinite() for value in metrics.values())


def test_a_batch_without_loss_tokens_costs_nothing():
    outputs = {"log_probs_at": torch.zeros(3, 2), "log_rest": torch.full((3,), NOTHING)}
    nothing = torch.zeros(3)
    batch = Batch(
        torch.zeros(3),
        torch.tensor([3]),
        {**columns(3), "weights": nothing, "token_share": nothing, "rollout_log_probs": nothing}
        | {"loss_mask": nothing.bool()},
    )
    loss, metrics = distill(outputs | {"log_probs": nothing}, batch, divergence="jsd")
    assert loss.item() == 0
    assert set(declared({name: float(value) for name, value in metrics.items()}).values()) == {0.0}


def test_the_gap_to_the_sampler_is_also_taken_over_fresh_tokens_alone():
    outputs = {"log_probs_at": torch.full((4, 2), math.log(0.3)), "log_rest": torch.full((4,), math.log(0.4))}
    outputs["log_probs"] = torch.tensor([0.0, -1.0, -1.0, -1.0])
    share = torch.tensor([0.0, 0.25, 0.25, 0.5])
    given = {
        **columns(4),
        "weights": share,
        "token_share": share,
        "loss_mask": share > 0,
        "rollout_log_probs": torch.tensor([0.0, -1.25, -3.0, -0.5]),
        "fresh": torch.tensor([True, True, False, True]),
    }
    _, found = distill(outputs, Batch(torch.zeros(4), torch.tensor([4]), given), divergence="jsd")
    assert float(found["mismatch/fresh_share"]) == pytest.approx(0.75)
    assert float(found["mismatch/fresh_abs"]) == pytest.approx(0.25 * 0.25 + 0.5 * 0.5)
    assert float(found["mismatch/mean_abs"]) == pytest.approx(0.25 * 0.25 + 0.25 * 2 + 0.5 * 0.5)
