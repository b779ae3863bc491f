"""What the core builds on ``add`` and ``step`` of any rollout engine, once for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine_core.errors import PluginError

if TYPE_CHECKING:
    from engine_core.engines.base import RolloutEngine
    from engine_core.types import Request, Rollout


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Rollout]:
    """Sample all requests.

    Args:
        engine: any rollout engine, with nothing queued.
        requests: with distinct ids.

    Returns:
        One rollout a request, in the order of the requests.

    Raises:
        PluginError: the engine returned a rollout nobody asked for, one twice, one that is
            malformed, or stopped before all were done. What it returned is discarded.
    """
    wanted = {request.id: request for request in requests}
    if len(wanted) != len(requests):
        raise ValueError("Requests must have distinct ids.")
    engine.add(requests)
    done: dict[str, Rollout] = {}
    try:
        _collect(engine, wanted, done)
    except BaseException:  # whoever goes on after it finds nothing of ours queued
        engine.abort([id for id in wanted if id not in done])
        raise
    return [done[request.id] for request in requests]


def _collect(engine: RolloutEngine, wanted: Mapping[str, Request], done: dict[str, Rollout]) -> None:
    while len(done) < len(wanted):
        unfinished = engine.num_unfinished
        finished = engine.step()
        for rollout in finished:
            check_rollout(engine, rollout, wanted.get(rollout.request_id), rollout.request_id in done)
            done[rollout.request_id] = rollout
        if not finished and not unfinished:
            missing = next(id for id in wanted if id not in done)
            raise _broken(
                engine, f"stopped with {len(wanted) - len(done)} requests unfinished, such as '{missing}'"
            )


def advance(engine: RolloutEngine, requests: Sequence[Request], dropped: Sequence[str] = ()) -> list[Rollout]:
    """Queue requests, drop some of earlier calls, and go on sampling once.

    Args:
        engine: any rollout engine.
        requests: new ones, with ids that none in ``engine.running`` has.
        dropped: ids whose rollouts nobody waits for any more.

    Raises:
        PluginError: as ``generate``, told as soon as it is seen.
    """
    running = engine.running
    if gone := [id for id in dropped if running.pop(id, None) is not None]:
        engine.dropped |= set(gone)
        engine.abort(gone)
    if requests:
        engine.add(requests)
        running |= {request.id: request for request in requests}
    if not running:
        engine.dropped.clear()
        return []
    unfinished = engine.num_unfinished
    finished = []
    for rollout in engine.step():
        if rollout.request_id not in engine.dropped:  # else it was done before it was dropped
            check_rollout(engine, rollout, running.pop(rollout.request_id, None), seen=False)
            finished.append(rollout)
    if not finished and not unfinished:
        raise _broken(
            engine, f"stopped with {len(running)} requests unfinished, such as '{next(iter(running))}'"
        )
    return finished


def check_rollout(engine: RolloutEngine, rollout: Rollout, request: Request | None, seen: bool) -> None:
    """Refuse a rollout that does not answer its request, naming the engine."""
    name = rollout.request_id
    if request is None:
        raise _broken(engine, f"returned a rollout for '{name}', which was not requested")
    if seen:
        raise _broken(engine, f"returned the rollout for '{name}' twice")
    length = len(rollout.token_ids)
    for column in ("loss_mask", "rollout_log_probs", "policy_versions"):
        if len(getattr(rollout, column)) != length:
            found = len(getattr(rollout, column))
            raise _broken(engine, f"gave '{name}' {found} {column} for {length} tokens")
    prompt = request.prompt.token_ids
    if rollout.token_ids[: len(prompt)].tolist() != prompt:
        raise _broken(engine, f"returned '{name}' with another prompt than was asked")
    sampled = rollout.loss_mask
    if not bool(rollout.rollout_log_probs[sampled].isfinite().all()):
        raise _broken(engine, f"gave '{name}' a log-prob that is not finite")
    stale = rollout.policy_versions[sampled]
    if bool((stale > engine.version).any()):
        raise _broken(engine, f"gave '{name}' a policy version above its own {engine.version}")


def _broken(engine: RolloutEngine, what: str) -> PluginError:
    return PluginError(
        f"Rollout engine {type(engine).__module__}.{type(engine).__name__} {what}. This is a bug of the plugin."
    )
