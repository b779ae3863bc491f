"""The environment ``verifiers`` with the real library, in the interpreter that has it: tasks, rewards, failures."""

import sys
from pathlib import Path

import pytest

from engine_core.config.models import EnvironmentConfig
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_agents.runner import EnvironmentRunner
from engine_plugin_agents.world_process import verifiers_rows

PYTHON = Path(sys.prefix) / "verifiers" / "bin" / "python"  # `make install` makes it
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is missing")]

TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI


class Words(vf.Task):
    @vf.reward(weight=2.0)
    async def good(self, trace) -> float:
        return float(trace.nodes[-1].message.content == self.data.prompt.split()[-1])


class Tasks(vf.Taskset[Words]):
    def load(self):
        for word in ("a", "b", "raise", "die"):
            yield Words(vf.TaskData(prompt=f"Say {word}"), self.config.task)


class Once(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        import os

        if data.prompt.endswith("raise"):
            raise RuntimeError("no such word")
        if data.prompt.endswith("die"):
            os._exit(3)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Tasks", "Once"]
"""


@pytest.fixture
def world(tmp_path):
    (tmp_path / "word_tasks.py").write_text(TASKSET)
    return {"python": str(PYTHON), "taskset": "word-tasks", "folder": str(tmp_path), "settings": {}}


def test_tasks_are_rows_and_a_failed_episode_is_one(world, tokenizer, scripted, requests, play):
    rows = verifiers_rows("train", count=3, held_out=4, **world)
    assert rows == [{"prompt": f"Say {word}", "task": i} for i, word in enumerate(("a", "b", "raise"))]
    assert verifiers_rows("validation", count=3, held_out=4, **world) == [{"prompt": "Say die", "task": 3}]
    plugins = PluginSet.load({"environments": {"verifiers"}}, [])
    config = EnvironmentConfig(name="verifiers", max_failure_share=1.0)
    config.options = plugins.spec("environments", "verifiers").config.model_validate(world | {"processes": 1})
    runner = EnvironmentRunner(config, plugins, tokenizer, 2000, ("task",))
    try:
        asked = requests(3, group_size=1, max_response_tokens=20)
        for number, request in enumerate(asked):
            request.prompt.columns = {"task": number}
        first, second, third = play(runner, scripted(lambda request: ("a", "stop")), asked)
        assert (first.failure, first.rewards) == ("", {"score": 2.0})
        assert (second.failure, second.rewards) == ("", {"score": 0.0})
        assert third.failure == "error"
        assert "no such word" in runner._last_failure
        for task, failure in ((3, "error"), (0, "")):  # its process dies, and another one starts
            [request] = requests(1, group_size=1, max_response_tokens=20)
            request.prompt.columns = {"task": task}
            [rollout] = play(runner, scripted(lambda request: ("a", "stop")), [request])
            assert rollout.failure == failure
    finally:
        runner.close()


def test_a_taskset_that_is_not_found_is_refused(world):
    with pytest.raises(ConfigError, match=r"data.verifiers: the process of verifiers has ended: .*no_such"):
        verifiers_rows("train", count=3, held_out=4, **world | {"taskset": "no-such"})
