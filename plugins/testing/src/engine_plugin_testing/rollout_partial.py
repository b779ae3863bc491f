"""Contracts of the capability ``partial``: a response can be stopped between two tokens and continued later."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import SUPPORT, padded_support
from engine_plugin_testing.contracts import close, contract, refused
from engine_plugin_testing.reference import EOS, LIVELIER, VOCABULARY
from engine_plugin_testing.rollout_bench import RolloutBench, expected_log_probs, plain_text, response
from engine_plugin_testing.rollout_cuts import CUTTING
from engine_plugin_testing.rollout_draws import SIGMAS, places_of, rows_of_response

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engine_core.contracts.engines import RolloutEngine
    from engine_core.types import Request, Rollout

LONG = 48  # tokens of a response: more than an engine takes in a step
SUPPORT_WIDTH = 8  # most tokens of a support
STEPS = (1, 4, 16)  # steps before requests are stopped: the first number that gives a token
HOT, PAIRS = 2.0, 80  # temperature and number of responses whose first and new tokens are compared
ENDS = 3  # of the first new tokens of a continued response, to stop at
MANY = 40  # requests for a text: more than end before their timeout is checked
# an engine's steps are short where its run may stop responses
STOPS: dict[str, Any] = {"request_timeout_seconds": 3600.0}


def _stopped(engine: RolloutEngine, requests: Sequence[Request]) -> list[Rollout]:
    """Return the rollouts after the fewest steps that gave a token, stopped or finished, in the requests' order.

    The first steps of an engine in another process may end before its first token.
    """
    for steps in STEPS:
        engine.add(requests)
        found = [rollout for _ in range(steps) for rollout in engine.step()]
        found += engine.abort([request.id for request in requests])
        by_id = {rollout.request_id: rollout for rollout in found}
        assert len(found) == len(by_id) == len(requests), (
            f"{len(requests)} requests were answered or stopped by {len(found)} rollouts ({len(by_id)} ids)."
        )
        assert engine.num_unfinished == 0, (
            f"{engine.num_unfinished} requests are left after all were stopped."
        )
        if any(rollout.response_length for rollout in found):
            break
    return [by_id[request.id] for request in requests]


def _in_the_midst(rollouts: Sequence[Rollout]) -> list[int]:
    """Return the indices of the rollouts that were stopped between their first token and their last."""
    found = [
        at
        for at, rollout in enumerate(rollouts)
        if rollout.finish_reason == "abort" and 0 < rollout.response_length < LONG
    ]
    assert found, (
        f"No response of {LONG} tokens was stopped in its midst: {[r.response_length for r in rollouts]} tokens after "
        f"the fewest of {STEPS} steps that gave any. A step must be short where config.steps_are_short. {LIVELIER}"
    )
    return found


def _check_log_probs(bench: RolloutBench, module: nn.Module, rollout: Rollout, request: Request) -> None:
    expected, _ = expected_log_probs(module, rollout, request.sampling)
    found = rollout.rollout_log_probs[rollout.prompt_length :]
    close(found, expected, bench.tolerance, f"rollout_log_probs of '{request.id}'")


def check_extras(whole: Rollout, begun: Rollout) -> None:
    """Check that the tokens of ``begun`` have the same extras in the whole response."""
    for name, before in begun.extras.items():
        kept = whole.extras.get(name)
        assert kept is not None, f"'{whole.request_id}': the extra {name} of what was begun is lost."
        kept = kept[: len(before)]
        if name == SUPPORT:  # padded to the largest support of a rollout
            width = max(kept.shape[1], before.shape[1])
            kept, before = padded_support(kept, width), padded_support(before, width)
        assert torch.equal(kept, before), f"'{whole.request_id}': {name} of what was begun have changed."


@contract(capability="partial", catches=("a stopped response without its tokens",))
def a_response_stopped_in_its_midst_is_what_was_sampled(bench: RolloutBench) -> None:
    """If ``abort`` comes between two steps, it returns the tokens sampled so far with their log-probs and versions.

    A greedy response is then the beginning of the whole response.
    """
    module, engine = bench.reference(), bench.engine(**STOPS)
    for temperature in (0.0, 1.0):
        requests = bench.requests(temperature=temperature, max_response_tokens=LONG)
        rollouts = _stopped(engine, requests)
        for at in _in_the_midst(rollouts):
            request, rollout = requests[at], rollouts[at]
            assert set(rollout.policy_versions[rollout.loss_mask].tolist()) == {0}, "Other policy versions."
            _check_log_probs(bench, module, rollout, request)
            if temperature == 0:
                expected = bench.greedy(module, request.prompt.token_ids, rollout.response_length)
                found = response(rollout)[: len(expected)]
                assert found == expected, f"'{request.id}' was stopped as {found}; expected {expected}."


@contract(
    capability="partial",
    catches=(
        "the versions of a stopped response overwritten",
        "the support of what was begun lost",
        "the random numbers of the first tokens used again",
        "the random number of the last token used again",
        "a stopped response returned instead of its continuation",
        "the tokens of begun lost if a queued request is stopped",
        "text without the tokens of begun",
    ),
)
def a_stopped_response_goes_on(bench: RolloutBench) -> None:
    """A request with ``begun`` returns the whole response. The tokens of ``begun`` keep their columns and extras.

    New tokens are those of the present weights. Where the sampler can, half of the requests cut the distribution and ask
    for its support. The limit of tokens, and the text, are those of the whole response. New tokens are independent of those in ``begun``.
    The id of a stopped request is free at once, for its continuation or another prompt, while other requests run.
    """
    engine, other = bench.engine(**STOPS), bench.model(seed=1)
    _check_independence(bench, engine)
    _check_ids_are_free(bench, engine)
    requests = bench.requests(temperature=1.0, max_response_tokens=LONG)
    for cut in bench.supported(*CUTTING)[:1]:
        requests[1::2] = [
            dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_support=SUPPORT_WIDTH, **cut))
            for r in requests[1::2]
        ]
    rollouts = _stopped(engine, requests)
    chosen = _in_the_midst(rollouts)
    engine.update_weights(bench.stream(other), 5)
    again = [dataclasses.replace(requests[at], begun=rollouts[at]) for at in chosen]
    for request, whole in zip(again, engine.generate(again), strict=True):
        begun = request.begun
        assert begun is not None
        count = len(begun.token_ids)
        for name in ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions"):
            kept, before = getattr(whole, name)[:count], getattr(begun, name)
            assert torch.equal(kept, before), f"'{request.id}': {name} of what was begun have changed."
        check_extras(whole, begun)
        assert whole.prompt == request.prompt, f"'{request.id}' carries another prompt."
        text = plain_text(bench, response(whole))
        assert whole.text in (text, ""), f"'{request.id}' has the text {whole.text!r}; expected {text!r}."
        assert count < len(whole.token_ids), f"'{request.id}' did not continue."
        assert whole.response_length <= LONG, (
            f"'{request.id}' has {whole.response_length} tokens, with those of before; {LONG} were asked for."
        )
        if whole.finish_reason == "length":
            assert whole.response_length == LONG, f"'{request.id}' was cut at {whole.response_length}."
        assert bool(whole.loss_mask[whole.prompt_length :].all()), "A sampled token is not in the loss mask."
        assert set(whole.policy_versions[count:].tolist()) == {5}, "New tokens have another version."
        expected, _ = expected_log_probs(bench.reference(other), whole, request.sampling, bench.tolerance)
        found = whole.rollout_log_probs[count:]
        close(found, expected[count - whole.prompt_length :], bench.tolerance, f"'{request.id}', gone on")


def _check_ids_are_free(bench: RolloutBench, engine: RolloutEngine) -> None:
    """Stop one of several requests and queue its id again at once, with ``begun`` and then with another prompt."""
    module = bench.reference()
    requests = bench.requests(temperature=1.0, max_response_tokens=LONG)
    request, begun, done = _one_stopped(engine, requests)
    again = dataclasses.replace(request, begun=begun)
    engine.add([again])
    (queued,) = engine.abort([again.id])  # it may have waited, or not
    for name in ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions"):
        kept, before = getattr(queued, name)[: len(begun.token_ids)], getattr(begun, name)
        assert torch.equal(kept, before), (
            f"'{request.id}' was stopped again and lost {name} of what was begun."
        )
    again = dataclasses.replace(request, begun=queued)
    engine.add([again])
    whole = _all_answered(engine, requests, done)[request.id]
    found = whole.token_ids[: len(queued.token_ids)]
    assert torch.equal(found, queued.token_ids), f"'{request.id}' does not begin with what was begun."
    assert whole.finish_reason != "abort", f"'{request.id}' was continued and comes back as stopped."
    _check_log_probs(bench, module, whole, again)
    request, _, done = _one_stopped(engine, requests)
    other = dataclasses.replace(requests[0], id=request.id)
    engine.add([other])
    (stopped,) = engine.abort([other.id])
    engine.add([other])
    for rollout in (stopped, _all_answered(engine, requests, done)[other.id]):
        prompt = rollout.token_ids[: rollout.prompt_length].tolist()
        assert prompt == rollout.prompt.token_ids == other.prompt.token_ids, (
            f"'{other.id}' was queued again with another prompt and comes back with the old one: {prompt}."
        )
        _check_log_probs(bench, module, rollout, other)


def _one_stopped(
    engine: RolloutEngine, requests: Sequence[Request]
) -> tuple[Request, Rollout, list[Rollout]]:
    """Queue requests and stop one in its midst: the request, its rollout, and the rollouts of those before it."""
    for steps in 2 * STEPS:  # of an engine in another process a step may be long or short
        engine.add(requests)
        done = [rollout for _ in range(steps) for rollout in engine.step()]
        for request in reversed(requests[1:]):
            if request.id in {rollout.request_id for rollout in done}:
                continue
            (begun,) = engine.abort([request.id])
            if begun.finish_reason == "abort" and 0 < begun.response_length < LONG:
                return request, begun, done
            done.append(begun)
        engine.abort([request.id for request in requests])
    raise AssertionError(
        f"No response of {LONG} tokens was stopped in its midst after {STEPS} steps. {LIVELIER}"
    )


def _all_answered(
    engine: RolloutEngine, requests: Sequence[Request], done: list[Rollout]
) -> dict[str, Rollout]:
    """Finish what is in flight; return each request's only rollout."""
    while engine.num_unfinished:
        done += engine.step()
    assert sorted(rollout.request_id for rollout in done) == sorted(request.id for request in requests), (
        f"One request was stopped and queued again at once, and the answers are {sorted(r.request_id for r in done)}."
    )
    return {rollout.request_id: rollout for rollout in done}


def _check_independence(bench: RolloutBench, engine: RolloutEngine) -> None:
    """Assert that the places of new tokens in their distributions do not depend on those of the tokens of ``begun``."""
    module, uniform = bench.reference(), torch.Generator().manual_seed(7)
    requests = bench.requests(("The answer",), group=PAIRS, temperature=HOT, max_response_tokens=LONG)
    rollouts = _stopped(engine, requests)
    again = [dataclasses.replace(requests[at], begun=rollouts[at]) for at in _in_the_midst(rollouts)]
    found: dict[int, list[Tensor]] = {}
    for request, whole in zip(again, engine.generate(again), strict=True):
        assert request.begun is not None
        begun = request.begun.response_length
        places = places_of(
            rows_of_response(module, whole, HOT), whole.token_ids[whole.prompt_length :], uniform
        )
        for lag in range(1, begun + 1):  # of a new token behind one of the first
            later = places[begun : begun + lag]
            found.setdefault(lag, []).append(places[begun - lag :][: len(later)] * later)
    for lag, products in found.items():
        pairs = torch.cat(products)
        sigmas = float(pairs.sum()) / max(len(pairs) / 144, 1e-12) ** 0.5
        assert abs(sigmas) <= SIGMAS, (
            f"New tokens depend on the first ones of their response, {lag} before them: {sigmas:+.1f} standard deviations off "
            f"in {len(pairs)} pairs."
        )


@contract(
    capability="partial",
    catches=(
        "stop strings searched among new tokens only",
        "a continued response without stop strings",
        "a continued response without stop tokens",
    ),
)
def a_response_goes_on_to_the_same_end(bench: RolloutBench) -> None:
    """A greedy response that is stopped and continued equals one that is never stopped.

    The weights are the same. A stop string ends a continued response also if it begins in ``begun``, and so does a stop
    token.
    """
    module, engine = bench.reference(), bench.engine(**STOPS)
    requests = bench.requests(temperature=0.0, max_response_tokens=LONG)
    rollouts = _stopped(engine, requests)
    chosen = _in_the_midst(rollouts)
    again = [dataclasses.replace(requests[at], begun=rollouts[at]) for at in chosen]
    for request, whole in zip(again, engine.generate(again), strict=True):
        expected = bench.greedy(module, request.prompt.token_ids, LONG)
        found = response(whole)[: len(expected)]
        assert found == expected, f"'{request.id}' came to {found}; expected {expected}."
        _check_log_probs(bench, module, whole, request)
    if bench.supported({"stop": ()}):
        _check_stop_strings(bench, engine, module, again)
    if bench.supported({"temperature": HOT, "stop_token_ids": ()}):
        _check_stop_tokens(bench, engine, again)


def _check_stop_strings(
    bench: RolloutBench, engine: RolloutEngine, module: nn.Module, requests: Sequence[Request]
) -> None:
    """Continue each greedy response to a stop string at each of its next tokens, and assert that it ends there."""
    cases: list[tuple[Request, list[int]]] = []
    for request in requests:
        assert request.begun is not None
        count = request.begun.response_length
        story = bench.greedy(module, request.prompt.token_ids, count + ENDS)
        for end in range(count + 1, len(story) + 1):
            tokens, text = story[:end], plain_text(bench, story[:end])
            if len(text) < end:  # a token is no character
                break
            # from the first new token, the last one before, the first of all
            for stop in {text[-width:] for width in (end - count, end - count + 1, end)}:
                if stop not in text[:-1]:
                    cases.append((_again(request, f"{len(cases)}", stop=("no such text", stop)), tokens))
    assert cases, f"No greedy response has a token at which it could be stopped. {LIVELIER}"
    rollouts = engine.generate([request for request, _ in cases])
    for (request, expected), rollout in zip(cases, rollouts, strict=True):
        assert request.begun is not None
        found = response(rollout)
        assert (found, rollout.finish_reason) == (expected, "stop"), (
            f"A response was continued after {request.begun.response_length} tokens with the stop string "
            f"{request.sampling.stop[1]!r} and came to {found} ({rollout.finish_reason}); expected {expected} (stop)."
        )


def _check_stop_tokens(bench: RolloutBench, engine: RolloutEngine, requests: Sequence[Request]) -> None:
    """Continue each response at a high temperature, and assert that the first token that was not in it before ends it."""
    asked = []
    for request in requests:
        assert request.begun is not None
        stops = tuple(sorted({*range(VOCABULARY)} - {EOS, *response(request.begun)}))
        asked.append(_again(request, request.id, temperature=HOT, stop_token_ids=stops))
    ended = 0
    for request, rollout in zip(asked, engine.generate(asked), strict=True):
        assert request.begun is not None
        count, ends = request.begun.response_length, {EOS, *request.sampling.stop_token_ids}
        found = response(rollout)[count:]
        at = next((at for at, token in enumerate(found) if token in ends), LONG)
        assert at >= len(found) - 1, (
            f"'{request.id}' was continued after {count} tokens, and its new tokens {found} continue after the stop token {found[at]}."
        )
        reason = "stop" if found[-1] in ends else "length"
        assert rollout.finish_reason == reason, (
            f"'{request.id}' was continued and ends with token {found[-1]}: finish_reason is '{rollout.finish_reason}'; "
            f"expected '{reason}'."
        )
        ended += reason == "stop"
    assert ended, f"None of {len(asked)} continued responses ended with a stop token. {LIVELIER}"


def _again(request: Request, id: str, **sampling: Any) -> Request:
    """Return the request with another id, which its ``begun`` has too, and other sampling options."""
    assert request.begun is not None
    begun = dataclasses.replace(request.begun, request_id=id)
    return dataclasses.replace(
        request, id=id, sampling=dataclasses.replace(request.sampling, **sampling), begun=begun
    )


@contract(capability="partial")
def what_cannot_go_on_is_refused(bench: RolloutBench) -> None:
    """``add`` refuses to continue a response that is already complete or belongs to another prompt.

    Nothing is queued.
    """
    engine = bench.engine(**STOPS)
    one, other = bench.requests(("2+2=", "ab"), temperature=1.0, max_response_tokens=4)
    whole = engine.generate([one])[0]
    short = dataclasses.replace(one.sampling, max_response_tokens=whole.response_length)
    cases = {
        "a response that has all its tokens": dataclasses.replace(one, sampling=short, begun=whole),
        "a response to another prompt": dataclasses.replace(
            other, sampling=dataclasses.replace(one.sampling, max_response_tokens=90), begun=whole
        ),
    }
    for what, request in cases.items():
        with refused(what):
            engine.add([request])
        assert engine.num_unfinished == 0, f"{what} was refused and waits all the same."


@contract(capability="partial")
def a_request_over_its_time_comes_back_as_far_as_it_is(bench: RolloutBench) -> None:
    """``Sampling.timeout_s`` stops one request, which returns what it has so far with the failure ``timeout``.

    Its log-probs are right, and the other responses are whole.
    """
    module, engine = bench.reference(), bench.engine(**STOPS)
    requests = bench.requests(temperature=1.0, max_response_tokens=LONG)
    alone = engine.generate(requests)
    long = max(range(len(requests)), key=lambda at: alone[at].response_length)
    short = dataclasses.replace(requests[long].sampling, timeout_s=1e-6)  # over when it is first looked at
    requests[long] = dataclasses.replace(requests[long], sampling=short)
    for at, (request, rollout) in enumerate(zip(requests, engine.generate(requests), strict=True)):
        late = at == long and rollout.response_length < LONG and rollout.finish_reason == "abort"
        assert rollout.failure == ("timeout" if late else ""), (
            f"'{request.id}' ({rollout.finish_reason}, {rollout.response_length} tokens) has the failure '{rollout.failure}'."
        )
        assert late or rollout.finish_reason != "abort", f"'{request.id}' had time and was stopped."
        _check_log_probs(bench, module, rollout, request)
    many = bench.requests(group=MANY, temperature=1.0, max_response_tokens=LONG, timeout_s=1e-6)
    failures = {rollout.failure for rollout in engine.generate(many)}
    assert "timeout" in failures, f"None of {len(many)} requests ran out of time. {LIVELIER}"


@contract(capability="partial")
def requests_are_stopped_one_by_one(bench: RolloutBench) -> None:
    """``advance`` returns each request exactly once, whether it was stopped or finished.

    Other requests come and end meanwhile, also in calls of several rounds.
    """
    engine, requests = bench.engine(**STOPS), bench.requests(group=3, max_response_tokens=LONG)
    first, later = requests[:12], requests[12:]
    done = engine.advance(first)
    ended = {rollout.request_id for rollout in done}
    stopped = [request.id for request in first if request.id not in ended][:4]
    done += engine.advance(later, stopped=[*stopped, "no such request"])
    by_id = {rollout.request_id: rollout for rollout in done}
    for id in stopped:
        assert id in by_id, f"'{id}' was stopped and did not come back."
    for _ in range(2000):
        if not engine.running:
            break
        done += engine.advance(rounds=3)
    assert sorted(r.request_id for r in done) == sorted(r.id for r in requests), (
        "Not every request came back exactly once."
    )
    others = [rollout for rollout in done if rollout.request_id not in stopped]
    assert "abort" not in {rollout.finish_reason for rollout in others}, "Others were stopped too."
