"""Contracts of ``update_weights``, shared modules and sleep: the sampler is the policy of its version."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.contracts.weight_sync import same_process
from engine_core.types import Batch, LossCall
from engine_plugin_testing.contracts import REFUSALS, close, contract, refused
from engine_plugin_testing.rollout_bench import RolloutBench, expected_log_probs

if TYPE_CHECKING:
    from torch import nn

    from engine_core.contracts.engines import RolloutEngine, TrainEngine


def _check_policy(
    bench: RolloutBench, engine: RolloutEngine, module: nn.Module, version: int, what: str
) -> None:
    """Assert that the engine samples from ``module`` now and reports ``version``."""
    requests = bench.requests(("2+2=", "Once upon a time"), seed=5)
    for request, rollout in zip(requests, engine.generate(requests), strict=True):
        expected, _ = expected_log_probs(module, rollout, request.sampling)
        close(
            rollout.rollout_log_probs[rollout.prompt_length :],
            expected,
            bench.tolerance,
            f"rollout_log_probs {what}",
        )
        versions = set(rollout.policy_versions[rollout.loss_mask].tolist())
        assert versions == {version}, f"policy_versions {what} are {sorted(versions)}; expected {version}."


@contract(catches=("stale weights after an update",))
def sampling_follows_new_weights(bench: RolloutBench) -> None:
    """After ``update_weights`` the log-probs are those of the new weights and the tokens carry the new version, also for a prompt that was sampled before."""
    engine, other = bench.engine(), bench.model(seed=1)
    _check_policy(bench, engine, bench.reference(), 0, "before the update")
    engine.update_weights(bench.stream(other), 7)
    assert engine.version == 7, f"version is {engine.version} after an update to 7."
    _check_policy(bench, engine, bench.reference(other), 7, "after the update")


@contract(catches=("a constant checksum",))
def the_checksum_is_of_what_was_received(bench: RolloutBench) -> None:
    """``update_weights`` returns a checksum: the same for the same weights, another for others."""
    engine = bench.engine()
    sums = [
        engine.update_weights(bench.stream(bench.model(seed=seed)), i) for i, seed in enumerate((1, 2, 1))
    ]
    assert all(isinstance(found, str) and found for found in sums), f"Checksums are {sums}; expected text."
    assert sums[0] == sums[2], f"The same weights gave the checksums {sums[0]} and {sums[2]}."
    assert sums[0] != sums[1], f"Other weights gave the same checksum {sums[0]}."


@contract(catches=("an incomplete update accepted",))
def an_update_that_does_not_fit_is_refused(bench: RolloutBench) -> None:
    """An unknown name, a missing weight and a wrong shape are errors that name the weight; the version stays; a mixture is never sampled from; a whole update repairs it."""
    weights, other = dict(bench.stream(bench.model(seed=1))), bench.model(seed=1)
    first, last = min(weights), max(weights)
    cases = {
        "an update with an unknown weight": (
            [*weights.items(), ("no.such.weight", torch.zeros(2))],
            "no.such.weight",
        ),
        "an update without a weight": ([(n, v) for n, v in weights.items() if n != last], last),
        "an update with a weight of another shape": (
            [(n, v[:1] if n == first else v) for n, v in weights.items()],
            first,
        ),
    }
    for what, (stream, word) in cases.items():
        engine = bench.engine()
        with refused(what, word):
            engine.update_weights(iter(stream), 3)
        assert engine.version == 0, (
            f"After {what} the version is {engine.version}; expected 0, the last whole one."
        )
        with contextlib.suppress(*REFUSALS):  # refusing to sample until a whole update is also correct
            _check_policy(bench, engine, bench.reference(), 0, f"after {what} was refused")
        engine.abort([request.id for request in bench.requests()])
        engine.update_weights(bench.stream(other), 4)
        _check_policy(bench, engine, bench.reference(other), 4, "after a whole update")


def _trained(bench: RolloutBench) -> TrainEngine:
    """Return a train engine on the same model (``train_backend``) after one step."""
    name = str(bench.settings["train_backend"])
    plugins = bench.load_plugins(train_engines=name)
    options = plugins.spec("train_engines", name).config.model_validate({})
    config = RoleConfig(backend=name, optim=OptimConfig(lr=0.05), options=options)
    context = WorkerContext(plugins=plugins, role="actor", device=bench.device)
    engine: TrainEngine = plugins.resolve("train_engines", name)(
        config, ModelConfig(path=bench.model()), context
    )
    bench.stack.callback(engine.close)
    _step(engine)
    return engine


def _step(engine: TrainEngine) -> None:
    mask = torch.arange(12) >= 2
    tokens = {"loss_mask": mask, "weights": mask / 10, "token_share": mask / 10}
    engine.forward_backward(Batch(torch.arange(20, 32), torch.tensor([12]), tokens), LossCall("nll"))
    engine.optimizer_step()


def _policy_of(bench: RolloutBench, engine: TrainEngine) -> nn.Module:
    module = bench.reference()
    module.load_state_dict(
        {name: w.detach().cpu().double() for name, w in engine.named_weights()}, strict=False
    )
    return module


@contract()
def a_trained_policy_reaches_the_sampler(bench: RolloutBench) -> None:
    """Weights streamed from a train engine (``train_backend``) after a step: the sampler is that policy."""
    engine, trainer = bench.engine(), _trained(bench)
    result = same_process(trainer, engine, 2, shared=False)
    assert result.version == 2, f"The sync reports version {result.version}; expected 2."
    _check_policy(bench, engine, _policy_of(bench, trainer), 2, "after a sync from a train engine")


@contract(capability="share_module", catches=("set_version ignored",))
def a_shared_module_is_followed_without_transport(bench: RolloutBench) -> None:
    """With ``share_module`` the sampler follows each step of the train engine; only ``set_version`` tells it."""
    engine, trainer = bench.engine(), _trained(bench)
    engine.share_module(trainer)
    for version in (1, 2):
        engine.set_version(version)
        _check_policy(bench, engine, _policy_of(bench, trainer), version, "from a shared module")
        _step(trainer)


@contract(capability="sleep", catches=("an update taken while asleep",))
def an_engine_asleep_takes_no_update(bench: RolloutBench) -> None:
    """``update_weights`` while asleep is refused; after ``wake`` it works and sampling is of the new weights."""
    engine, other = bench.engine(), bench.model(seed=1)
    engine.sleep()
    with refused("update_weights while asleep"):
        engine.update_weights(bench.stream(other), 1)
    engine.wake()
    engine.update_weights(bench.stream(other), 2)
    _check_policy(bench, engine, bench.reference(other), 2, "after an update that followed sleep")


@contract(capability="sleep", catches=("weights lost in sleep",))
def an_engine_that_slept_samples_as_before(bench: RolloutBench) -> None:
    """After ``sleep`` and ``wake``, whole or with the weights kept, the engine is the same policy."""
    engine = bench.engine()
    for keep in ((), ("weights",)):
        engine.sleep(keep=keep)
        engine.wake()
        _check_policy(bench, engine, bench.reference(), 0, f"after sleep(keep={keep})")
