"""Tokens for heads and back, and outputs together: values and gradients, over ranks that are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_plugin_torch import rank_group
from engine_plugin_torch.rank_group import Exchange, Together

RANKS = 3


class Threads:
    """In the place of ``torch.distributed``; a group is the number of its rank."""

    def __init__(self):
        self.barrier, self.sent = threading.Barrier(RANKS, timeout=30), [None] * RANKS

    def _everyones(self, tensor, group):
        self.sent[group.rank()] = tensor.clone()
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found

    def all_to_all_single(self, received, sent, group):
        received.copy_(torch.stack([theirs[group.rank()] for theirs in self._everyones(sent, group)]))

    def all_reduce(self, tensor, group):
        tensor.copy_(sum(self._everyones(tensor, group)))


class Group:
    def __init__(self, rank):
        self._rank = rank

    def rank(self):
        return self._rank

    def size(self):
        return RANKS


@pytest.fixture
def on_ranks(monkeypatch):
    """``on_ranks(function)``: what each rank's call of ``function(group)`` gives."""
    monkeypatch.setattr(rank_group, "dist", Threads())
    with ThreadPoolExecutor(RANKS) as pool:
        yield lambda function: list(pool.map(function, map(Group, range(RANKS))))


def test_a_rank_gets_all_tokens_of_its_heads_gives_them_back_and_so_do_gradients(on_ranks):
    tokens, heads = 4, 2  # of each rank
    whole = torch.randn(RANKS * tokens, RANKS * heads, 5, dtype=torch.float64)
    weight = torch.randn_like(whole)

    def of_rank(group):
        mine = whole.chunk(RANKS)[group.rank()].clone().requires_grad_()
        seen = Exchange.apply(mine, group, 1, 0)
        torch.testing.assert_close(seen, whole.chunk(RANKS, 1)[group.rank()], rtol=0, atol=0)
        back = Exchange.apply(seen * weight.chunk(RANKS, 1)[group.rank()], group, 0, 1)
        torch.testing.assert_close(back, (whole * weight).chunk(RANKS)[group.rank()], rtol=0, atol=0)
        back.pow(2).sum().backward()
        return mine.grad

    found = torch.cat(on_ranks(of_rank))
    torch.testing.assert_close(found, 2 * whole * weight.pow(2))


def test_a_loss_of_outputs_together_has_each_ranks_own_part_of_the_gradient(on_ranks):
    """Every rank computes the whole loss; the gradients of all are, summed, that of one loss."""
    values = torch.randn(RANKS, dtype=torch.float64)

    def of_rank(group):
        mine = values.clone().requires_grad_()
        own = torch.zeros(RANKS, dtype=torch.float64).index_put(
            (torch.tensor([group.rank()]),), mine[group.rank()]
        )
        outputs = Together.apply(own, group)
        torch.testing.assert_close(outputs, values, rtol=0, atol=0)
        outputs.pow(3).sum().backward()
        return mine.grad

    torch.testing.assert_close(sum(on_ranks(of_rank)), 3 * values.pow(2))


def test_numbers_of_tokens_come_together_without_a_gradient(on_ranks):
    found = on_ranks(lambda group: Together.apply(torch.tensor([group.rank() + 1]), group))
    assert [int(value) for value in found] == [6, 6, 6]
    assert not any(value.requires_grad for value in found)
