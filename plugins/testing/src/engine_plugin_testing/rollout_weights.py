"""Contracts of ``update_weights``, shared modules and sleep: the sampler is the policy of its version."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import torch

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.contracts.weight_sync import rounded, same_process
from engine_core.types import Batch, LossCall
from engine_plugin_testing.contracts import REFUSALS, close, contract, refused
from engine_plugin_testing.reference import fill
from engine_plugin_testing.rollout_bench import RolloutBench, expected_log_probs, response
from engine_plugin_testing.rollout_requests import finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

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
        prompt = rollout.policy_versions[: rollout.prompt_length]
        assert not prompt.any(), f"policy_versions at the prompt {what} are {prompt.tolist()}; expected 0."


@contract(
    catches=(
        "stale weights after an update",
        "an update ignored if its version is not newer",
        "the version of the weights at tokens of the prompt",
    )
)
def sampling_follows_new_weights(bench: RolloutBench) -> None:
    """After ``update_weights``, new tokens have the new version and the log-probs of the new weights.

    This holds also for a prompt that was sampled before, and for a version that came before or is older. At tokens of the
    prompt the version is 0.
    """
    engine, first, other = bench.engine(), bench.model(), bench.model(seed=1)
    _check_policy(bench, engine, bench.reference(), 0, "before the update")
    for version, path in ((7, other), (7, first), (5, other)):
        engine.update_weights(bench.stream(path), version)
        assert engine.version == version, f"version is {engine.version} after an update to {version}."
        _check_policy(bench, engine, bench.reference(path), version, f"after an update to version {version}")


@contract(
    catches=(
        "a constant checksum",
        "a checksum of one weight",
        "a checksum that is a plain sum",
        "a checksum with the version",
        "a checksum that differs between samplers",
    )
)
def the_checksum_is_of_what_was_received(bench: RolloutBench) -> None:
    """The checksum from ``update_weights`` is the same for the same weights, and changes if any weight does.

    It also changes if two weights of one shape are swapped. Another sampler gives the same checksum, whatever it
    received before: a run compares the checksums of its samplers.
    """
    engine, weights = bench.engine(), _weights(bench)
    names = sorted(weights)
    same_shape = next(
        (a, b) for a, b in itertools.combinations(names, 2)
        if weights[a].shape == weights[b].shape and not torch.equal(weights[a], weights[b])
    )  # fmt: skip
    changed = {f"'{name}' halved": {name: weights[name] / 2} for name in names}
    swapped = zip(same_shape, [weights[name] for name in same_shape[::-1]], strict=True)
    first = _all_differ(engine, weights, {**changed, "two weights swapped": dict(swapped)})
    other = bench.engine().update_weights(iter(weights.items()), 1)
    assert other == first, f"The same weights gave {first} in one sampler and {other} in another."


@contract(
    catches=(
        "a checksum of a sum for each weight",
        "a checksum without signs",
        "a checksum of rounded sums",
        "a checksum of the first values",
    )
)
def the_checksum_changes_with_any_one_value(bench: RolloutBench) -> None:
    """The checksum changes if a single value changes, and also if several change and their sum does not.

    Cases: two values of a vector swapped, all of them in the opposite order, one sign, and a small value of the largest
    weight that changes by a 64th.
    """
    weights = _weights(bench)
    vector = min(sorted(weights), key=lambda name: weights[name].numel())
    largest = max(sorted(weights), key=lambda name: weights[name].numel())
    flat = weights[vector].flatten().clone()
    flat[0], flat[-1] = 0.75, 1.25  # exact in any type of weights, with the sum of two norm weights
    swapped, sign = flat.clone(), weights[largest].flatten().clone()
    swapped[0], swapped[-1] = flat[-1], flat[0]
    turned = torch.arange(1, len(flat) + 1).to(flat) / 64
    little = sign.clone()
    at = len(sign) - 2
    sign[at] = -sign[at] if sign[at] else 1.0
    later = little[len(little) // 2 :].abs()
    small = len(little) // 2 + int(torch.where(later > 0, later, torch.inf).argmin())
    little[small] *= 1 + 1 / 64
    values = {
        "two values of a small weight": (vector, flat),
        "these values swapped": (vector, swapped),
        "a small weight in rising order": (vector, turned),
        "a small weight in falling order": (vector, turned.flip(0)),
        "one sign of the largest weight turned": (largest, sign),
        "one small value of the largest weight changed": (largest, little),
    }
    changed = {what: {name: value.view_as(weights[name])} for what, (name, value) in values.items()}
    _all_differ(bench.engine(), weights, changed)


def _weights(bench: RolloutBench) -> dict[str, Tensor]:
    """Return the weights [D_1, D_2, ...] of a model, none of which is all zeros."""
    weights = dict(bench.stream(bench.model(seed=1)))
    zeros = [name for name in sorted(weights) if not weights[name].any()]
    assert not zeros, (
        f"The model's weights {zeros} are all zeros, so half of them is no change. Let write_model draw them at random."
    )
    return weights


def _all_differ(
    engine: RolloutEngine, weights: dict[str, Tensor], changed: dict[str, dict[str, Tensor]]
) -> str:
    """Assert that the checksum is another one with each of the changes, and the same again without; return the latter.

    Args:
        engine: a sampler.
        weights: [D_1, D_2, ...] by name.
        changed: by what changes, the weights [D_1, D_2, ...] that replace others.
    """
    sums: dict[str, str] = {}
    for number, (what, values) in enumerate({"the first": {}, **changed}.items()):
        found = engine.update_weights(iter({**weights, **values}.items()), number)
        assert isinstance(found, str), f"The checksum is {found!r}; expected text."
        assert found not in sums, f"The weights with {what} have the checksum {found} of {sums[found]}."
        sums[found] = what
    again = engine.update_weights(iter(weights.items()), 99)
    assert sums.get(again) == "the first", (
        f"The same weights gave the checksums {next(iter(sums))} and {again}."
    )
    return again


@contract(catches=("a smaller type of the weights than they have",))
def a_sender_may_round_to_the_type_of_the_weights(bench: RolloutBench) -> None:
    """Weights that the sender has cast to ``weight_dtype`` give the log-probs of the weights themselves.

    It is for engines that tell the type, as those of large models do: an update then sends half of the bytes.
    """
    engine, other = bench.engine(), bench.model(seed=1)
    if engine.weight_dtype is not None:
        engine.update_weights(rounded(bench.stream(other), engine.weight_dtype), 1)
        _check_policy(bench, engine, bench.reference(other), 1, "after an update that the sender rounded")


@contract(catches=("an incomplete update accepted",))
def an_update_that_does_not_fit_is_refused(bench: RolloutBench) -> None:
    """If an update has an unknown name, lacks a weight or has a wrong shape, the engine raises an error that names the weight.

    The version stays, a mixture is never sampled from, and a whole update repairs the engine.
    """
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
            _check_policy(
                bench,
                engine,
                bench.reference(),
                0,
                f"after {what} was refused (until a whole update, `step` raises or the weights are the old ones)",
            )
        engine.abort([request.id for request in bench.requests()])
        engine.update_weights(bench.stream(other), 4)
        _check_policy(bench, engine, bench.reference(other), 4, "after a whole update")


def trained(bench: RolloutBench, path: str) -> TrainEngine:
    """Return a train engine (``train_backend``) on the model of a folder after one step."""
    name = str(bench.settings["train_backend"])
    plugins = bench.load_plugins(train_engines=name)
    kind = plugins.spec("train_engines", name).config
    exact = {"compute_dtype": "fp32"} if "compute_dtype" in kind.model_fields else {}
    options = kind.model_validate(exact)  # an engine may choose 16 bits on an accelerator
    config = RoleConfig(backend=name, optim=OptimConfig(lr=0.05), options=options)
    context = WorkerContext(plugins=plugins, role="actor", device=bench.device)
    engine: TrainEngine = plugins.resolve("train_engines", name)(config, ModelConfig(path=path), context)
    bench.stack.callback(engine.close)
    train_step(engine)
    return engine


def train_step(engine: TrainEngine) -> None:
    """Take an optimizer step on a fixed batch."""
    mask = torch.arange(12) >= 2
    tokens = {"loss_mask": mask, "weights": mask / 10, "token_share": mask / 10}
    engine.forward_backward(Batch(torch.arange(20, 32), torch.tensor([12]), tokens), LossCall("nll"))
    engine.optimizer_step()


def policy_of(bench: RolloutBench, engine: TrainEngine, path: str) -> nn.Module:
    """Return the reference with the present weights of a train engine on the model of a folder."""
    module = bench.reference(path)
    fill(module, {name: weight.detach().cpu() for name, weight in engine.named_weights()})
    return module


@contract()
def a_trained_policy_reaches_the_sampler(bench: RolloutBench) -> None:
    """A sampler that gets a train engine's weights after a step samples that policy.

    The train engine is ``train_backend``.
    """
    path = bench.model()
    engine, trainer = bench.engine(path), trained(bench, path)
    result = same_process(trainer, engine, 2, shared=False)
    assert result.version == 2, f"The sync reports version {result.version}; expected 2."
    _check_policy(bench, engine, policy_of(bench, trainer, path), 2, "after a sync from a train engine")


@contract(
    capability="share_module",
    catches=(
        "set_version ignored",
        "a shared module sampled in training mode",
        "a batch continued after a step that failed in its midst",
        "requests lost by a step that failed",
    ),
)
def a_shared_module_is_followed_without_transport(bench: RolloutBench) -> None:
    """With ``share_module``, the sampler follows every step of the train engine.

    The dropout of the model is off. Only ``set_version`` announces a step. If the model fails in the midst of a
    ``step``, the next one samples the same requests as if nothing had happened.
    """
    path = bench.second_model()
    engine, trainer = bench.engine(path), trained(bench, path)
    engine.share_module(trainer)
    for version in (1, 2):
        engine.set_version(version)
        _check_policy(bench, engine, policy_of(bench, trainer, path), version, "from a shared module")
        train_step(trainer)
    _check_failures(bench, engine, trainer, policy_of(bench, trainer, path))


class _Failure(Exception):
    """What a model raises in place of an interruption, or of an error of the device."""


def _check_failures(
    bench: RolloutBench, engine: RolloutEngine, trainer: TrainEngine, reference: nn.Module
) -> None:
    """Let the shared module fail once in each of several forward passes, before it and after it, and compare responses."""
    requests = bench.requests(temperature=0.0)
    most = requests[0].sampling.max_response_tokens
    right = {request.id: bench.greedy(reference, request.prompt.token_ids, most) for request in requests}
    for call, hook in itertools.product((0, 1, 4), ("register_forward_pre_hook", "register_forward_hook")):
        passes = itertools.count()

        def fail(*_: object, call: int = call, passes: Iterator[int] = passes) -> None:
            """Raise at one call."""
            if next(passes) == call:
                raise _Failure

        with trainer.generation_module() as module:
            handle = getattr(module, hook)(fail)
        engine.add(requests)
        try:
            done = finish(engine)
        except _Failure:
            done = None
        handle.remove()
        assert done is None, f"The shared module raised in forward pass {call}, and step did not."
        what = f"after a step that failed in forward pass {call}"
        assert engine.num_unfinished == len(requests), (
            f"{engine.num_unfinished} of {len(requests)} requests are unfinished {what}."
        )
        by_id = {rollout.request_id: rollout for rollout in finish(engine)}
        assert by_id.keys() == {request.id for request in requests}, f"Requests were lost {what}."
        for id, expected in right.items():
            found = response(by_id[id])[: len(expected)]
            assert found == expected, f"'{id}' {what}: {found}; expected {expected}."


@contract(
    capability="sleep",
    catches=(
        "an update taken while asleep",
        "weights woken with the cache",
        "weights that stay awake if the cache is kept",
        "a step taken while asleep",
    ),
)
def an_engine_asleep_takes_no_update(bench: RolloutBench) -> None:
    """While the weights are asleep, the engine refuses ``update_weights`` and ``step``.

    Cases: the whole engine sleeps, it keeps its cache, or the cache alone was woken. A request that waits is answered after ``wake``.
    After ``wake`` it works, and sampling is of the new weights.
    """
    engine, other = bench.engine(), bench.model(seed=1)
    requests = bench.requests(("ab",))
    for keep, only in (((), None), (("kv_cache",), None), ((), ("kv_cache",))):
        engine.sleep(keep=keep)
        how = f"after sleep(keep={keep})"
        if only:
            engine.wake(only=only)
            how += f" and wake(only={only})"
        with refused(f"update_weights {how}, with the weights asleep,"):
            engine.update_weights(bench.stream(other), 1)
        engine.add(requests)
        with refused(f"step {how}, with the weights asleep,"):
            finish(engine)
        engine.wake()
        assert [r.request_id for r in finish(engine)] == [r.id for r in requests], (
            f"The request that waited {how} is not answered once after wake()."
        )
    engine.update_weights(bench.stream(other), 2)
    _check_policy(bench, engine, bench.reference(other), 2, "after an update that followed sleep")


@contract(
    capability="sleep",
    catches=(
        "weights lost in sleep",
        "weights put to sleep although they are kept",
        "a wake of one part without effect",
    ),
)
def an_engine_that_slept_samples_as_before(bench: RolloutBench) -> None:
    """After ``sleep`` and ``wake``, the engine samples the same policy as before.

    It sleeps whole or with the weights kept. An update while the weights are awake, kept or woken alone, raises nothing.
    """
    engine = bench.engine()
    for keep in ((), ("weights",)):
        engine.sleep(keep=keep)
        engine.wake()
        _check_policy(bench, engine, bench.reference(), 0, f"after sleep(keep={keep})")
    for version, keep in ((1, ("weights",)), (2, ())):
        path = bench.model(seed=version)
        engine.sleep(keep=keep)
        if not keep:
            engine.wake(only=("weights",))
        about = f"after an update during sleep(keep={keep}), with the weights awake"
        try:
            engine.update_weights(bench.stream(path), version)
        except REFUSALS as error:
            raise AssertionError(
                f"An update is refused {about.removeprefix('after an update ')}: {error}"
            ) from error
        engine.wake()
        _check_policy(bench, engine, bench.reference(path), version, about)
