"""Harnesses that are commands: what a process receives and gives, and what of one that fails, floods or stays."""

import asyncio
import json
import os
import sys
import time

import pytest

from engine_core.config.models import EnvironmentConfig
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_agents import commands
from engine_plugin_agents.runner import EnvironmentRunner

ASK = """
import json, os, sys, time, subprocess
from openai import OpenAI

client = OpenAI()
row = json.loads(os.environ["EPISODE_ROW"])
messages = [{"role": "user", "content": sys.argv[1]}]
answer = client.chat.completions.create(model="", messages=messages).choices[0].message.content
"""


@pytest.fixture
def command(tmp_path, tokenizer):
    """command(source, *arguments, reward="none", **settings): a runner whose command is a Python program."""
    made = []

    def make(source, *arguments, reward="none", program=sys.executable, **settings):
        (tmp_path / "agent.py").write_text(ASK + source)
        plugins = PluginSet.load({"environments": {"endpoint"}}, [], tmp_path)
        config = EnvironmentConfig(name="endpoint", **settings)
        options = plugins.spec("environments", "endpoint").config
        given = {"command": [program, "agent.py", *arguments], "reward": reward}
        config.options = options.model_validate(given, context={"folder": tmp_path})
        made.append(EnvironmentRunner(config, plugins, tokenizer, 500, ("number", "answer")))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "seen").mkdir()
    return tmp_path / "seen"


def test_a_command_gets_its_row_and_the_endpoint_and_its_last_line_is_the_reward(
    command, scripted, requests, play, tokenizer, folder
):
    source = f"""
seen = {{"row": row, "files": os.listdir(), "base": os.environ["ANTHROPIC_BASE_URL"], "arguments": sys.argv[1:]}}
open("{folder}/" + str(row["number"]), "w").write(json.dumps(seen))
print("working\\n", 1 + row["number"] / 4)
"""
    runner = command(source, "{prompt}: {number}, {else}", reward="stdout", on_error="fail")
    rollouts = play(runner, scripted(), requests(2, group_size=1))
    assert [r.rewards for r in rollouts] == [{"harness": 1.0}, {"harness": 1.25}]
    assert tokenizer.decode(rollouts[1].prompt.token_ids).startswith(
        "<|im_start|>user\nQ1: 1, {else}<|im_end|>"
    )
    seen = json.loads((folder / "1").read_text())
    assert seen["row"] == {"prompt": "Q1", "number": 1, "answer": "1"}
    assert (seen["files"], seen["arguments"]) == ([], ["Q1: 1, {else}"])
    assert seen["base"].startswith("http://127.0.0.1:")
    assert not seen["base"].endswith("/v1")


def test_a_command_without_a_reward_leaves_it_to_others(command, scripted, requests, play):
    [rollout] = play(command("print(1.0)", "Hi"), scripted(), requests(1))
    assert (rollout.failure, rollout.rewards) == ("", {})
    assert rollout.loss_mask.any()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sys.exit('no disk')", "ended with the exit status 1: no disk"),
        ("print('good')", "must be a number, the reward; got 'good'"),
        ("print('nan')", "must be a number, the reward; got 'nan'"),
        ("os.kill(os.getpid(), 9)", "ended with the exit status -9"),
    ],
)
def test_a_command_that_fails_is_an_error_of_its_episode(
    command, scripted, requests, play, caplog, source, message
):
    runner = command(source, "Hi", reward="stdout", max_failure_share=1)
    [rollout] = play(runner, scripted(), requests(1))
    assert (rollout.failure, rollout.valid) == ("error", False)
    assert rollout.loss_mask.any()
    assert message in caplog.text


def test_a_flood_of_output_is_not_kept(command, scripted, requests, play):
    source = "for _ in range(400): print('x' * 100_000); print('e' * 1000, file=sys.stderr)\nprint(0.5)"
    [rollout] = play(command(source, "Hi", reward="stdout"), scripted(), requests(1))
    assert rollout.rewards == {"harness": 0.5}


def test_only_the_end_of_an_output_is_kept():
    async def fed():
        tail = commands._Tail()
        for _ in range(100):
            tail.data_received(b"x" * 10_000)
        tail.data_received(b"end\n")
        return tail.text

    text = asyncio.run(fed())
    assert text.endswith("xend")
    assert len(text) == commands.TAIL_BYTES - 1


@pytest.mark.parametrize(
    ("given", "set_to"),
    [(None, "127.0.0.1"), ("a.org,b.org", "a.org,b.org,127.0.0.1"), ("*", "*"), ("127.0.0.1", "127.0.0.1")],
)
def test_a_command_asks_the_endpoint_without_the_proxy_of_the_environment(
    command, scripted, requests, play, folder, monkeypatch, given, set_to
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    if given:
        monkeypatch.setenv("NO_PROXY", given)
    source = f"""
open("{folder}/seen", "w").write(os.environ["no_proxy"] + " " + os.environ["NO_PROXY"])
"""
    [rollout] = play(command(source, "Hi"), scripted(), requests(1))
    assert rollout.failure == ""
    assert (folder / "seen").read_text() == f"{set_to} {set_to}"


@pytest.mark.parametrize(
    ("text", "failure"), [("\u554f" * 40_000, ""), ("\ud800", ""), ("\u554f" * 44_000, "error")]
)
def test_a_command_gets_a_row_of_at_most_128_kib(
    command, scripted, requests, play, folder, caplog, text, failure
):
    source = f"""
open("{folder}/row", "w").write(json.dumps(row))
"""
    [request] = requests(1, group_size=1)
    request.prompt.columns["answer"] = text
    [rollout] = play(command(source, "Hi", max_failure_share=1), scripted(), [request])
    assert rollout.failure == failure
    if failure:
        said = "its row is too long. A variable and an argument have at most 131071 bytes each; EPISODE_ROW has 132"
        assert said in caplog.text
    else:
        assert json.loads((folder / "row").read_text())["answer"] == text


@pytest.mark.parametrize("word", ["go", "hang", "hang with a session"])
def test_children_of_a_command_end_with_it(command, scripted, requests, play, folder, word):
    source = f"""
child = subprocess.Popen(["sleep", "60"], start_new_session="session" in sys.argv[1])
open("{folder}/child", "w").write(str(child.pid))
if sys.argv[1] != "go":
    time.sleep(60)
"""
    runner = command(source, word, timeout_seconds=20 if word == "go" else 4, max_failure_share=1)
    start = time.monotonic()
    [rollout] = play(runner, scripted(), requests(1))
    assert rollout.failure == ("" if word == "go" else "timeout")
    assert time.monotonic() - start < 18
    child = int((folder / "child").read_text())
    while os.path.exists(f"/proc/{child}") and "Z" not in state(child):
        assert time.monotonic() - start < 30
        time.sleep(0.05)


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_an_absent_program_is_refused_before_the_run(command):
    with pytest.raises(
        ConfigError, match=r"environment.endpoint.command: there is no program 'no-agent'. Install it"
    ):
        command("", program="no-agent")
