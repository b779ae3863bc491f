"""Episodes of a step: what comes of them, whatever the order in which samples and tools end, and whatever fails."""

import os
import random
import re
import signal
import threading
import time

import pytest
import torch

from engine_core.environments.policy import turn_seed
from engine_core.errors import PluginError, TrainingFailed
from engine_core.preemption import Stop, StopSignals

THREE_TURNS = """
SPEC = {"rewards": frozenset({"long"})}

async def mine(episode):
    for number in range(3):
        turn = await episode.sample(max_tokens=5)
        answer = await episode.call(slow, turn.text)
        episode.append(f"[{answer}]")
    return episode.rollout({"long": float(len(turn.text))})

def slow(text):
    time.sleep(0.001 * (len(text) % 4))
    return text.upper()
"""


def values(rollouts):
    return [
        (
            r.request_id,
            r.token_ids.tolist(),
            r.loss_mask.tolist(),
            r.rollout_log_probs.tolist(),
            r.rewards,
            r.messages,
            r.finish_reason,
        )
        for r in rollouts
    ]


def test_only_what_the_policy_said_is_learned_and_stands_as_it_was_sampled(
    environment, scripted, requests, play, tokenizer
):
    engine = scripted()
    engine.version = 7
    rollouts = play(environment(THREE_TURNS), engine, requests(4))
    by_id = {request.id: request for request in engine.asked}
    for rollout in rollouts:
        expected, mask, log_probs, turns = list(rollout.prompt.token_ids), [], [], []
        mask, log_probs = [False] * len(expected), [0.0] * len(expected)
        turns = [0] * len(expected)
        for number in (1, 2, 3):
            request = by_id[f"{rollout.request_id}:{number}"]
            assert request.prompt.token_ids == expected  # tokens in
            answer = engine.answer(request)
            said = answer.token_ids[len(expected) :].tolist()
            text = f"[{tokenizer.decode(said).upper()}]"
            told = tokenizer(text, add_special_tokens=False)["input_ids"]
            log_probs += answer.rollout_log_probs[len(expected) :].tolist() + [0.0] * len(told)
            expected += said + told
            mask += [True] * len(said) + [False] * len(told)
            turns += [number] * (len(said) + len(told))
        assert rollout.token_ids.tolist() == expected
        assert rollout.loss_mask.tolist() == mask
        assert rollout.rollout_log_probs.tolist() == log_probs
        assert rollout.policy_versions.tolist() == [7 * m for m in mask]
        assert rollout.extras["turns"].tolist() == turns
        assert [m["role"] for m in rollout.messages] == ["assistant", "tool"] * 3
        assert rollout.finish_reason == "length"  # a tool had the last word


def test_rollouts_come_in_the_order_of_the_requests_with_their_names(environment, scripted, requests, play):
    asked = requests(6, group_size=3)
    rollouts = play(environment(THREE_TURNS), scripted(order=3, per_step=1), asked)
    assert [r.request_id for r in rollouts] == [r.id for r in asked]
    assert [(r.group_id, r.index) for r in rollouts] == [(r.group_id, r.index) for r in asked]
    assert all(r.prompt is request.prompt for r, request in zip(rollouts, asked, strict=True))


def test_the_order_in_which_samples_end_changes_no_rollout(environment, scripted, requests, play):
    runner = environment(THREE_TURNS)
    expected = values(play(runner, scripted(), requests(12)))
    for order in range(4):
        engine = scripted(order=order, per_step=1 + order)
        assert values(play(runner, engine, requests(12))) == expected
    assert values(play(environment(THREE_TURNS, max_concurrent=2), scripted(), requests(12))) == expected


def test_each_turn_has_a_seed_of_its_own_and_the_first_that_of_the_request(
    environment, scripted, requests, play
):
    engine, asked = scripted(), requests(4)
    play(environment(THREE_TURNS), engine, asked)
    own = {request.id: request.sampling.seed for request in asked}
    seeds = {r.id: r.sampling.seed for r in engine.asked}
    assert len(set(seeds.values())) == 12
    for name, seed in seeds.items():
        episode, _, number = name.rpartition(":")
        assert seed == turn_seed(own[episode], int(number))
        assert number != "1" or seed == own[episode]


def test_samples_that_are_asked_for_together_are_sampled_together(environment, scripted, requests, play):
    engine = scripted()
    play(environment(THREE_TURNS), engine, requests(16, group_size=4))
    assert engine.most == 16


def test_a_slow_tool_holds_up_no_other_episode(environment, scripted, requests, play):
    source = """
    others = threading.Event()

    async def mine(episode):
        await episode.sample()
        if episode.prompt.columns["number"] == 0:
            episode.append(await episode.call(others.wait, 60))  # until the others are over
        else:
            for _ in range(3):
                await episode.sample()
            others.set()
        return episode.rollout()
    """
    runner = environment(source, tool_timeout_seconds=60)
    rollouts = play(runner, scripted(), requests(3, group_size=1))
    assert rollouts[0].messages[1]["content"] == "True"


def test_no_more_episodes_run_at_once_than_allowed(environment, scripted, requests, play):
    engine = scripted()
    rollouts = play(environment(THREE_TURNS, max_concurrent=3), engine, requests(8))
    assert len(rollouts) == 8
    assert engine.most <= 3


FAILING = """
SPEC = {"rewards": frozenset({"good"})}

async def mine(episode):
    turn = await episode.sample(max_tokens=4)
    number = episode.prompt.columns["number"]
    if number == 1:
        raise KeyError("no such state")
    if number == 2:
        while True:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass  # it does not let itself be cancelled
    if number == 3:
        raise SystemExit(3)
    if number == 4:
        raise asyncio.CancelledError
    return episode.rollout({"good": 1.0})
"""


def failing(environment, **settings):
    return environment(FAILING, timeout_seconds=0.3, max_failure_share=1.0, **settings)


def test_an_episode_that_raises_never_ends_or_exits_costs_itself_alone(
    environment, scripted, requests, play, caplog
):
    runner = failing(environment)
    rollouts = play(runner, scripted(), requests(6, group_size=1))
    assert [r.failure for r in rollouts] == ["", "error", "timeout", "error", "error", ""]
    assert [r.valid for r in rollouts] == [True, False, False, False, False, True]
    assert all(r.messages and r.loss_mask.any() for r in rollouts)  # what there was is kept
    metrics = runner.metrics()
    assert (metrics["environment/errors"], metrics["environment/timeouts"]) == (3.0, 1.0)
    assert "KeyError: 'no such state'" in caplog.text
    assert "not over after 0.3 s" in caplog.text
    assert "SystemExit: 3" in caplog.text
    assert "the episode cancelled itself" in caplog.text
    assert "environment_0.py" in caplog.text  # whose it is, and the line
    # the runner can be used again
    assert play(runner, scripted(), requests(1))[0].failure == ""
    assert runner.metrics()["environment/errors"] == 0.0


def test_zero_keeps_the_rollout(environment, scripted, requests, play):
    runner = failing(environment, on_error="zero", on_timeout="zero")
    rollouts = play(runner, scripted(), requests(6, group_size=1))
    assert all(r.valid for r in rollouts)
    assert [bool(r.failure) for r in rollouts] == [False, True, True, True, True, False]


@pytest.mark.parametrize(("key", "number"), [("on_error", 1), ("on_timeout", 2)])
def test_fail_ends_the_run_and_names_the_episode(environment, scripted, requests, play, key, number):
    runner = failing(environment, **{key: "fail"})
    with pytest.raises(TrainingFailed, match=rf"episode 1:{number}:0 \(prompt train:{number}\).*{key}"):
        play(runner, scripted(), requests(6, group_size=1)[: number + 1][-1:])


def test_too_many_failures_end_the_run(environment, scripted, requests, play):
    runner = environment("async def mine(episode): raise ValueError('all of them')", max_failure_share=0.25)
    with pytest.raises(
        TrainingFailed, match=r"in at least 3 of 8 episodes.*max_failure_share = 0.25.*all of them"
    ):
        play(runner, scripted(), requests(8))


TOOLS = """
async def mine(episode):
    turn = await episode.sample()
    for tool in (hangs, sleeps, raises, leaves, nothing, finds):
        episode.append(await episode.call(tool, seconds=None if tool is not hangs else 0.1) + "|")
    turn = await episode.sample()
    return episode.rollout()

release = threading.Event()

def hangs():
    release.wait(20)

async def sleeps():
    await asyncio.sleep(60)

async def raises():
    raise ZeroDivisionError("by zero")

def leaves():
    raise SystemExit(4)

def nothing():
    raise StopIteration

def finds():
    return 84
"""


def test_a_tool_that_hangs_or_raises_is_told_to_the_policy(environment, scripted, requests, play):
    runner = environment(TOOLS, tool_timeout_seconds=0.2, max_tokens=1000)
    rollout = play(runner, scripted(), requests(1))[0]
    assert rollout.failure == ""
    assert [m["content"] for m in rollout.messages[1:-1]] == [
        "error: no answer after 0.1 s|",
        "error: no answer after 0.2 s|",
        "error: ZeroDivisionError: by zero|",
        "error: RuntimeError: SystemExit: 4|",
        "error: RuntimeError: StopIteration: None|",
        "84|",
    ]
    metrics = runner.metrics()
    assert metrics["environment/tool_calls"] == 6
    assert metrics["environment/tool_errors"] == 3
    assert metrics["environment/tool_timeouts"] == 2
    assert metrics["environment/abandoned_threads"] == 1
    runner.spec.load.__globals__["release"].set()


LIMITS = """
SPEC = {"rewards": frozenset({"good"})}

async def mine(episode):
    while True:
        await episode.sample(max_tokens=6)
        episode.append("0123456789")
"""


def test_an_episode_without_end_is_truncated_at_its_turns_and_worth_nothing(
    environment, scripted, requests, play
):
    runner = environment(LIMITS, max_turns=3)
    rollouts = play(runner, scripted(), requests(2))
    assert [int(r.extras["turns"].max()) for r in rollouts] == [3, 3]
    assert [(r.finish_reason, r.rewards, r.valid) for r in rollouts] == [("length", {"good": 0.0}, True)] * 2
    assert runner.metrics()["environment/limited"] == 2


def test_no_sequence_is_longer_than_the_limit(environment, scripted, requests, play):
    for limit in range(3, 40):
        runner = environment(LIMITS, max_turns=30, max_tokens=limit)
        engine = scripted()
        (rollout,) = play(runner, engine, requests(1))
        assert len(rollout.token_ids) <= limit
        assert len(rollout.token_ids) > limit - 10
        assert rollout.finish_reason == "length"
        for request in engine.asked:
            assert len(request.prompt.token_ids) + request.sampling.max_response_tokens <= limit


def test_the_file_may_allow_less_than_the_model_and_not_more(environment):
    assert environment(LIMITS, max_tokens=50).limits.tokens == 50
    from engine_core.config.environment import EnvironmentConfig

    for given, expected in ((30, 30), (300, 50), (None, 50)):
        runner = environment(LIMITS, max_tokens=50)
        config = EnvironmentConfig(name="mine", max_tokens=given)
        assert type(runner)(config, _plugins(runner), runner.tokenizer, 50, ()).limits.tokens == expected


def _plugins(runner):
    class Loaded:
        chosen = {}

        def spec(self, kind, name):
            return runner.spec

        def resolve(self, kind, name):
            return runner.spec.load

    loaded = Loaded()
    loaded.chosen["environments", "mine"] = (runner.spec, type("P", (), {"label": "here"}))
    return loaded


def test_an_episode_that_misses_its_deadline_leaves_nothing_in_the_sampler(
    environment, scripted, requests, play
):
    source = """
    async def mine(episode):
        await asyncio.gather(*(episode.policy.sample(episode.token_ids) for _ in range(2)))
        return episode.rollout()
    """

    class Never(type(scripted())):
        def step(self):
            time.sleep(0.01)
            return []

    engine = Never(scripted().tokenizer)
    runner = environment(source, timeout_seconds=0.3, max_failure_share=1.0)
    assert [r.failure for r in play(runner, engine, requests(2))] == ["timeout"] * 2
    assert engine.queue == []
    assert engine.running == {}
    assert sorted(engine.aborted) == ["1:0:0:1", "1:0:0:2", "1:0:1:1", "1:0:1:2"]


def test_an_engine_that_fails_leaves_no_episode_behind(environment, scripted, requests, play):
    def broken(request):
        if request.id.endswith(":2"):
            raise MemoryError("no room")
        return "a", "stop"

    runner, engine = environment(THREE_TURNS), scripted(broken)
    with pytest.raises(MemoryError):
        play(runner, engine, requests(2))
    assert engine.running == {}
    assert [r.failure for r in play(runner, scripted(), requests(2))] == ["", ""]


def test_an_environment_that_blocks_the_loop_ends_the_run_and_is_shown_where(
    environment, scripted, requests, play
):
    source = """
    async def mine(episode):
        await episode.sample()
        time.sleep(4)  # not awaited
        return episode.rollout()
    """
    runner = environment(source, timeout_seconds=0.5)
    with pytest.raises(
        TrainingFailed, match=r"blocked the event loop.*environment_0.py:9 in mine: time.sleep\(4\)"
    ):
        play(runner, scripted(), requests(1))


def test_a_stop_leaves_at_once_while_tools_run(environment, scripted, requests, play):
    source = """
    waiting = threading.Event()

    async def mine(episode):
        await episode.sample()
        waiting.set()
        await episode.call(time.sleep, 30)
        return episode.rollout()
    """
    runner, engine = environment(source, tool_timeout_seconds=60), scripted()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    start = time.monotonic()
    with StopSignals() as signals, pytest.raises(Stop), signals.window():
        play(runner, engine, requests(4))
    assert time.monotonic() - start < 20  # of 30 that the tool takes
    assert engine.running == {}


RETURNS = {
    "'text'": r"must return a Rollout, such as episode.rollout\(\); it returned 'text' \(str\)",
    "None": r"it returned None \(NoneType\)",
    "[episode.rollout()]": r"must return a Rollout.*\(list\)",
}


@pytest.mark.parametrize("returned", RETURNS)
def test_what_is_no_rollout_ends_the_run_with_the_plugins_name(
    environment, scripted, requests, play, returned
):
    runner = environment(f"async def mine(episode): return {returned}")
    with pytest.raises(PluginError, match=RETURNS[returned]) as error:
        play(runner, scripted(), requests(1))
    assert re.match(r"Plugin file 'environment_0.py' \(.*\): environment 'mine' must", str(error.value))


CHANGED = {
    "made.loss_mask[:] = True": "marks token 0",
    "made.loss_mask[-1] = True": r"marks token \d+ \('!'\) in loss_mask, which the policy did not sample",
    "made.rollout_log_probs[made.loss_mask] += 0.1": "gave turn 1 log-probs that are not those",
    "made.policy_versions += 1": "gave turn 1 policy versions",
    "made.token_ids[0] += 1": "does not begin with its prompt's tokens",
    "made.token_ids[2] += 1": "marks token 2",  # as encoding again would
    "made.loss_mask = made.loss_mask[1:]": r"gave \d+ loss_mask for \d+ tokens",
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_rollout_that_is_not_what_was_sampled_ends_the_run(environment, scripted, requests, play, change):
    source = f"""
    async def mine(episode):
        await episode.sample()
        episode.append("!")
        made = episode.rollout()
        {change}
        return made
    """
    with pytest.raises(PluginError, match=CHANGED[change]):
        play(environment(source), scripted(), requests(1))


def test_a_rollout_may_be_made_by_hand_of_what_the_policy_sampled(environment, scripted, requests, play):
    source = """
    import torch
    from engine_core.types import Rollout

    async def mine(episode):
        policy, prompt = episode.policy, episode.prompt
        first, second = await asyncio.gather(policy.sample(prompt.token_ids), policy.sample(prompt.token_ids))
        best = max(first, second, key=lambda turn: turn.text)
        ids = prompt.token_ids + best.token_ids
        zeros = torch.zeros(len(prompt.token_ids))
        return Rollout(
            "", prompt, torch.tensor(ids), torch.arange(len(ids)) >= len(zeros),
            torch.cat([zeros, best.log_probs]), torch.cat([zeros.int(), best.policy_versions]), "stop",
        )
    """
    asked = requests(2)
    rollouts = play(environment(source), scripted(), asked)
    assert [r.request_id for r in rollouts] == [r.id for r in asked]
    for rollout in rollouts:
        learned = rollout.extras["turns"][rollout.loss_mask]
        assert set(learned.tolist()) <= {1, 2}
        assert not rollout.extras["turns"][~rollout.loss_mask].any()


def test_extras_of_the_sampler_cover_what_was_sampled(environment, scripted, requests, play):
    class WithMass(type(scripted())):
        def answer(self, request):
            made = super().answer(request)
            made.extras["support_log_mass"] = torch.where(made.loss_mask, -0.5, 0.0)
            made.extras["experts"] = made.token_ids[:, None].repeat(1, 2)
            return made

    (rollout,) = play(environment(THREE_TURNS), WithMass(scripted().tokenizer), requests(1))
    assert rollout.extras["support_log_mass"].tolist() == [-0.5 * m for m in rollout.loss_mask.tolist()]
    assert rollout.extras["experts"].shape == (len(rollout.token_ids), 2)
    experts = rollout.extras["experts"][rollout.loss_mask]
    assert (experts == rollout.token_ids[rollout.loss_mask][:, None]).all()


def test_a_class_is_made_once_with_its_options_and_closed_on_the_loop(environment, scripted, requests, play):
    source = """
    class MineOptions(Options):
        word: str = "x"

    class mine:
        made, closed = [], []

        def __init__(self, word):
            self.word = word
            self.made.append(word)

        async def __call__(self, episode):
            self.thread = threading.current_thread()
            await episode.sample()
            episode.append(self.word)
            return episode.rollout()

        async def close(self):
            self.closed.append(threading.current_thread() is self.thread)

    SPEC = {"config": MineOptions}
    """
    runner = environment(source, options={"word": "magic"})
    kind = type(runner.play)
    for _ in range(2):
        rollouts = play(runner, scripted(), requests(3))
        assert {r.messages[1]["content"] for r in rollouts} == {"magic"}
    runner.close()
    runner.close()
    assert (kind.made, kind.closed) == (["magic"], [True])


def test_an_episodes_own_draws_follow_its_seed(environment, scripted, requests, play):
    source = """
    import random

    async def mine(episode):
        await episode.sample()
        episode.append(str(random.Random(episode.seed).random()))
        return episode.rollout()
    """
    runner = environment(source)
    first = [r.messages[1] for r in play(runner, scripted(), requests(4))]
    assert first == [r.messages[1] for r in play(runner, scripted(order=5, per_step=1), requests(4))]
    assert [float(m["content"]) for m in first] == [random.Random(1000 + i).random() for i in range(4)]
