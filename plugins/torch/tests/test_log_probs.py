"""Outputs of a distribution against plain softmax in float64, and their gradients."""

import math

import pytest
import torch

from engine_core.types import LOG_OF_NOTHING as NOTHING
from engine_plugin_torch.log_probs import OUTPUTS, gather_outputs

N, V, K = 7, 11, 4
TEMPERATURE = 0.7
CANDIDATES = torch.stack(
    [torch.randperm(V, generator=torch.Generator().manual_seed(i))[:K] for i in range(N)]
)
DIFFERENTIABLE = tuple(name for name in OUTPUTS if name != "top_ids")


def rows():
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(N, V, generator=generator, dtype=torch.float64)


TARGETS = torch.tensor([0, 3, 10, 5, 5, 1, 7])


def plain(logits):
    p = torch.softmax(logits / TEMPERATURE, -1)
    order = p.sort(-1, descending=True)
    among = torch.zeros(N, V, dtype=torch.bool)
    among[torch.arange(N)[:, None], CANDIDATES] = True
    return {
        "log_probs": p[torch.arange(N), TARGETS].log(),
        "entropy": -(p * p.log()).sum(-1),
        "sum_pi_squared": (p * p).sum(-1),
        "log_probs_at": torch.stack([p[i, CANDIDATES[i]] for i in range(N)]).log(),
        "log_rest": torch.stack([p[i, ~among[i]].sum() for i in range(N)]).log(),
        "top_ids": order.indices[:, :K],
        "top_log_probs": order.values[:, :K].log(),
        "top_log_rest": order.values[:, K:].sum(-1).log(),
    }


def gathered(logits, chunk=3, candidates=CANDIDATES, top_k=K, **which):
    columns = {"candidate_ids": candidates}
    return gather_outputs(
        lambda x: x,
        logits,
        TARGETS,
        temperature=TEMPERATURE,
        chunk=chunk,
        columns=columns,
        top_k=top_k,
        **which,
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_each_output_is_its_definition_in_any_chunks(chunk):
    found = gathered(rows(), chunk, watched=OUTPUTS)
    for name, expected in plain(rows()).items():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_gradient_of_each_output_is_that_of_its_definition(name):
    mine, other = rows().requires_grad_(), rows().requires_grad_()
    gathered(mine, grad=(name,))[name].sum().backward()
    plain(other)[name].sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)


def test_a_watched_output_has_no_gradient():
    logits = rows().requires_grad_()
    found = gathered(logits, watched=("entropy", "sum_pi_squared"))
    found["entropy"].sum().add(found["sum_pi_squared"].sum()).add(0 * found["log_probs"].sum()).backward()
    assert logits.grad.abs().max() == 0


def test_only_what_is_asked_for_is_computed():
    assert set(gathered(rows())) == {"log_probs"}
    assert set(gathered(rows(), watched=("sum_pi_squared",))) == {"log_probs", "sum_pi_squared"}


def test_a_certain_distribution_has_a_square_sum_of_one_and_no_entropy():
    logits = torch.zeros(N, V)
    logits[:, 4] = 1e4
    found = gathered(logits, watched=OUTPUTS)
    assert found["sum_pi_squared"].tolist() == [1.0] * N
    assert found["entropy"].tolist() == [0.0] * N


def test_candidates_that_are_the_whole_vocabulary_leave_nothing_and_no_gradient():
    logits = rows().requires_grad_()
    everything = torch.arange(V).repeat(N, 1)
    found = gathered(logits, candidates=everything, top_k=V, grad=OUTPUTS)
    torch.testing.assert_close(found["log_probs_at"], torch.log_softmax(logits / TEMPERATURE, -1))
    assert found["log_rest"].tolist() == found["top_log_rest"].tolist() == [NOTHING] * N
    found["log_rest"].sum().add(0 * found["log_probs"].sum()).backward()
    assert logits.grad.abs().max() == 0


def test_a_rest_far_below_rounding_keeps_its_digits_and_its_gradient():
    logits = torch.zeros(1, 3, requires_grad=True)
    with torch.no_grad():
        logits[0, 0] = 40.0  # 1 - p is 0 in float32
    found = gather_outputs(
        lambda x: x, logits, torch.tensor([0]), temperature=1.0, chunk=1, grad=("top_log_rest",), top_k=1
    )["top_log_rest"]
    assert found.item() == pytest.approx(math.log(2) - 40, rel=1e-6)
    found.sum().backward()
    assert logits.grad.tolist() == [[pytest.approx(-1.0), pytest.approx(0.5), pytest.approx(0.5)]]


@pytest.mark.parametrize("top_k", [0, V + 1])
def test_more_tokens_than_there_are_or_none_are_refused(top_k):
    with pytest.raises(ValueError, match=rf"Batch.top_k is {top_k}; .* of 1 to {V} tokens"):
        gathered(rows(), top_k=top_k, watched=("top_ids",))


def test_no_rows_give_empty_outputs_that_are_part_of_the_graph():
    logits = torch.zeros(0, V, requires_grad=True)
    columns = {"candidate_ids": CANDIDATES[:0]}
    found = gather_outputs(
        lambda x: x, logits, TARGETS[:0], temperature=1.0, chunk=4, watched=OUTPUTS, columns=columns, top_k=K
    )
    wide = dict.fromkeys(("log_probs_at", "top_ids", "top_log_probs"), (0, K))
    assert {name: tuple(values.shape) for name, values in found.items()} == dict.fromkeys(
        OUTPUTS, (0,)
    ) | wide
    found["log_probs"].sum().add(found["log_probs_at"].sum()).backward()


SUPPORT_IDS = torch.full((N, 5), -1, dtype=torch.int32)
for row, kept in enumerate([[0, 4, 9], [3], [10, 2, 1, 0, 7], [], [5, 6], [1, 0], [7, 8, 9, 10]]):
    SUPPORT_IDS[row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)


def over_support(logits):
    """log (p[target] / sum of p over the support), a row at a time from the definition."""
    p = torch.softmax(logits / TEMPERATURE, -1)
    found = []
    for row, ids in enumerate(SUPPORT_IDS.tolist()):
        kept = [i for i in ids if i >= 0] or list(range(V))
        found.append((p[row, TARGETS[row]] / p[row, kept].sum()).log())
    return torch.stack(found)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_over_a_support_log_probs_are_normalised_over_its_tokens_alone(chunk):
    logits, same = rows().requires_grad_(), rows().requires_grad_()
    options = {"temperature": TEMPERATURE, "chunk": chunk, "watched": ("entropy",)}
    found = gather_outputs(lambda x: x, logits, TARGETS, columns={"support_ids": SUPPORT_IDS}, **options)
    expected = over_support(same)
    torch.testing.assert_close(found["log_probs"], expected)
    assert found["log_probs"][1] == 0  # the only token that could come
    torch.testing.assert_close(found["entropy"].detach(), plain(rows())["entropy"])  # of the whole policy
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    (found["log_probs"] * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad, same.grad)
    assert not logits.grad[0, [1, 2, 3, 5]].any()  # what could not come is not pushed
    assert logits.grad.isfinite().all()
