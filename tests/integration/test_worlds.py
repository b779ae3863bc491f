"""Environments of other libraries in whole short GRPO runs of a random model, with their own tasks as data."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine_core.errors import ConfigError
from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_agents.world_process import openenv_rows

DIGITS = '''
"""A text environment of Gymnasium: each action earns the share of its characters that are digits, twice."""

import gymnasium
from gymnasium.spaces import Text


class Digits(gymnasium.Env):
    observation_space, action_space = Text(1000), Text(1000)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 2
        return f"Digits like {int(self.np_random.integers(100))}? ", {}

    def step(self, action):
        self.left -= 1
        reward = sum(map(str.isdigit, action)) / max(len(action), 1)
        return " More? ", reward, self.left == 0, False, {}


gymnasium.register("Digits-v0", Digits, disable_env_checker=True)
'''


TASKSET = '''
"""A taskset of verifiers whose reward is the share of digits, and a harness that asks twice in this process."""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class DigitsTask(vf.Task):
    @vf.reward
    async def digits(self, trace) -> float:
        texts = [node.message.content or "" for node in trace.nodes if node.message.role == "assistant"]
        text = "".join(texts)
        return sum(map(str.isdigit, text)) / max(len(text), 1)


class Digits(vf.Taskset[DigitsTask]):
    def load(self):
        for number in range(20):
            yield DigitsTask(vf.TaskData(prompt=f"Digits like {number}?"), self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = reply.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Digits", "TwoTurns"]
'''


SERVER = '''
"""A server of OpenEnv: each action earns the share of its characters that are digits, twice."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import create_fastapi_app


class Message(Action):
    message: str
    style: str


class Question(Observation):
    text: str


class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.left = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.left = 2
        return Question(text=f"Digits like {seed}? ")

    def step(self, action, timeout_s=None, **kwargs):
        self.left -= 1
        if action.style != "plain" or "raise" in action.message:
            raise ValueError("no such style")
        text = action.message
        return Question(text=" More? ", reward=sum(map(str.isdigit, text)) / max(len(text), 1), done=self.left == 0)

    @property
    def state(self):
        return State(step_count=self.left)


app = create_fastapi_app(Digits, Message, Question, max_concurrent_envs=256)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
'''


def interpreter(name):
    """Return the interpreter of ``.venv/NAME``, which ``make install`` makes: its packages conflict with ours."""
    python = Path(sys.prefix) / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is missing")
    return str(python)


@pytest.fixture
def openenv(tmp_path):
    """The interpreter of OpenEnv and the address of a server that it runs."""
    python = interpreter("openenv")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(tmp_path / "server.py"), str(port)])

    def answers():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    while process.poll() is None and not answers():
        time.sleep(0.1)
    yield python, f"http://127.0.0.1:{port}", process
    process.kill()
    process.wait()


@pytest.fixture
def chat_model(world, tmp_path):
    """The model with a chat template."""
    folder = shutil.copytree(world / "model", tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def learn(grpo, trained):
    """learn(settings): the metrics of each step, and the rollouts of the last."""

    def run(settings):
        common = {"reward": [], "actor.optim.lr": 2e-2, "run.steps": 20}
        common |= {"rollout.group_size": 16, "tracking.rollouts_every_steps": 20}
        drop = ("data.train", "data.validation")
        kept = {key: value for key, value in grpo.items() if key not in drop}
        folder = trained({**kept, **common, **settings})
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = max((folder / "rollouts").glob("*.parquet"))
        return lines, read_rollouts(last)

    return run


def check_learned(lines, rollouts):
    """Check the metrics and the last rollouts of a run in an environment that earns digits."""
    scores = [line["reward/score"] for line in lines]
    assert sum(scores[-3:]) > 10 * sum(scores[:3])
    assert all(line["environment/errors"] == 0 for line in lines)
    for rollout in rollouts:
        assert rollout.prompt.text.startswith("Digits like ")
        assert [message["role"] for message in rollout.messages] == ["assistant", "user", "assistant"]
        assert rollout.reward == pytest.approx(rollout.rewards["score"])


def test_a_model_learns_in_an_environment_of_gymnasium_from_its_own_tasks(learn, tmp_path):
    (tmp_path / "digits_world.py").write_text(DIGITS)
    world = {"id": "Digits-v0", "register_file": str(tmp_path / "digits_world.py")}
    lines, rollouts = learn(
        {
            "environment": {"name": "gymnasium", "gymnasium": world},
            "data.source": "gymnasium",
            "data.gymnasium": world | {"count": 16, "held_out": 4},
        }
    )
    check_learned(lines, rollouts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_learns_in_an_environment_of_openenv_from_its_own_tasks(learn, openenv):
    python, url, server = openenv
    world = {"python": python, "url": url, "observation": "text", "arguments": {"style": "plain"}}
    lines, rollouts = learn(
        {
            "environment": {"name": "openenv", "openenv": world | {"processes": 1}},
            "data.source": "openenv",
            "data.openenv": world | {"count": 16, "held_out": 4},
        }
    )
    check_learned(lines, rollouts)
    server.kill()
    server.wait()
    options = {"action": "message", "count": 1, "held_out": 1, **world}
    with pytest.raises(ConfigError, match=r"data.openenv: ConnectionError: Failed to connect"):
        openenv_rows("train", **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_learns_from_the_tasks_and_rewards_of_verifiers(learn, tmp_path, chat_model):
    (tmp_path / "digits_taskset.py").write_text(TASKSET)
    world = {
        "python": interpreter("verifiers"),
        "taskset": "digits-taskset",
        "folder": str(tmp_path),
    }
    lines, rollouts = learn(
        {
            "model.path": chat_model,
            "environment": {"name": "verifiers", "verifiers": world | {"processes": 1}},
            "data.source": "verifiers",
            "data.verifiers": world | {"count": 16, "held_out": 4},
            "data.chat_template": True,
        }
    )
    scores = [line["reward/score"] for line in lines]
    assert sum(scores[-3:]) > 3 * sum(scores[:3])
    assert all(line["environment/errors"] == 0 for line in lines)
    assert all(line["environment/reencoded_tokens"] == 0 for line in lines)
    for rollout in rollouts:
        assert [message["role"] for message in rollout.messages] == ["assistant", "user", "assistant"]
        text = "".join(message["content"] for message in rollout.messages[::2])
        assert rollout.reward == pytest.approx(sum(map(str.isdigit, text)) / max(len(text), 1), abs=0.05)
