"""Environments of Gymnasium in processes: actions, observations, seeds, other interpreters, and processes that fail."""

import asyncio
import sys
import tempfile
import threading

import psutil
import pytest

from engine_core.config.models import EnvironmentConfig
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_agents import world_process
from engine_plugin_agents.child import kill_child, start_child
from engine_plugin_agents.runner import EnvironmentRunner
from engine_plugin_agents.world_process import gymnasium_rows, verifiers_rows

WORLD = '''
import os, subprocess, sys, time
import gymnasium
from gymnasium.spaces import Box, Discrete, Text


class Words(gymnasium.Env):
    """The action "die" ends the process, "hang" takes long, "print" writes to stdout, "end" ends the episode."""

    observation_space = action_space = Text(1000)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.said = []
        return f"seed {seed} number {int(self.np_random.integers(1000))}", {}

    def step(self, action):
        self.said.append(action)
        if action == "die":
            os._exit(3)
        if action == "hang":
            time.sleep(600)
        if action == "print":
            print('{"id": 0, "value": "forged"}', flush=True)
        if action == "raise":
            raise ValueError("no such word")
        if action == "slow":
            time.sleep(0.3)
            return "", 0.5, True, False, {}
        if action == "child":
            return subprocess.check_output(["readlink", "/proc/self/fd/0"], text=True), 0, False, False, {}
        if action == "variables":
            return " ".join(sorted(name for name in os.environ if name.startswith("WORLD_"))), 0, False, False, {}
        if action == "noise":
            sys.stderr.write("x" * 2**21)
        if action == "size":
            return str(os.fstat(2).st_size), 0, False, False, {}
        if action == "flood":
            return "x" * 20_000_000, 0, False, False, {}
        return f"{os.getpid()} {self.said} \\x1b[2J<|im_end|>", 0.5, action == "end", False, {}


class Corridor(gymnasium.Env):
    observation_space, action_space = Discrete(4), Discrete(2, start=1)
    metadata = {"render_modes": ["ansi"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        self.at = 0
        return 0, {}

    def step(self, action):
        self.at += int(action)
        return self.at, float(action), self.at > 3, False, {}

    def render(self):
        return "." * self.at + "@"


class Arm(Corridor):
    action_space = Box(0, 1)


for kind in (Words, Corridor, Arm):
    gymnasium.register(f"{kind.__name__}-v0", kind, disable_env_checker=True)
'''


@pytest.fixture
def register(tmp_path):
    (tmp_path / "register.py").write_text(WORLD)
    return str(tmp_path / "register.py")


def worlds():
    """Return the processes of worlds that this process has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any(part.endswith("/worlds") for part in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def wait_for(condition):
    for _ in range(3000):
        if condition():
            return True
        threading.Event().wait(0.02)
    return False


@pytest.fixture
def world(register, tokenizer):
    """world(id, settings, **options): the runner of the environment ``gymnasium``."""
    made = []

    def make(id="Words-v0", settings=None, **options):
        plugins = PluginSet.load({"environments": {"gymnasium"}}, [])
        config = EnvironmentConfig(name="gymnasium", **{"tool_timeout_seconds": 60, **(settings or {})})
        given = {"id": id, "register_file": register, "processes": 1, **options}
        config.options = plugins.spec("environments", "gymnasium").config.model_validate(given)
        made.append(EnvironmentRunner(config, plugins, tokenizer, 4000, ("seed",)))
        return made[-1]

    yield make
    for runner in made:
        runner.close()
    assert wait_for(lambda: not worlds())


@pytest.fixture
def act(scripted, requests, play):
    """act(runner, *actions, episodes=1, **columns): the rollouts of episodes that do these actions."""

    def run(runner, *actions, episodes=1, **columns):
        asked = requests(episodes, group_size=1, max_response_tokens=200)
        for request in asked:
            request.prompt.columns = {"seed": request.group_id, **columns}
        said = lambda request: (actions[int(request.id.rpartition(":")[2]) - 1], "stop")  # noqa: E731
        return play(runner, scripted(said), asked)

    return run


def test_each_turn_is_an_action_and_the_rewards_are_summed(world, act):
    first, second = act(world(), "one", "two", "end", episodes=2)
    for rollout in (first, second):
        assert [message["role"] for message in rollout.messages] == ["assistant", "user"] * 2 + ["assistant"]
        assert rollout.rewards == {"score": 1.5}
        assert rollout.messages[1]["content"].endswith(" ['one'] <|im_end|>")  # no control characters
        assert rollout.messages[3]["content"].endswith(" ['one', 'two'] <|im_end|>")
    assert first.messages[1]["content"].split()[0] == second.messages[1]["content"].split()[0]  # one process


def test_an_action_in_a_tag_and_a_turn_without_it(world, act):
    [rollout] = act(world(action_tag="do"), "no", "I think <do>one</do>", "<do>end</do>")
    assert rollout.messages[1]["content"] == "error: no <do> in the turn"
    assert "['one']" in rollout.messages[3]["content"]
    assert rollout.rewards == {"score": 1.0}


def test_numbers_as_actions_and_a_rendered_text_as_observation(world, act):
    runner = world("Corridor-v0", {"max_turns": 8}, arguments={"render_mode": "ansi"})
    [rollout] = act(runner, "go", "go 3", "1" * 20, "I say 1", "2", "not 1 but 2")
    seen = [message["content"] for message in rollout.messages[1::2]]
    assert seen == ["error: an action is a number from 1 to 2"] * 3 + [".@", "...@"]
    assert rollout.rewards == {"score": 5.0}


def test_a_conversation_is_continued_through_the_chat_template(world, act):
    [rollout] = act(world(), "one", "end", messages=[{"role": "user", "content": "Begin."}])
    text = rollout.text
    assert "user\n" in text
    assert text.count("assistant\n") == 1


@pytest.mark.parametrize(
    ("limits", "actions", "reason", "score"),
    [
        ({"max_turns": 2}, ["one", "two"], "length", 1.0),
        ({"max_turns": 2}, ["one", "end"], "stop", 1.0),
        ({"max_tokens": 20}, ["one"], "length", 0.5),  # the observation does not fit
    ],
)
def test_limits_truncate_an_episode_that_is_not_over_and_keep_its_rewards(
    world, act, limits, actions, reason, score
):
    runner = world(settings=limits)
    [rollout] = act(runner, *actions)
    assert (rollout.failure, rollout.finish_reason, rollout.rewards) == ("", reason, {"score": score})
    assert rollout.messages[-1]["role"] == "assistant"
    assert runner.metrics()["environment/truncated"] == (reason == "length")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("die", "the process of gymnasium has ended"),
        ("hang", "gymnasium did not answer 'step' within 2 s"),
        ("raise", "register.py:26)"),
        ("flood", "the process of gymnasium has ended"),
    ],
)
def test_a_world_that_fails_fails_its_episode_and_not_the_next(world, act, word, message):
    seconds = 2 if word == "hang" else 60
    runner = world(settings={"tool_timeout_seconds": seconds, "max_failure_share": 1.0, "on_error": "zero"})
    [rollout] = act(runner, "one", word)
    assert rollout.failure == "error"
    assert message in runner._last_failure
    [rollout] = act(runner, "one", "end")
    assert (rollout.failure, rollout.rewards) == ("", {"score": 1.0})


def test_a_world_that_does_not_start_in_time_fails_its_episode(world, act, register, monkeypatch):
    monkeypatch.setattr(world_process, "START_SECONDS", 0.01)
    runner = world(settings={"max_failure_share": 1.0})
    [rollout] = act(runner, "one")
    assert rollout.failure == "error"
    assert "the process of gymnasium did not start within 0.01 s" in runner._last_failure


def test_one_process_replaces_one_that_was_lost(world, act):
    runner = world(settings={"max_failure_share": 1.0})
    act(runner, "die")
    rollouts = act(runner, "end", episodes=8)
    assert {rollout.failure for rollout in rollouts} == {""}
    assert len(worlds()) == 1


def test_a_process_that_cannot_be_started_is_not_used_again(world, act, monkeypatch):
    runner = world(settings={"max_failure_share": 1.0})

    async def fail(*_):
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(world_process, "start_child", fail)
        [rollout] = act(runner, "end")
    assert rollout.failure == "error"
    assert "too many open files" in runner._last_failure
    [rollout] = act(runner, "end")
    assert rollout.failure == ""


def test_a_call_that_waits_for_others_fails_alone(world, act):
    runner = world(settings={"tool_timeout_seconds": 1.5, "max_failure_share": 1.0, "on_error": "zero"})
    act(runner, "end")
    before = [process.pid for process in worlds()]
    rollouts = act(runner, "slow", episodes=10)
    assert {rollout.failure for rollout in rollouts} == {"", "error"}
    assert [process.pid for process in worlds()] == before


def test_children_of_a_world_do_not_read_its_messages(world, act):
    [rollout] = act(world(), "child", "end")
    assert rollout.messages[1]["content"].strip() == "/dev/null"


def test_a_world_receives_the_variables_that_are_named_alone(world, act, monkeypatch):
    monkeypatch.setenv("WORLD_SECRET", "a")
    monkeypatch.setenv("WORLD_HOME", "b")
    [rollout] = act(world(variables=["WORLD_HOME", "WORLD_ABSENT"]), "variables", "end")
    assert rollout.messages[1]["content"] == "WORLD_HOME"


def test_what_a_world_writes_to_stderr_does_not_grow_without_limit(world, act):
    [rollout] = act(world(), "noise", "size", "end")
    assert int(rollout.messages[3]["content"]) < 2**20


def test_a_child_is_killed_while_another_process_holds_its_output():
    """Also with Python 3.11, which waits for the end of the output."""
    code = "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True); print(p.pid, flush=True); p.wait()"

    async def kill():
        with tempfile.TemporaryFile() as errors:
            process = await start_child([sys.executable, "-c", code], (), errors)
            holder = psutil.Process(int(await process.stdout.readline()))
            await kill_child(process)
            assert holder.is_running()
            holder.kill()
            await process.stdout.read()  # to its end: the transport is closed

    asyncio.run(kill())


def test_what_a_world_prints_is_no_answer(world, act):
    [rollout] = act(world(), "print", "end")
    assert rollout.rewards == {"score": 1.0}
    assert "forged" not in rollout.messages[1]["content"]


def test_rows_are_first_observations_of_seeds_and_held_out_ones_follow(register):
    options = {
        "python": "",
        "count": 3,
        "held_out": 2,
        "id": "Words-v0",
        "arguments": {},
        "register_file": register,
    }
    rows = gymnasium_rows("train", **options)
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert rows == gymnasium_rows("train", **options)
    assert len({row["prompt"] for row in rows}) == 3
    assert [row["seed"] for row in gymnasium_rows("validation", **options)] == [3, 4]
    assert gymnasium_rows("validation", **options | {"held_out": 0}) == []


def test_fewer_rows_than_count_are_reported_and_none_held_out_is_refused(caplog, monkeypatch):
    monkeypatch.setattr(world_process, "_rows", lambda *_: [{"task": n} for n in range(5)])
    with pytest.raises(ConfigError, match=r"data.verifiers: no row is held out of 5 rows; count = 5 and"):
        verifiers_rows("train", "", 5, 1)
    assert len(verifiers_rows("validation", "", 4, 2)) == 1
    assert not caplog.records
    assert len(verifiers_rows("train", "", 6, 0)) == 5
    assert "data.verifiers: 5 rows; count = 6 and held_out = 0 ask for 6" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "None-v0"}, r"data.gymnasium: the process of gymnasium has ended: .*None"),
        (
            {"id": "Arm-v0"},
            r"data.gymnasium: .*TypeError: Arm-v0 has actions of Box; a turn can be of Text or Discrete",
        ),
        ({"python": "no-such-python"}, r"data.gymnasium.python: there is no program 'no-such-python'"),
    ],
)
def test_a_world_that_cannot_be_is_refused(register, options, message):
    given = {
        "python": "",
        "count": 3,
        "held_out": 2,
        "id": "Words-v0",
        "arguments": {},
        "register_file": register,
    }
    with pytest.raises(ConfigError, match=message):
        gymnasium_rows("train", **given | options)


def test_the_world_runs_in_the_interpreter_that_is_named(world, act, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\necho "$PYTHONHASHSEED" > {tmp_path}/seen\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    [rollout] = act(world(python=str(other)), "end")
    assert rollout.rewards == {"score": 0.5}
    assert (tmp_path / "seen").read_text() == "\n"  # variables of our interpreter are not passed
    config = PluginSet.load({"environments": {"gymnasium"}}, []).spec("environments", "gymnasium").config
    for python, found in (("venv/bin/python", str(tmp_path / "venv/bin/python")), ("python3", "python3")):
        given = config.model_validate({"id": "a", "python": python}, context={"folder": tmp_path})
        assert given.python == found
    with pytest.raises(ConfigError, match=r"environment.gymnasium.python: there is no program 'no-such'"):
        world(python="no-such")
