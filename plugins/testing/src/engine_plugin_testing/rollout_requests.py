"""Contracts of ``add``, ``step``, ``abort``, ``pause``: every request is answered once, as it was requested."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from engine_core.types import Prompt
from engine_plugin_testing.contracts import contract, refused
from engine_plugin_testing.reference import LIVELIER
from engine_plugin_testing.rollout_bench import TEXTS, RolloutBench, plain_text, response
from engine_plugin_testing.rollout_cuts import CUTTING

if TYPE_CHECKING:
    from engine_core.contracts.engines import RolloutEngine
    from engine_core.types import Rollout

CROWD = 264  # requests: more than an engine may sample at a time
LONG_ID = 40 * "a/\u00e9 \U0001f600\n"  # no limit of an id is known


def finish(engine: RolloutEngine, calls: int = 2000) -> list[Rollout]:
    """Step until no request is unfinished and return the rollouts.

    Raises:
        AssertionError: requests are unfinished after ``calls`` steps.
    """
    done: list[Rollout] = []
    for _ in range(calls):
        done += engine.step()
        if not engine.num_unfinished:
            return done
    raise AssertionError(f"{engine.num_unfinished} requests are unfinished after {calls} steps.")


@contract(catches=("sequences of a group swapped", "prompts of one id taken for one"))
def groups_are_complete_and_in_order(bench: RolloutBench) -> None:
    """``generate`` returns one rollout for each request, in the order of the requests.

    The rollout has the id, prompt, group and index of its request, and follows its sampling options. All prompts have
    one id.
    """
    requests = bench.requests(group=3, temperature=1.2)
    for request in requests:
        request.prompt.id = "train:0"
    for i, request in enumerate(requests):  # lengths tell requests of one group apart
        request.sampling = dataclasses.replace(request.sampling, max_response_tokens=2 + 3 * (i % 3))
    rollouts = bench.engine().generate(requests)
    assert len(rollouts) == len(requests), f"{len(rollouts)} rollouts for {len(requests)} requests."
    for request, rollout in zip(requests, rollouts, strict=True):
        asked, got = (
            (request.id, request.group_id, request.index),
            (rollout.request_id, rollout.group_id, rollout.index),
        )
        assert got == asked, f"Request (id, group, index) {asked} was answered by {got}."
        ids = rollout.token_ids[: rollout.prompt_length].tolist()
        assert (rollout.prompt, ids) == (request.prompt, request.prompt.token_ids), (
            f"Request '{request.id}' has {request.prompt}; its rollout has {rollout.prompt} and begins with {ids}."
        )
        most = request.sampling.max_response_tokens
        assert rollout.response_length <= most, (
            f"Request '{request.id}' asked for at most {most} tokens; its rollout has {rollout.response_length}."
        )
        if rollout.finish_reason == "length":
            assert rollout.response_length == most, (
                f"Request '{request.id}' asked for {most} tokens; its rollout was cut at {rollout.response_length}."
            )


@contract(catches=("log-probs in float64",))
def columns_have_their_types(bench: RolloutBench) -> None:
    """Columns with a value per token are on the CPU: ids are int64, masks bool, log-probs float32, versions int32.

    Each column has one entry for each token.
    """
    types = {
        "token_ids": torch.int64,
        "loss_mask": torch.bool,
        "rollout_log_probs": torch.float32,
        "policy_versions": torch.int32,
    }
    for rollout in bench.engine().generate(bench.requests(**CUTTING[0])):
        columns = {name: getattr(rollout, name) for name in types} | rollout.extras
        for name, column in columns.items():
            assert len(column) == len(rollout.token_ids), (
                f"'{name}' has {len(column)} entries, the rollout other tokens."
            )
            assert column.device.type == "cpu", f"'{name}' lies on {column.device}; expected the CPU."
            assert column.dtype == types.get(name, column.dtype), (
                f"'{name}' is {column.dtype}; expected {types[name]}."
            )


@contract(catches=("prompt tokens in the loss mask",))
def only_sampled_tokens_are_in_the_loss_mask(bench: RolloutBench) -> None:
    """The loss mask is True at every sampled token and False everywhere else.

    Log-probs are 0 where it is False.
    """
    for rollout in bench.engine().generate(bench.requests()):
        expected = torch.arange(len(rollout.token_ids)) >= rollout.prompt_length
        assert torch.equal(rollout.loss_mask, expected), (
            f"'{rollout.request_id}' (prompt of {rollout.prompt_length}) has the mask {rollout.loss_mask.int().tolist()}."
        )
        outside = rollout.rollout_log_probs[~expected]
        assert not outside.any(), f"'{rollout.request_id}' has log-probs at its prompt: {outside.tolist()}."


@contract(catches=("a token dropped", "a token doubled"))
def no_token_is_lost_or_doubled(bench: RolloutBench) -> None:
    """A greedy response equals, token by token, what an independent loop gets by argmax."""
    module = bench.reference()
    requests = bench.requests(
        (*TEXTS, "Hm", "(q", "Zz9", "7*8=", "Why?", "1, 2, 3"), temperature=0.0, max_response_tokens=16
    )
    compared = 0
    for request, rollout in zip(requests, bench.engine().generate(requests), strict=True):
        expected = bench.greedy(module, request.prompt.token_ids, 16)
        found = response(rollout)[: len(expected)]
        assert found == expected, f"'{request.prompt.text}': sampled {found}, expected {expected}."
        compared += len(expected)
    assert compared > 20, (
        f"Only {compared} tokens could be compared: the best two are too near, or responses end. {LIVELIER}"
    )


@contract(catches=("the prompt in the text",))
def the_text_is_the_response_decoded(bench: RolloutBench) -> None:
    """``text`` is the response without the prompt, decoded without special tokens. It may also be empty.

    If it is empty, the core decodes the response.
    """
    for rollout in bench.engine().generate(bench.requests()):
        expected = plain_text(bench, response(rollout))
        assert rollout.text in (expected, ""), f"text is {rollout.text!r}; expected {expected!r}."


@contract(catches=("an empty prompt accepted",))
def malformed_requests_are_refused(bench: RolloutBench) -> None:
    """If one request is malformed, ``add`` refuses the call and queues none of its requests.

    Cases: an empty or too long prompt, a token outside the vocabulary, an id in flight.
    """
    engine = bench.engine()
    good, other = bench.requests(("2+2=", "ab"))
    long = Prompt("train:long", [5] * 4096, "")
    cases = {
        "an empty prompt": dataclasses.replace(other, prompt=Prompt("train:0", [], "")),
        "a prompt longer than the model holds": dataclasses.replace(other, prompt=long),
        "a token outside of the vocabulary": dataclasses.replace(
            other, prompt=Prompt("train:0", [5, 10**6], "")
        ),
        "an id twice in one call": dataclasses.replace(other, id=good.id),
        "a negative temperature": dataclasses.replace(
            other, sampling=dataclasses.replace(other.sampling, temperature=-1.0)
        ),
    }
    for what, bad in cases.items():
        with refused(what):
            engine.add([good, bad])
        assert engine.num_unfinished == 0, (
            f"{what} was refused, but {engine.num_unfinished} requests of the call wait."
        )
    engine.add([good])
    with refused("an id that waits already", good.id):
        engine.add([good])
    assert engine.num_unfinished == 1, (
        f"num_unfinished is {engine.num_unfinished} after one good request; expected 1."
    )
    assert [rollout.request_id for rollout in finish(engine)] == [good.id], (
        "The good request is not answered once."
    )


@contract(catches=("requests of a later call lost", "ids cut to a length"))
def every_request_comes_back_once(bench: RolloutBench) -> None:
    """Each request comes back exactly once, even if requests are added in two calls.

    Its id is any text, also a long one. Then ``step`` returns nothing.
    """
    engine, requests = bench.engine(), bench.requests(group=2)
    requests = [dataclasses.replace(r, id=f"{LONG_ID}{r.id}") for r in requests[::2]] + requests[1::2]
    assert engine.step() == [], "step with nothing queued gives rollouts."
    engine.add(requests[:5])
    done = engine.step()
    engine.add(requests[5:])
    done += finish(engine)
    assert sorted(r.request_id for r in done) == sorted(r.id for r in requests), (
        "Not every request came back once."
    )
    assert engine.step() == [], "step after the last rollout gives more."


@contract(catches=("aborted rollouts reported as length", "an id named twice returned twice"))
def aborted_requests_come_back_at_once(bench: RolloutBench) -> None:
    """``abort`` returns the named requests at once, with their whole prompt and the finish reason ``abort``.

    The other requests are answered, and unknown ids are ignored.
    """
    engine, requests = bench.engine(), bench.requests()
    engine.add(requests)
    stopped = engine.abort([requests[1].id, "no such request", requests[1].id])
    assert [r.request_id for r in stopped] == [requests[1].id], (
        f"abort gave {[r.request_id for r in stopped]}."
    )
    assert stopped[0].finish_reason == "abort", (
        f"finish_reason is '{stopped[0].finish_reason}'; expected 'abort'."
    )
    assert stopped[0].token_ids[: stopped[0].prompt_length].tolist() == requests[1].prompt.token_ids, (
        "Another prompt."
    )
    left = {request.id for request in requests} - {requests[1].id}
    assert engine.num_unfinished == len(left), (
        f"num_unfinished is {engine.num_unfinished}; expected {len(left)}."
    )
    assert {rollout.request_id for rollout in finish(engine)} == left, (
        "The other requests are not all answered."
    )
    assert engine.abort([requests[0].id]) == [], "abort of a finished request gives a rollout."


@contract(
    capability="pause",
    catches=(
        "finished rollouts lost in a pause",
        "requests that finished in a pause not counted",
        "requests that finished in a pause lost where they are aborted",
        "one batch drained and the others left",
        "a drain of a single step",
    ),
)
def a_pause_loses_no_request(bench: RolloutBench) -> None:
    """After any mode of ``pause``, every request comes back exactly once when ``resume`` is called.

    The mode ``abort`` returns unfinished requests as aborted. ``abort`` after a pause returns the rollouts of all that it
    names, also of those that finished in the pause. The mode ``drain`` finishes all requests, however many and long, so
    that an update after it changes no response.
    """
    _check_drained(bench)
    for mode in ("drain", "keep", "abort"):
        engine, requests = bench.engine(), bench.requests()
        engine.add(requests)
        engine.pause(mode)
        assert engine.num_unfinished == len(requests), (
            f"num_unfinished is {engine.num_unfinished} after pause('{mode}'); no rollout of {len(requests)} was returned."
        )
        engine.resume()
        done = finish(engine)
        assert sorted(r.request_id for r in done) == sorted(r.id for r in requests), (
            f"pause('{mode}') lost requests."
        )
        if mode != "abort":
            reasons = {rollout.finish_reason for rollout in done}
            assert "abort" not in reasons, f"pause('{mode}') aborted requests."
        engine.add(requests)
        engine.pause(mode)
        engine.resume()
        named = sorted(request.id for request in requests[::2])
        stopped = engine.abort(named)
        assert sorted(rollout.request_id for rollout in stopped) == named, (
            f"abort after pause('{mode}') returned {len(stopped)} rollouts; it named {len(named)} requests."
        )
        done = stopped + finish(engine)
        assert sorted(r.request_id for r in done) == sorted(r.id for r in requests), (
            f"pause('{mode}') and abort lost requests."
        )
    with refused("pause('no such mode')"):
        bench.engine().pause("no such mode")


def _check_drained(bench: RolloutBench) -> None:
    """Drain more requests than an engine samples at a time, and assert that none continues under later weights."""
    engine = bench.engine(request_timeout_seconds=3600.0)  # the steps of an engine may be short
    requests = bench.requests(("ab",), group=CROWD, max_response_tokens=1)
    for request in requests[::64]:
        request.sampling = dataclasses.replace(request.sampling, max_response_tokens=48)
    engine.add(requests)
    engine.pause("drain")
    engine.update_weights(bench.stream(bench.model(seed=1)), 3)
    engine.resume()
    done = finish(engine)
    assert sorted(r.request_id for r in done) == sorted(r.id for r in requests), (
        f"pause('drain') lost some of {CROWD} requests."
    )
    late = [r for r in done if set(r.policy_versions[r.prompt_length :].tolist()) != {0}]
    assert not late, (
        f"pause('drain') left {len(late)} of {CROWD} requests unfinished: they have tokens of an update after the pause, "
        f"such as '{late[0].request_id}'."
    )
    reasons = {rollout.finish_reason for rollout in done}
    assert reasons <= {"stop", "length"}, f"pause('drain') ended responses with {sorted(reasons)}."


@contract()
def an_engine_closes_with_work_left(bench: RolloutBench) -> None:
    """``close`` raises no error if requests are still queued.

    Another engine can be built and used after it.
    """
    engine = bench.engine()
    engine.add(bench.requests())
    engine.close()
    assert len(bench.engine().generate(bench.requests())) == len(bench.requests()), (
        "The engine after it does not work."
    )
