"""Whatever fails in an episode, hangs or never ends: what is left of it, and that the others and the run go on."""

import os
import signal
import threading
import time

import pytest

from engine_core.config.models import EnvironmentConfig
from engine_core.errors import TrainingFailed
from engine_core.plugins.plugin_set import PluginSet
from engine_core.train.stopping import Stop, StopSignals

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
    with pytest.raises(TrainingFailed, match=r"in 8 of 8 episodes.*max_failure_share = 0.25.*all of them"):
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
    assert runner.metrics()["environment/truncated"] == 2


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


def test_the_file_may_allow_less_than_the_model_and_not_more(environment, tmp_path):
    runner = environment(LIMITS, max_tokens=50)
    assert runner.limits.tokens == 50
    plugins = PluginSet.load({"environments": {"mine"}}, ["environment_0.py"], tmp_path)
    for given, expected in ((30, 30), (300, 50), (None, 50)):
        config = EnvironmentConfig(name="mine", max_tokens=given)
        assert type(runner)(config, plugins, runner.tokenizer, 50, ()).limits.tokens == expected


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

    source = """
    async def mine(episode):
        await episode.sample()
        await episode.sample()
        return episode.rollout()
    """
    runner, engine = environment(source), scripted(broken)
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
