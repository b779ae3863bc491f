"""Contracts of ``sleep``, ``wake`` and ``close``, and of the module that is lent to a sampler."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch

from engine_plugin_testing.contracts import contract, identical, near, refused
from engine_plugin_testing.reference import logits_of, outputs_of

if TYPE_CHECKING:
    from engine_plugin_testing.train_bench import TrainBench


@contract(
    capability="sleep",
    catches=(
        "optimizer state lost in sleep",
        "a step while the optimizer sleeps",
        "forward_backward of an engine asleep accepted",
        "the module of an engine asleep lent",
    ),
)
def an_engine_that_slept_goes_on_as_if_it_had_not(bench: TrainBench) -> None:
    """The step after ``sleep`` and ``wake`` is the same as without them.

    All parts sleep, or one by one. A call that needs a part that is asleep is refused.
    """
    batch = bench.batch()
    woken, rested = bench.engine(), bench.engine()
    for engine in (woken, rested):
        bench.step(engine, batch)
    rested.sleep()
    with refused("infer of an engine asleep"):
        rested.infer(bench.share(rested, batch)[1], ["log_probs"])
    with refused("forward_backward of an engine asleep"):
        bench.forward_backward(rested, batch)
    if "generation_module" in bench.capabilities:
        with refused("generation_module of an engine asleep"), rested.generation_module():
            pass
    rested.wake(only=("weights",))
    bench.infer(rested, batch)
    with refused("optimizer_step while the optimizer sleeps"):
        rested.optimizer_step()
    rested.wake()
    rested.sleep(keep=("weights",))
    identical(bench.weights(rested), bench.weights(woken), "weights kept in sleep", bench.exact)
    rested.wake()
    for engine in (woken, rested):
        bench.step(engine, batch)
    identical(bench.weights(rested), bench.weights(woken), "weights a step after sleep", bench.exact)


@contract(
    capability="sleep",
    catches=(
        "gradients lost in a sleep that keeps them",
        "gradients lost in a sleep that keeps other parts too",
        "weights in half precision after a sleep",
    ),
)
def a_sleep_between_the_calls_of_a_step_changes_nothing(bench: TrainBench) -> None:
    """An engine may sleep between two calls of one step. If it keeps the gradients, the step is the same.

    Weights and optimizer state sleep, both or one of them. Weights that are kept can be used meanwhile.
    """
    batch = bench.batch()
    woken, rested = bench.engine(), bench.engine()
    for engine in (woken, rested):
        bench.step(engine, batch)
    for more in ((), ("optimizer",), ("weights",), ("weights", "optimizer")):
        what = f"a step with sleep(keep={('gradients', *more)}) in it"
        for engine in (woken, rested):
            bench.forward_backward(engine, batch.select(range(4)))
        rested.sleep(keep=("gradients", *more))
        if "weights" in more:
            bench.infer(rested, batch)
        rested.wake()
        steps = []
        for engine in (woken, rested):
            bench.forward_backward(engine, batch.select(range(4, 8)))
            steps.append(engine.optimizer_step())
        near(steps[1].grad_norm, steps[0].grad_norm, bench.norm_tolerance, f"norm of {what}")
        identical(bench.weights(rested), bench.weights(woken), f"weights after {what}", bench.exact)


@contract(capability="generation_module", catches=("module lent in training mode",))
def the_generation_module_gives_the_logits_of_the_policy(bench: TrainBench) -> None:
    """The module lent to a sampler is the policy in eval mode, and records no gradient."""
    engine, batch = bench.engine(), bench.batch((9,))
    bench.step(engine, batch)
    expected = outputs_of(bench.reference(weights=bench.weights(engine)), batch)["log_probs"]
    with engine.generation_module() as module:
        assert not module.training, "The module is in training mode."
        ids = batch.token_ids.to(next(module.parameters()).device)
        logits = logits_of(module, ids).float().cpu()
    assert not logits.requires_grad, "The forward of the generation module records a gradient."
    rows = torch.log_softmax(logits[:-1], -1).gather(1, batch.token_ids[1:, None]).squeeze(1)
    gap = float((rows - expected[1:])[1:].abs().max())
    assert gap <= 10 * bench.tolerance, f"Log-probs of the generation module are off by {gap:.3g}."


@contract(catches=("weights kept once the engine is closed", "moments kept once the engine is closed"))
def a_closed_engine_holds_no_memory(bench: TrainBench) -> None:
    """Once an engine is closed and forgotten, no weight and no optimizer state of it is left in the process."""
    held = _tensors_of_a_closed_engine(bench)
    gc.collect()
    left = [f"{name} {list(value.shape)}" for name, ref in held if (value := ref()) is not None]
    assert not left, f"{len(left)} of {len(held)} tensors of a closed engine are left: {left[:3]}."


def _tensors_of_a_closed_engine(bench: TrainBench) -> list[tuple[str, weakref.ref[torch.Tensor]]]:
    """Return references to the tensors [D_1, ..., D_n] of an engine that has trained and is closed."""
    engine = bench.unkept_engine()
    bench.step(engine, bench.batch())
    held: list[tuple[str, torch.Tensor]] = [("a weight", value) for value in engine.module.parameters()]
    states: Any = () if engine.optimizer is None else engine.optimizer.state.values()
    held += [(name, v) for state in states for name, v in state.items() if isinstance(v, torch.Tensor)]
    engine.close()
    return [(name, weakref.ref(value)) for name, value in held]
