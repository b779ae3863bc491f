"""Drivers of rollout engines through ``add`` and ``step``, with checks of requests and rollouts and time limits."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from engine_core import timeline
from engine_core.config.wording import expectation
from engine_core.errors import DataError, PluginError, TrainingFailed
from engine_core.tables import DEFAULTS, SamplingOptions
from engine_core.types import TENSORS, TIMEOUT, Rollout

if TYPE_CHECKING:
    from engine_core.contracts.engines import RolloutEngine
    from engine_core.types import Request, Sampling

HIGHEST_LOG_PROB = 1e-2  # what rounding may make of 0


def logits_not_finite(request_id: str, version: int) -> TrainingFailed:
    """Return the error for logits that are not numbers.

    Args:
        request_id: the request that was sampled.
        version: the policy version of the weights. At 0 no update can be the cause.
    """
    cause = "its weights have diverged. Lower the learning rate, or go back to a checkpoint."
    if version == 0:
        cause = "no update has changed it. Check the files of model.path, and the sampler's number type: float16 may overflow."
    return TrainingFailed(
        f"The model gives logits that are not numbers (request '{request_id}', policy version {version}): {cause}"
    )


def check_request(
    request: Request,
    taken: Collection[str],
    vocabulary: int,
    max_positions: int,
    *,
    holder: str = "the model",
    instead: str = "Lower data.max_prompt_tokens.",
    hottest: float = math.inf,
) -> None:
    """Refuse a malformed request.

    Args:
        request: the request to check.
        taken: ids of queued requests, and of those checked before in the same call.
        vocabulary: number of token ids of the model.
        max_positions: maximum length of a sequence in tokens, response included.
        holder: what has this limit, for messages.
        instead: remedy for a prompt that is too long, for messages.
        hottest: maximum temperature of the sampler.

    Raises:
        DataError: the prompt cannot be continued.
        ValueError: the id is taken, a sampling option is invalid, or ``begun`` has another prompt or is complete.
    """
    ids, where = request.prompt.token_ids, f"Request '{request.id}' (prompt '{request.prompt.id}')"
    if request.id in taken:
        raise ValueError(f"{where} is queued already. Requests must have distinct ids.")
    if not ids:
        raise DataError(f"{where} has no tokens. An empty prompt cannot be continued; give it a start token.")
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(i for i in ids if not 0 <= i < vocabulary)
        raise DataError(
            f"{where} has token {wrong}, and the model knows 0 to {vocabulary - 1}. Check the tokenizer."
        )
    if len(ids) >= max_positions:
        raise DataError(
            f"{where} has {len(ids)} tokens, and {holder} holds {max_positions} with the response. {instead}"
        )
    if request.begun is not None and (wrong_start := _begun_problem(request, max_positions)):
        raise ValueError(f"{where} continues a response that {wrong_start}.")
    if problem := _sampling_problem(request.sampling, hottest):
        raise ValueError(f"{where} has {problem}.")


def begun_ids(request: Request) -> list[int]:
    """Return the tokens of a response that were sampled before it was stopped."""
    if request.begun is None:
        return []
    ids: list[int] = request.begun.token_ids[len(request.prompt.token_ids) :].tolist()
    return ids


def _begun_problem(request: Request, max_positions: int) -> str:
    assert request.begun is not None
    prompt, ids = request.prompt.token_ids, request.begun.token_ids
    if ids[: len(prompt)].tolist() != prompt:
        return "has another prompt"
    most = min(request.sampling.max_response_tokens, max_positions - len(prompt))
    if len(ids) - len(prompt) >= most:
        return f"has {len(ids) - len(prompt)} tokens, and {most} at most are asked for: nothing is left to sample"
    return ""


@functools.cache
def _checks() -> Mapping[str, TypeAdapter[Any]]:
    declared = get_type_hints(SamplingOptions, include_extras=True)
    return {name: TypeAdapter(declared[name]) for name in DEFAULTS}


def _sampling_problem(sampling: Sampling, hottest: float) -> str:
    for name, check in _checks().items():
        value = getattr(sampling, name)
        try:
            check.validate_python(value)
        except ValidationError as error:
            return f"{name} {value!r}; expected {expectation(error.errors()[0])}"
    if sampling.temperature > hottest:
        return f"temperature {sampling.temperature}; the sampler takes {hottest:g} at most"
    return ""


class Deadlines:
    """The deadlines of requests with ``Sampling.timeout_s``, counted from when a request is queued."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}  # by id, on the monotonic clock
        self._queued: dict[str, float] = {}  # by id, in the timeline's seconds

    def begin(self, requests: Sequence[Request]) -> None:
        """Start the deadlines of requests that are queued now."""
        now = time.monotonic()
        self._queued |= dict.fromkeys((r.id for r in requests), timeline.now())
        self._ends |= {r.id: now + r.sampling.timeout_s for r in requests if r.sampling.timeout_s > 0}

    def end(self, ids: Iterable[str]) -> None:
        """Remove the deadlines of requests that have finished or were dropped, and record the requests."""
        for id in ids:
            self._ends.pop(id, None)
            if (start := self._queued.pop(id, None)) is not None:
                timeline.add("requests", f"#{id}", id, start)

    def missed(self) -> list[str]:
        """Return the ids of requests whose deadline has passed."""
        if not self._ends:
            return []
        now = time.monotonic()
        return [id for id, end in self._ends.items() if now >= end]


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Rollout]:
    """Sample all requests.

    Args:
        engine: any rollout engine, with nothing queued.
        requests: requests with distinct ids.

    Returns:
        One rollout per request, in the order of the requests.

    Raises:
        PluginError: the engine returned an unrequested, duplicate or malformed rollout, or stopped
            before all requests were done. All rollouts are discarded.
        ValueError: two requests have the same id.
    """
    done = {rollout.request_id: rollout for part in stream(engine, requests) for rollout in part}
    return [done[request.id] for request in requests]


def stream(engine: RolloutEngine, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
    """Sample all requests and yield the rollouts of each step as soon as it ends.

    Closing the iterator early aborts the unfinished requests.

    Args:
        engine: any rollout engine, with nothing queued.
        requests: requests with distinct ids.

    Raises:
        PluginError: as ``generate``.
        ValueError: two requests have the same id.
    """
    ids = [request.id for request in requests]
    if len(set(ids)) != len(ids):
        raise ValueError("Requests must have distinct ids.")
    try:
        finished = advance(engine, requests)
        while finished or engine.running:
            if finished:
                yield finished
            finished = advance(engine)
    except BaseException:  # leave no request of this call in the engine's queue
        advance(engine, dropped=ids, rounds=0)
        raise


def advance(
    engine: RolloutEngine,
    requests: Sequence[Request] = (),
    dropped: Sequence[str] = (),
    stopped: Sequence[str] = (),
    rounds: int = 1,
) -> list[Rollout]:
    """Queue new requests, drop or stop some of earlier calls, and continue sampling.

    Args:
        engine: any rollout engine.
        requests: new requests; their ids are not in ``engine.running``.
        dropped: ids of requests to abort; their rollouts are discarded.
        stopped: ids of requests to abort; their partial rollouts are returned.
        rounds: maximum number of engine steps; fewer if no request is left.

    Returns:
        The rollouts that have finished or were stopped.

    Raises:
        PluginError: as ``generate``, raised as soon as the fault is detected.
    """
    running = engine.running
    if gone := [id for id in dropped if running.pop(id, None) is not None]:
        engine.deadlines.end(gone)
        # an engine that works ahead may have finished some, and returns them later
        engine.dropped |= set(gone) - {rollout.request_id for rollout in engine.abort(gone)}
    if requests:
        engine.add(requests)
        engine.deadlines.begin(requests)
        running |= {request.id: request for request in requests}
    stopped = [id for id in stopped if id in running]
    finished = _taken(engine, engine.abort(stopped)) if stopped else []
    if not running:
        engine.dropped.clear()
    for _ in range(rounds):
        if not running:
            break
        unfinished = engine.num_unfinished
        found = _taken(engine, _stepped(engine))
        found += _taken(engine, _stop_late(engine))
        finished += found
        if not found and not unfinished:
            raise _broken(
                engine, f"stopped with {len(running)} requests unfinished, such as '{next(iter(running))}'"
            )
    return finished


def _taken(engine: RolloutEngine, rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Check rollouts and remove their requests from ``engine.running``; leave out those of dropped requests."""
    taken = [rollout for rollout in rollouts if rollout.request_id not in engine.dropped]
    engine.deadlines.end(rollout.request_id for rollout in taken)
    for rollout in taken:
        check_rollout(engine, rollout, engine.running.pop(rollout.request_id, None))
    return taken


def _stepped(engine: RolloutEngine) -> list[Rollout]:
    """Run one engine step and return its rollouts.

    Raises:
        PluginError: ``step`` returned something else.
    """
    made = engine.step()
    if isinstance(made, list | tuple) and all(isinstance(each, Rollout) for each in made):
        return list(made)
    found = {type(each).__name__ for each in made} if isinstance(made, list | tuple) else type(made).__name__
    raise _broken(engine, f"returned {found} from step(), expected a list of Rollout")


def _stop_late(engine: RolloutEngine) -> list[Rollout]:
    """Abort requests whose deadline has passed and return their rollouts, marked with failure ``timeout``."""
    late = engine.deadlines.missed()
    stopped = engine.abort(late) if late else []
    engine.deadlines.end(late)
    for rollout in stopped:
        if rollout.finish_reason == "abort":  # any other reason: the response had just finished
            rollout.failure = TIMEOUT
    return stopped


def check_rollout(engine: RolloutEngine, rollout: Rollout, request: Request | None) -> None:
    """Check that a rollout matches its request, and give it the request's prompt, whatever the engine left in its columns.

    Args:
        engine: the engine that returned the rollout, for messages.
        rollout: the rollout to check.
        request: its request in flight; None: there is none.

    Raises:
        PluginError: the rollout is unrequested, a duplicate or malformed.
    """
    name = rollout.request_id
    if request is None:
        raise _broken(engine, f"returned a rollout for '{name}', which was not requested or is done already")
    length = len(rollout.token_ids)
    for column, kind in TENSORS.items():
        values = getattr(rollout, column)
        if str(getattr(values, "dtype", "")) != f"torch.{kind}":
            got = getattr(values, "dtype", type(values).__name__)
            raise _broken(engine, f"gave '{name}' {column} as {got}, expected a tensor of {kind}")
        if len(values) != length:
            raise _broken(engine, f"gave '{name}' {len(values)} {column} for {length} tokens")
    if (rollout.prompt.id, rollout.group_id, rollout.index) != (
        request.prompt.id, request.group_id, request.index,
    ):  # fmt: skip
        raise _broken(engine, f"gave '{name}' the prompt, the group or the index of another request")
    rollout.prompt = request.prompt
    if bool((rollout.token_ids < 0).any()):
        raise _broken(engine, f"gave '{name}' a token id below 0")
    if not isinstance(rollout.text, str):
        raise _broken(engine, f"gave '{name}' a text of type {type(rollout.text).__name__}, expected str")
    prompt = request.prompt.token_ids
    if rollout.token_ids[: len(prompt)].tolist() != prompt:
        raise _broken(engine, f"returned '{name}' with another prompt than was asked")
    if request.begun is not None and rollout.token_ids[: len(request.begun.token_ids)].tolist() != (
        request.begun.token_ids.tolist()
    ):
        raise _broken(engine, f"continued '{name}' from another beginning than it was given")
    sampled = rollout.loss_mask
    if bool(sampled[: len(prompt)].any()) or not bool(sampled[len(prompt) :].any() or length == len(prompt)):
        raise _broken(engine, f"gave '{name}' a loss mask that is not that of its response")
    if bool((rollout.rollout_log_probs[sampled] > HIGHEST_LOG_PROB).any()):
        raise _broken(engine, f"gave '{name}' a log-prob above 0")
    if not bool(rollout.rollout_log_probs[sampled].isfinite().all()):
        raise _broken(engine, f"gave '{name}' a log-prob that is not finite")
    versions = rollout.policy_versions[sampled]
    if bool((versions > engine.version).any() or (versions < 0).any()):
        raise _broken(engine, f"gave '{name}' a policy version below 0 or above its own {engine.version}")


def _broken(engine: RolloutEngine, what: str) -> PluginError:
    return PluginError(f"Rollout engine {engine.label} {what}. This is a bug of the plugin.")
