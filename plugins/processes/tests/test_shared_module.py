"""When the actor's module is lent, and that it is given back."""

from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch

from engine_plugin_processes.shared_module import SharedModule, SharedModuleHolder


def done():
    future = Future()
    future.set_result(None)
    return future


def test_it_is_lent_to_who_samples_and_given_back_before_anybody_else_works():
    told = []
    loan = SharedModule(lambda kind: told.append(kind) or done())
    for role, method in [
        ("actor", "mark"),
        ("rollout", "add"),
        ("rollout", "step"),
        ("rollout", "generate"),
        ("ref", "infer"),
        ("actor", "forward_backward"),
        ("rollout", "advance"),
    ]:
        loan.before(role, method)
        told.append(f"{role} {method}")
    loan.end()
    loan.end()
    assert told == [
        "actor mark",
        "rollout add",
        *("lend", "rollout step"),
        "rollout generate",
        *("take_back", "ref infer"),
        "actor forward_backward",
        *("lend", "rollout advance"),
        "take_back",
    ]


def test_a_loan_that_fails_half_way_is_taken_back():
    told = []

    def tell(kind):
        told.append(kind)
        future = done() if kind == "take_back" else Future()
        if kind == "lend":
            future.set_exception(torch.OutOfMemoryError("3 GiB"))
        return future

    loan = SharedModule(tell)
    with pytest.raises(torch.OutOfMemoryError):
        loan.before("rollout", "generate")
    loan.before("actor", "save")
    assert told == ["lend", "take_back"]


class Engine:
    context = "its context"

    def __init__(self):
        self.module, self.entered, self.left = torch.nn.Linear(2, 2), 0, 0

    @contextmanager
    def generation_module(self):
        self.entered += 1
        with torch.no_grad():
            yield self.module
        self.left += 1


def test_the_engine_is_entered_once_however_often_the_sampler_asks():
    engine = Engine()
    lender = SharedModuleHolder(engine)
    lender.lend()
    lender.lend()
    for _ in range(3):
        with lender.generation_module() as module:
            assert module is engine.module
            assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert (engine.entered, engine.left) == (1, 0)
    lender.take_back()
    lender.take_back()
    assert (engine.entered, engine.left) == (1, 1)
    assert torch.is_grad_enabled()
    assert (lender.module, lender.context) == (engine.module, "its context")


def test_what_is_not_lent_is_not_used():
    with pytest.raises(RuntimeError, match="is not lent"), SharedModuleHolder(Engine()).generation_module():
        pass
