"""Steps that end early: what counts, what is stopped, what is asked for in one call."""

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from engine_core.contracts.parts import CARRIED
from engine_core.contracts.runtime import WorkerGroup
from engine_core.runs.rollout_files import write_rollouts
from engine_core.train.clock import Clock
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_trainers.early_stop import Group, Stragglers, _settle


def request(number):
    return Request(f"r{number}", Prompt(f"p{number}", [1, 2], "a"), Sampling(max_response_tokens=8))


class Flow:
    """Notes what it is told; says what a test has it say."""

    def __init__(self, tell, changed):
        self.tell, self.changed = tell, changed
        self.error, self.resting, self.gone, self.closed = None, False, [], False

    def go(self, requests=(), dropped=()):
        self.resting = False
        self.gone.append([each.id for each in requests])

    def close(self):
        self.closed = True


class Samplers(WorkerGroup):
    def __init__(self, flows=True, repeatable=False):
        self.flows, self.repeatable, self.rounds, self.made = flows, repeatable, [], None

    def call(self, method, batch=None, split="dp", **plain):
        self.rounds.append([each.id for each in plain["requests"]])
        done = Future()
        done.set_result([request(len(self.rounds)).unsampled()])
        return done

    def flow(self, tell, changed):
        self.made = Flow(tell, changed) if self.flows else None
        return self.made


def ids(rollouts):
    return [each.request_id for each in rollouts]


def test_of_a_response_that_two_samplers_tell_the_first_one_counts():
    group = Group(Prompt("p1", [1, 2], "a"), {"r1": request(1)})
    running, first, second = {"r1": group}, request(1).unsampled(), request(1).unsampled()
    _settle([first], running)
    _settle([second], running)
    assert group.done["r1"] is first
    assert running == {}


class Twice(Samplers):
    """What is stopped had just finished, and another sampler has told of a part of it."""

    def __init__(self, told, stopped):
        super().__init__()
        self.told, self.at_stop = told, stopped

    def call(self, method, batch=None, split="dp", **plain):
        assert method == "advance"
        self.rounds.append(plain["stopped"])
        self.made.tell(self.told)  # a sampler tells what has finished before it answers the stop
        done = Future()
        done.set_result(self.at_stop)
        return done


def finished(number):
    return dataclasses.replace(request(number).unsampled(), finish_reason="stop")


def test_a_response_that_one_sampler_tells_and_another_gives_back_finished_is_counted_once():
    first, second, third = finished(2), finished(2), finished(3)
    group = Twice([first], [second, third, finished(3), request(4).unsampled()])
    stragglers = Stragglers(SimpleNamespace(run=SimpleNamespace(groups={"rollout": group}, clock=Clock())))
    stragglers._wanted = 1
    groups = [Group(Prompt(f"p{n}", [1, 2], "a"), {f"r{n}": request(n)}) for n in (1, 2, 3, 4)]
    flow = group.flow

    def with_one_told(tell, changed):
        made = flow(tell, changed)
        made.go = lambda requests, dropped: tell([finished(1)])
        return made

    group.flow = with_one_told
    stopped = stragglers._run(groups)
    assert group.rounds == [["r2", "r3", "r4"]]
    assert [each.complete for each in groups] == [True, True, True, False]
    assert groups[1].done["r2"] is first
    assert groups[2].done["r3"] is third
    assert stopped["r4"].finish_reason == "abort"
    assert group.made.closed


@pytest.mark.parametrize(("over_sampling", "carry"), [(1.5, False), (1.0, True)])
def test_groups_that_a_run_under_other_settings_drops_are_counted(tmp_path, caplog, over_sampling, carry):
    prompt, held = Prompt("p", [1, 2], "a"), []
    for number, reasons in enumerate((("stop", "abort"), ("abort", "abort"))):
        for index, reason in enumerate(reasons):
            tokens = torch.tensor([1, 2, 5, 6, 7])
            mask = tokens > 4
            rollout = Rollout(f"1:{number}:{index}", prompt, tokens, mask, torch.zeros(5), mask.int(), reason)
            held.append(dataclasses.replace(rollout, group_id=number))
    write_rollouts(tmp_path / CARRIED, step=0, rollouts=held)
    options = SimpleNamespace(over_sampling=over_sampling, partial_rollouts=carry)
    run = SimpleNamespace(config=SimpleNamespace(rollout=options))
    stragglers = Stragglers(SimpleNamespace(run=run))
    stragglers.load(tmp_path)
    assert stragglers.carried == []
    assert "2 groups that an earlier attempt had carried over are dropped" in caplog.text
    told = stragglers.metrics()
    assert (told["sampling/dropped_groups"], told["sampling/stopped_tokens"]) == (2.0, 9.0)
    assert stragglers.metrics().get("sampling/dropped_groups", 0.0) == 0.0
