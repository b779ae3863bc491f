"""Micro-batches of one rank of several, whose others are played by what they would have said."""

from __future__ import annotations

import pytest
import torch

from engine_core.contracts.engines import Layout
from engine_core.types import LossCall, TrainOutput
from engine_plugin_torch.data_parallel import DataParallelEngine, filler


class Told:
    """A rank that hears of the others what a test wrote down."""

    def __init__(self, most=0, others=(), size=2):
        self.least, self.others, self.rank, self.size = most, list(others), 0, size
        self.layout = Layout(0, size)

    def most(self, count):
        return max(count, self.least)

    def texts(self, mine):
        return [mine, *({"names": sorted(metrics)} for _, metrics in self.others)]

    def total(self, values):
        return values + sum(
            torch.tensor([loss, *(m.get(n, 0.0) for n in self.summed)]) for loss, m in self.others
        )

    def largest(self, values):
        return torch.stack([values, *(torch.tensor([m["max/ratio"]]).double() for _, m in self.others)]).amax(
            0
        )


def engine_of(ranks):
    class Engine(DataParallelEngine):
        def _prepare(self):
            self.ranks = ranks

        @staticmethod
        def root(compute):
            return compute()

        def _published(self, adapter):
            return iter(())

    return Engine


def test_a_rank_with_fewer_micro_batches_runs_some_that_change_nothing(make_engine, batch):
    alone, filled = make_engine(budget=24), make_engine(budget=24, cls=engine_of(Told(most=9)))
    filled.module.load_state_dict(alone.module.state_dict())
    outputs = filled.infer(batch, ["log_probs"])
    assert torch.equal(outputs["log_probs"], alone.infer(batch, ["log_probs"])["log_probs"])
    loss = LossCall("nll")
    expected = alone.forward_backward(batch, loss)
    filled.ranks.size, filled.ranks.summed = 1, []
    filled.ranks.total = lambda values: values
    found = filled.forward_backward(batch, loss)
    assert found.num_micro_batches == 9 > expected.num_micro_batches
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    for mine, other in zip(filled.module.parameters(), alone.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_loss_and_metrics_are_sums_and_maxima_over_ranks(make_engine):
    ranks = Told(others=[(2.0, {"clipped": 3.0, "max/ratio": 0.5, "other": 1.0})])
    ranks.summed = ["clipped", "other"]
    engine = make_engine(cls=engine_of(ranks))
    found = engine._over_ranks(TrainOutput(1.5, {"clipped": 1.0, "max/ratio": 0.75}, 4))
    assert (found.loss, found.num_micro_batches) == (3.5, 4)
    assert found.metrics == {"clipped": 4.0, "other": 1.0, "max/ratio": 0.75}


def test_a_rank_whose_loss_another_of_its_slice_tells_adds_nothing(make_engine):
    ranks = Told(others=[(2.0, {"clipped": 3.0})])
    ranks.layout, ranks.summed = Layout(0, 1, is_leader=False), ["clipped"]
    engine = make_engine(cls=engine_of(ranks))
    found = engine._over_ranks(TrainOutput(2.0, {"clipped": 3.0}, 1))
    assert (found.loss, found.metrics) == (2.0, {"clipped": 3.0})


def test_one_rank_of_several_does_not_try_again_when_memory_is_out(make_engine, batch, caplog):
    engine = make_engine(budget=64, cls=engine_of(Told()))
    assert not engine.budget.halve(batch, torch.OutOfMemoryError())
    assert engine.budget.tokens == 64
    assert "set actor.max_tokens_per_rank lower" in caplog.text


def test_a_filler_has_the_columns_of_the_batch_and_learns_only_when_asked(batch):
    nothing, something = filler(batch), filler(batch, learned=True)
    assert nothing.tokens.keys() == batch.tokens.keys()
    assert nothing.lengths.tolist() == [2]
    assert not nothing["loss_mask"].any()
    assert not nothing["weights"].any()
    assert something["loss_mask"].tolist() == [False, True]
