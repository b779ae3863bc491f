"""Steps that end early: what counts, what is stopped, what is asked for in one call."""

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import torch

from engine_core.contracts.parts import CARRIED
from engine_core.contracts.runtime import WorkerGroup
from engine_core.runs.rollout_files import write_rollouts
from engine_core.timeline import Clock
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_trainers.early_stop import Group, Stragglers, _settle


def request(number):
    return Request(f"r{number}", Prompt(f"p{number}", [1, 2], "a"), Sampling(max_response_tokens=8))


def test_of_a_response_that_two_samplers_tell_the_first_one_counts():
    group = Group(Prompt("p1", [1, 2], "a"), {"r1": request(1)})
    running, first, second = {"r1": group}, request(1).unsampled(), request(1).unsampled()
    _settle([first], running)
    _settle([second], running)
    assert group.done["r1"] is first
    assert running == {}


def finished(number):
    return dataclasses.replace(request(number).unsampled(), finish_reason="stop")


def settings_of(**options):
    config = SimpleNamespace(rollout=SimpleNamespace(**options))
    return SimpleNamespace(config=config, now=config)


def stragglers_of(group):
    """For one group of responses."""
    found = Stragglers(settings_of(), {"rollout": group}, Clock())
    found._wanted = 1
    return found


def groups_of(*numbers):
    return [Group(Prompt(f"p{n}", [1, 2], "a"), {f"r{n}": request(n)}) for n in numbers]


class Twice(WorkerGroup):
    """Request 1 finishes; of what is stopped then some has just finished, here and on another sampler that has told it."""

    repeatable, error, resting, closed = False, None, False, False  # it is its own flow

    def flow(self, tell, changed):
        self.tell = tell
        return self

    def go(self, requests, dropped):
        self.tell([finished(1)])

    def close(self):
        self.closed = True

    def call(self, method, batch=None, split="dp", **plain):
        assert (method, plain["stopped"]) == ("advance", ["r2", "r3", "r4"])
        self.tell([self.told])  # a sampler tells what has finished before it answers the stop
        done = Future()
        done.set_result(self.at_stop)
        return done


def test_a_response_that_one_sampler_tells_and_another_gives_back_finished_is_counted_once():
    group, groups, third = Twice(), groups_of(1, 2, 3, 4), finished(3)
    group.told = finished(2)
    group.at_stop = [finished(2), third, finished(3), request(4).unsampled()]
    stopped = stragglers_of(group)._run(groups)
    assert [each.complete for each in groups] == [True, True, True, False]
    assert groups[1].done["r2"] is group.told
    assert groups[2].done["r3"] is third
    assert stopped["r4"].finish_reason == "abort"
    assert group.closed


class Rounds(WorkerGroup):
    """Asked in rounds; request 1 finishes in the call after so many."""

    def __init__(self, calls):
        self.left, self.asked = calls, []

    def call(self, method, batch=None, split="dp", *, rounds, **plain):
        self.asked.append(rounds)
        self.left -= 1
        done = Future()
        done.set_result([] if self.left else [finished(1)])
        return done


def test_where_responses_are_long_a_call_is_of_several_rounds():
    group = Rounds(16)
    assert stragglers_of(group)._run(groups_of(1)) == {}
    assert group.asked == [1] * 8 + [2] * 4 + [3] * 3 + [4]  # 8, 16, 25, 29 rounds


def test_groups_that_a_run_under_other_settings_drops_are_counted(tmp_path, caplog):
    prompt, held = Prompt("p", [1, 2], "a"), []
    for number, reasons in enumerate((("stop", "abort"), ("abort", "abort"))):
        for index, reason in enumerate(reasons):
            tokens = torch.tensor([1, 2, 5, 6, 7])
            mask = tokens > 4
            rollout = Rollout(f"1:{number}:{index}", prompt, tokens, mask, torch.zeros(5), mask.int(), reason)
            held.append(dataclasses.replace(rollout, group_id=number))
    write_rollouts(tmp_path / CARRIED, step=0, rollouts=held)
    settings = settings_of(over_sampling=1.5, partial_rollouts=False)
    stragglers = Stragglers(settings, {}, Clock())
    stragglers.load(tmp_path)
    assert stragglers.carried == []
    assert "2 groups that an earlier attempt had carried over are dropped" in caplog.text
    told = stragglers.metrics()
    assert (told["sampling/dropped_groups"], told["sampling/stopped_tokens"]) == (2.0, 9.0)
    assert stragglers.metrics().get("sampling/dropped_groups", 0.0) == 0.0
