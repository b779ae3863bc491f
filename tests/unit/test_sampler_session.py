"""Driving a sampler: requests are answered once, in rounds or as engines finish them; holds, cancels, failures."""

import dataclasses
import threading
from concurrent.futures import Future

import pytest

from engine_core.contracts.runtime import WorkerGroup
from engine_core.errors import WorkerLost
from engine_core.sampler_session import SamplerSession
from engine_core.types import Prompt, Request, Sampling


def request(number):
    return Request(f"r{number}", Prompt(f"p{number}", [1, 2], "a"), Sampling(max_response_tokens=8))


class Flow:
    """Notes what it receives; sends what a test has it send."""

    def __init__(self, tell, changed):
        self.tell, self.changed = tell, changed
        self.error, self.resting, self.gone, self.closed = None, False, [], False

    def go(self, requests=(), dropped=()):
        self.resting = False
        self.gone.append(([each.id for each in requests], list(dropped)))

    def close(self):
        self.closed = True


class Samplers(WorkerGroup):
    """In rounds the n-th call answers request n; what is stopped has nothing yet."""

    def __init__(self, flows=True):
        self.flows, self.calls, self.made = flows, [], None

    def call(self, method, batch=None, split="dp", **plain):
        assert method == "advance"
        named = {
            name: [getattr(v, "id", v) for v in value] if name != "rounds" else value
            for name, value in plain.items()
        }
        self.calls.append(named)
        done = Future()
        rounds = sum("requests" in each for each in self.calls)
        found = (
            [request(rounds)] if "requests" in plain else [request(id[1:]) for id in plain.get("stopped", ())]
        )
        done.set_result([each.unsampled() for each in found])
        return done

    def flow(self, tell, changed):
        self.made = Flow(tell, changed) if self.flows else None
        return self.made


def ids(rollouts):
    return [each.request_id for each in rollouts]


@pytest.mark.parametrize("group", [Samplers(), Samplers(flows=False)])
def test_in_rounds_requests_are_sent_once_and_each_result_is_of_a_round(group):
    session = SamplerSession(group, rounds=group.flows)
    session.submit([request(1), request(2)])
    assert [ids(session.results()), ids(session.results(rounds=3))] == [["r1"], ["r2"]]
    first, second = {"requests": ["r1", "r2"]}, {"requests": []}
    assert group.calls == [first | {"dropped": [], "rounds": 1}, second | {"dropped": [], "rounds": 3}]
    assert group.made is None
    assert session.idle
    assert session.results(timeout=0.01) == []  # nothing in flight: no round


def test_engines_that_continue_by_themselves_are_sent_requests_once_and_told_to_continue_when_they_rest():
    group = Samplers()
    session = SamplerSession(group)
    session.submit([request(1), request(2)])
    threading.Timer(0.05, lambda: group.made.tell([request(1).unsampled()])).start()
    assert ids(session.results()) == ["r1"]
    group.made.resting = True
    group.made.changed()
    assert session.results(timeout=0.05) == []
    assert group.made.gone == [(["r1", "r2"], []), ([], [])]
    group.made.tell([request(2).unsampled()])
    assert ids(session.results()) == ["r2"]
    session.close()
    assert group.made.closed


def test_an_engine_that_is_lost_while_it_receives_requests_is_replaced_before_anybody_waits():
    """Nothing of it is open that could tell the loss."""
    group = Samplers()
    session = SamplerSession(group)
    session.submit([request(1)])
    go = group.made.go

    def lost(requests=(), dropped=()):
        go(requests, dropped)
        group.made.resting = bool(requests)
        if not requests:
            group.made.tell([request(1).unsampled()])

    group.made.go = lost
    assert ids(session.results()) == ["r1"]
    assert group.made.gone == [(["r1"], []), ([], [])]


def test_a_failure_of_an_engine_ends_the_wait():
    group = Samplers()
    session = SamplerSession(group)
    session.submit([request(1)])
    threading.Timer(
        0.05,
        lambda: (
            setattr(group.made, "error", WorkerLost("rollout", 1, "here", "gone")),
            group.made.changed(),
        ),
    ).start()
    with pytest.raises(WorkerLost, match="gone"):
        session.results()


def test_a_request_that_was_sent_again_has_one_result():
    group = Samplers()
    session = SamplerSession(group)
    session.submit([request(1), request(2)])
    assert session.results(timeout=0.01) == []
    group.made.tell([request(1).unsampled()])
    group.made.tell([request(1).unsampled(), request(2).unsampled()])
    assert ids(session.results()) == ["r1", "r2"]


@pytest.mark.parametrize("rounds", [True, False])
def test_a_cancel_returns_what_there_is_of_requests_in_flight_and_forgets_queued_ones(rounds):
    group = Samplers()
    session = SamplerSession(group, rounds=rounds)
    session.submit([request(number) for number in (1, 2, 3)])
    session.results(timeout=0.01)  # in rounds the first has finished
    session.submit([request(9)])
    assert ids(session.cancel(["r2", "r9", "unknown"])) == ["r2"]
    assert group.calls[-1] == {"dropped": [], "stopped": ["r2"], "rounds": 0}
    assert session.in_flight == (["r3"] if rounds else ["r1", "r3"])


def test_what_has_finished_meanwhile_is_part_of_a_cancel_and_not_stopped():
    group = Samplers()
    session = SamplerSession(group)
    session.submit([request(1), request(2)])
    session.results(timeout=0.01)
    group.made.tell([request(1).unsampled()])
    assert ids(session.cancel(["r1", "r2"])) == ["r1", "r2"]
    assert group.calls == [{"dropped": [], "stopped": ["r2"], "rounds": 0}]
    assert session.idle


@pytest.mark.parametrize("rounds", [True, False])
def test_dropped_requests_go_with_the_next_call_and_their_rollouts_are_not_results(rounds):
    group = Samplers()
    session = SamplerSession(group, rounds=rounds)
    session.submit([request(number) for number in (1, 2, 3)])
    session.results(timeout=0.01)
    session.submit([request(4)], dropped=["r3", "r2"])
    session.results(timeout=0.01)
    sent = group.calls[-1] if rounds else group.made.gone[-1]
    in_a_round = {"requests": ["r4"], "dropped": ["r2", "r3"], "rounds": 1}
    assert sent == (in_a_round if rounds else (["r4"], ["r2", "r3"]))
    if not rounds:
        group.made.tell([request(3).unsampled(), request(4).unsampled()])
        assert ids(session.results()) == ["r4"]


def test_a_cancel_sends_what_was_dropped_before_it():
    group = Samplers()
    session = SamplerSession(group, rounds=True)
    session.submit([request(number) for number in (1, 2, 3)])
    session.results(timeout=0.01)
    session.submit((), dropped=["r3"])
    assert session.cancel(["r3"]) == []
    assert group.calls[-1] == {"dropped": ["r3"], "stopped": [], "rounds": 0}
    session.cancel(["r2"])
    assert group.calls[-1] == {"dropped": [], "stopped": ["r2"], "rounds": 0}


def test_nothing_is_sent_within_a_hold_and_what_was_queued_is_sent_after_it():
    group, found = Samplers(), []
    session = SamplerSession(group, rounds=True)
    taker = threading.Thread(target=lambda: found.extend(session.results()))
    with session.held():
        session.submit([request(1)])
        taker.start()
        taker.join(0.1)
        assert group.calls == []
    taker.join(10)
    assert ids(found) == ["r1"]


def test_an_abandoned_session_has_nothing_in_flight():
    group = Samplers()
    session = SamplerSession(group)
    session.submit([request(1), request(2)])
    session.results(timeout=0.01)
    session.submit([request(3)])
    session.abandon()
    assert group.calls == [{"dropped": ["r1", "r2"]}]
    assert session.idle
    session.abandon()
    assert len(group.calls) == 1


def test_a_thread_that_waits_for_results_returns_when_the_session_is_closed():
    session = SamplerSession(Samplers())
    waiting = threading.Thread(target=session.results)
    waiting.start()
    session.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_thread_that_waits_for_results_returns_when_it_is_woken():
    session, found = SamplerSession(Samplers()), []
    session.submit([request(1)])
    waiting = threading.Thread(target=lambda: found.append(session.results()))
    waiting.start()
    session.wake()
    waiting.join(10)
    assert found == [[]]
    assert session.in_flight + [each.id for each in session._new] == ["r1"]  # a waking loses nothing


def test_a_drain_waits_for_requests_so_far_and_keeps_later_ones_for_its_end():
    group, within, leave = Samplers(), threading.Event(), threading.Event()
    session = SamplerSession(group)
    session.submit([request(1)])
    session.results(timeout=0.01)

    def drain():
        with session.drained():
            within.set()
            leave.wait(10)

    draining = threading.Thread(target=drain)
    draining.start()
    while session._late is None:
        pass
    session.submit([request(2), request(3)])
    assert not within.wait(0.05)
    session.submit([], dropped=["r3"])
    group.made.tell([request(1).unsampled()])
    assert not within.wait(0.05)  # its rollout was not taken yet
    assert ids(session.results()) == ["r1"]
    assert within.wait(10)
    assert session.results(timeout=0.01) == []
    assert group.made.gone == [(["r1"], [])]
    leave.set()
    draining.join(10)
    assert session.results(timeout=0.01) == []
    assert group.made.gone[-1] == (["r2"], [])


def test_interrupted_requests_are_sent_again_with_what_they_have_and_ended_ones_are_results():
    class Late(Samplers):
        def call(self, method, **plain):
            """Stop requests of which the third ends by itself meanwhile."""
            parts, done = super().call(method, **plain).result(), Future()
            done.set_result([replaced(p, "stop") if p.request_id == "r3" else p for p in parts])
            return done

    def replaced(part, reason):
        return dataclasses.replace(part, finish_reason=reason)

    group = Late()
    session = SamplerSession(group)
    session.submit([request(1), request(2), request(3)])
    session.results(timeout=0.01)
    group.made.tell([replaced(request(2).unsampled(), "stop")])
    with session.held():
        assert ids(session.interrupt()) == ["r1"]
    assert ids(session.results()) == ["r2", "r3"]
    assert session.results(timeout=0.01) == []
    assert group.made.gone[-1] == (["r1"], [])
    assert session.in_flight == ["r1"]


def test_an_interrupted_request_keeps_its_deadline():
    class At:
        seconds = 0.0

        def now(self):
            return self.seconds

        def condition(self):
            return threading.Condition()

    class Sent(Samplers):
        def flow(self, tell, changed):
            flow = super().flow(tell, changed)
            go = flow.go
            flow.go = lambda requests=(), dropped=(): sent.extend(requests) or go(requests, dropped)
            return flow

    sent, clock = [], At()
    session = SamplerSession(Sent(), clock)
    timed = dataclasses.replace(request(1), sampling=Sampling(timeout_s=10.0))
    session.submit([timed, request(2)])
    for passed in (0.0, 4.0, 3.0, 13.0):
        session.results(timeout=0.01)
        clock.seconds += passed
        with session.held():
            session.interrupt()
    session.results(timeout=0.01)
    left = [each.sampling.timeout_s for each in sent if each.id == "r1"]
    assert left == pytest.approx([10.0, 10.0, 6.0, 3.0, 1e-3])
    assert {each.sampling.timeout_s for each in sent if each.id == "r2"} == {0.0}
