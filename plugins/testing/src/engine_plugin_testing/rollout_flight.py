"""Contracts of weights that change, or sleep, under responses in flight, and of what belongs to the caller.

After an update every new token is drawn from the new weights over the whole sequence: keys and values that the old
weights computed are computed again. Otherwise no version of the weights explains the log-probs of later tokens, which
``policy_versions`` attributes to one. A sampler that keeps old keys and values says so in the suite's ``unsupported``.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_plugin_testing.contracts import close, contract
from engine_plugin_testing.reference import LIVELIER
from engine_plugin_testing.rollout_bench import TEXTS, RolloutBench, response
from engine_plugin_testing.rollout_draws import chosen, rows_of_response
from engine_plugin_testing.rollout_partial import LONG, STEPS, STOPS
from engine_plugin_testing.rollout_weights import policy_of, train_step, trained

if TYPE_CHECKING:
    from torch import nn

    from engine_core.contracts.engines import RolloutEngine
    from engine_core.types import Request, Rollout

LATER = {5: 1, 6: 2}  # versions and the seeds of their weights, in the order of the updates
SHARE_OF_TOKENS = 0.25  # of the memory of responses in flight: their tokens and log-probs, which stay
SLACK_BYTES = 20_000
STORY = "Once upon a time there was a sampler that kept too much of what it knew"  # 71 tokens: several blocks


def _requests(bench: RolloutBench, **sampling: Any) -> list[Request]:
    return bench.requests((*TEXTS, STORY), group=2, max_response_tokens=LONG, **sampling)


def _steps(engine: RolloutEngine, count: int) -> list[Rollout]:
    return [rollout for _ in range(count) if engine.num_unfinished for rollout in engine.step()]


def _ended(engine: RolloutEngine, done: list[Rollout], requests: Sequence[Request]) -> list[Rollout]:
    """Step to the end; return all rollouts, in the order of the requests, each of which is answered once."""
    done = [*done, *_steps(engine, 2000)]
    assert sorted(rollout.request_id for rollout in done) == sorted(request.id for request in requests), (
        "Not every request came back exactly once."
    )
    by_id = {rollout.request_id: rollout for rollout in done}
    return [by_id[request.id] for request in requests]


def _check_versions(bench: RolloutBench, modules: dict[int, nn.Module], rollouts: Sequence[Rollout]) -> None:
    """Assert that each token's log-prob is that of the weights of its version, and that versions only rise."""
    for rollout in rollouts:
        versions = rollout.policy_versions[rollout.prompt_length :]
        about = f"'{rollout.request_id}' ({rollout.finish_reason}, versions {versions.tolist()})"
        assert rollout.finish_reason != "abort", f"{about} was aborted."
        assert set(versions.tolist()) <= modules.keys(), f"{about} has versions besides {sorted(modules)}."
        assert bool((versions.diff() >= 0).all()), f"{about} has versions that fall."
        found = rollout.rollout_log_probs[rollout.prompt_length :]
        for version in set(versions.tolist()):
            at = versions == version
            expected = chosen(rows_of_response(modules[version], rollout), rollout)
            close(
                found[at],
                expected[at],
                bench.tolerance,
                f"log-probs of the tokens of version {version} of {about}",
            )


@contract(
    capability="pause",
    catches=(
        "keys and values of the weights before an update",
        "the version of an update for tokens before it",
        "responses in flight that keep the old weights",
        "responses in flight that begin again",
    ),
)
def weights_change_under_responses_in_flight(bench: RolloutBench) -> None:
    """If weights change while a response is frozen, each token keeps the version and log-prob of the weights that drew it.

    Two updates arrive after ``pause("keep")``. The log-prob is over the token's whole prefix, and sampled tokens
    stay.
    """
    seeds = {0: 0, **LATER}
    modules = {version: bench.reference(bench.model(seed=seed)) for version, seed in seeds.items()}
    engine = bench.engine(**STOPS)

    def update(version: int) -> None:
        """Send the weights of a version."""
        engine.update_weights(bench.stream(bench.model(seed=seeds[version])), version)

    _change_in_flight(bench, engine, modules, update)


@contract(capability="share_module", catches=("keys and values of a shared module kept over its steps",))
def a_shared_module_changes_under_responses_in_flight(bench: RolloutBench) -> None:
    """If a shared module is trained while a response is frozen, each token keeps the version and log-prob with which it was drawn.

    ``set_version`` announces each step after ``pause("keep")``. The contract is empty for an engine without ``pause``.
    """
    if "pause" not in bench.capabilities:
        return
    path, shared = bench.model(), bench.engine(**STOPS)
    trainer = trained(bench, path)
    shared.share_module(trainer)
    shared.set_version(0)
    modules = {0: policy_of(bench, trainer, path)}

    def step(version: int) -> None:
        """Train for a step and announce its version."""
        train_step(trainer)
        modules[version] = policy_of(bench, trainer, path)
        shared.set_version(version)

    _change_in_flight(bench, shared, modules, step)


def _change_in_flight(
    bench: RolloutBench, engine: RolloutEngine, modules: dict[int, nn.Module], update: Callable[[int], None]
) -> None:
    """Freeze responses for updates to the versions of ``LATER``, and compare each token with its version in ``modules``."""
    requests, mixed = _requests(bench, temperature=1.0), set()
    for steps in STEPS:
        engine.add(requests)
        done = _steps(engine, steps)
        for version in LATER:
            engine.pause("keep")
            update(version)
            engine.resume()
            done += _steps(engine, steps)
        rollouts = _ended(engine, done, requests)
        _check_versions(bench, modules, rollouts)
        kinds = [set(rollout.policy_versions[rollout.prompt_length :].tolist()) for rollout in rollouts]
        mixed = set(LATER) & set().union(*(kind for kind in kinds if len(kind) > 1))
        if mixed:
            break
        update(0)
    assert mixed, (
        f"No response has tokens of two versions, after {STEPS} steps before each update. A step must be short where "
        f"config.steps_are_short. {LIVELIER}"
    )
    last = max(LATER)
    _check_versions(
        bench, {last: modules[last]}, engine.generate(requests)
    )  # also of prompts that were read before


@contract(capability="pause", catches=("responses in flight lost in sleep", "a token changed in sleep"))
def a_sleep_under_responses_in_flight_changes_nothing(bench: RolloutBench) -> None:
    """Greedy responses that are frozen while the engine sleeps equal those of an engine that never slept.

    The engine is frozen by ``pause("keep")``, and sleeps if the spec declares ``sleep``.
    """
    module, engine = bench.reference(), bench.engine(**STOPS)
    requests = _requests(bench, temperature=0.0)
    engine.add(requests)
    done = engine.step()
    engine.pause("keep")
    if "sleep" in bench.capabilities:
        engine.sleep()
        engine.wake()
    engine.resume()
    rollouts = _ended(engine, done, requests)
    _check_versions(bench, {0: module}, rollouts)
    for request, rollout in zip(requests, rollouts, strict=True):
        expected = bench.greedy(module, request.prompt.token_ids, LONG)
        found = response(rollout)[: len(expected)]
        assert found == expected, f"'{request.id}': {found}; expected {expected}."


def _random_states() -> list[Any]:
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    return [torch.get_rng_state().tolist(), [kind, keys.tolist(), rest], random.getstate()]


@contract(
    catches=(
        "tensors of the stream kept",
        "tensors of the stream changed",
        "a prompt's columns changed",
        "torch seeded globally",
        "global random numbers taken",
    )
)
def what_is_the_callers_is_left_alone(bench: RolloutBench) -> None:
    """The engine changes no request, no tensor of a weight stream and no global random state.

    Weights are copied, since their tensors change after ``update_weights`` as in the trainer's next step. The random
    states are those of Python, NumPy and torch. Requests have seeds.
    """
    engine, other = bench.engine(), bench.model(seed=1)
    module, requests = bench.reference(other), bench.requests(temperature=1.0)
    before, states, weights = copy.deepcopy(requests), _random_states(), dict(bench.stream(other))
    engine.update_weights(iter(weights.items()), 1)
    for name, tensor in bench.stream(other):
        assert torch.equal(weights[name], tensor), f"'{name}' of the stream was changed by the sampler."
    for tensor in weights.values():
        tensor.mul_(-0.5)
    rollouts = engine.generate(requests)
    now = _random_states()
    _check_versions(bench, {1: module}, rollouts)
    assert requests == before, "Requests were changed by sampling."
    changed = [
        name for name, one, two in zip(("torch", "numpy", "random"), states, now, strict=True) if one != two
    ]
    assert not changed, f"Sampling with seeds changed the global random state of {', '.join(changed)}."


def _tensor_bytes() -> int:
    """Return the bytes of all tensors that Python objects of this process hold, each memory once."""
    gc.collect()
    held: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.layout is torch.strided and one.device.type != "meta":
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of a tensor without memory
                held[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(held.values())


@contract(
    capability="sleep",
    catches=("the cache of responses in flight kept in sleep", "a module kept after close"),
)
def what_sleeps_or_is_closed_holds_no_memory(bench: RolloutBench) -> None:
    """``sleep`` frees the keys and values of responses in flight, and ``close`` what the engine has allocated.

    Responses are frozen by ``pause("keep")``, if the spec declares ``pause``. The engine sleeps whole or with its weights kept.
    The tensors of this process are measured, so the contract sees nothing of an engine in another process, or of a cache
    that is allocated at the start.
    """
    before = _tensor_bytes()
    engine = bench.engine(**STOPS)
    idle = _tensor_bytes()
    for keep in ((), ("weights",)):
        engine.add(bench.requests((STORY,) * 12, group=1, max_response_tokens=LONG))
        if "pause" in bench.capabilities:
            engine.step()
            engine.pause("keep")
        frozen = _tensor_bytes()
        engine.sleep(keep=keep)
        asleep = _tensor_bytes()
        assert asleep - idle <= max(frozen - idle, 0) * SHARE_OF_TOKENS + SLACK_BYTES, (
            f"Responses in flight took {frozen - idle} bytes, of which {asleep - idle} are left in sleep(keep={keep})."
        )
        engine.wake()
        engine.resume()
        _steps(engine, 2000)
    engine.update_weights(bench.stream(bench.model(seed=1)), 1)
    engine.close()
    left = _tensor_bytes() - before
    assert idle == before or left <= (idle - before) * SHARE_OF_TOKENS + SLACK_BYTES, (
        f"The engine took {idle - before} bytes, of which {left} are left after close."
    )
