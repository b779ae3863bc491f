"""Outputs of a distribution against plain softmax in float64, and their gradients."""

import pytest
import torch

from engine_core.engines.log_probs import OUTPUTS, gather_outputs

N, V = 7, 11
TEMPERATURE = 0.7


def rows():
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(N, V, generator=generator, dtype=torch.float64)


TARGETS = torch.tensor([0, 3, 10, 5, 5, 1, 7])


def plain(logits):
    p = torch.softmax(logits / TEMPERATURE, -1)
    return {
        "log_probs": p[torch.arange(N), TARGETS].log(),
        "entropy": -(p * p.log()).sum(-1),
        "sum_pi_squared": (p * p).sum(-1),
    }


def gathered(logits, chunk=3, **which):
    return gather_outputs(lambda x: x, logits, TARGETS, temperature=TEMPERATURE, chunk=chunk, **which)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_each_output_is_its_definition_in_any_chunks(chunk):
    found = gathered(rows(), chunk, watched=OUTPUTS)
    for name, expected in plain(rows()).items():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("name", OUTPUTS)
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


def test_no_rows_give_empty_outputs_that_are_part_of_the_graph():
    logits = torch.zeros(0, V, requires_grad=True)
    found = gather_outputs(lambda x: x, logits, TARGETS[:0], temperature=1.0, chunk=4, watched=OUTPUTS)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(OUTPUTS, 0)
    found["log_probs"].sum().backward()
