"""MCP servers as tools: a real server, by stdio and by HTTP, that answers, fails, hangs, floods and dies."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine_core.config.models import EnvironmentConfig
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_agents import mcp_tools
from engine_plugin_agents.runner import EnvironmentRunner

SERVER = Path(__file__).with_name("mcp_server.py")
STDIO = {"command": [sys.executable, str(SERVER)]}


def servers():
    """Return the servers that this process has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if str(SERVER) in child.cmdline():
                found.append(child.pid)
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
def tools(templated):
    """tools(servers, settings): the runner of the environment ``tools`` with these MCP servers."""
    made = []

    def make(servers, settings=None, **options):
        plugins = PluginSet.load({"environments": {"tools"}}, [])
        settings = {"tool_format": "json", "tool_timeout_seconds": 60, **(settings or {})}
        config = EnvironmentConfig(name="tools", **settings)
        config.options = plugins.spec("environments", "tools").config.model_validate(
            {"mcp": servers, **options}
        )
        made.append(EnvironmentRunner(config, plugins, templated("{{ tools }}CHATML"), 20_000, ("answer",)))
        return made[-1]

    yield make
    for runner in made:
        runner.close()
    assert wait_for(lambda: not servers())


@pytest.fixture
def converse(scripted, requests, play):
    """converse(runner, *calls, episodes=1): the observations of each episode whose turns are these calls, then ``Done``."""

    def run(runner, *calls, episodes=1):
        schemas = runner.spec.tools(runner.config.options)

        def script(request):
            number = int(request.id.rpartition(":")[2])
            if number > len(calls):
                return "Done", "stop"
            name, arguments = calls[number - 1]
            return json.dumps({"name": name, "arguments": arguments}), "stop"

        asked = requests(episodes, group_size=1, max_response_tokens=2000)
        for request in asked:
            request.prompt.columns["tools"] = list(schemas)
        rollouts = play(runner, scripted(script), asked)
        assert [rollout.failure for rollout in rollouts] == [""] * episodes
        seen = [[m["content"] for m in rollout.messages if m["role"] == "tool"] for rollout in rollouts]
        return seen if episodes > 1 else seen[0]

    return run


def test_tools_of_a_command_are_shown_and_called(tools, converse, monkeypatch):
    monkeypatch.setenv("GIVEN", "given")
    monkeypatch.setenv("HIDDEN", "hidden")
    runner = tools({"test": STDIO | {"variables": ["GIVEN"]}})
    [add, *others] = runner.spec.tools(runner.config.options)
    assert add["function"]["name"] == "add"
    assert add["function"]["description"] == "Add two integers."
    assert add["function"]["parameters"]["required"] == ["a", "b"]
    assert len(others) == 6
    calls = [("add", {"a": 40, "b": 2}), ("add", {"a": "x", "b": 2}), ("add", {"a": 1}), ("count", {})]
    seen = converse(runner, *calls, episodes=3)
    assert {tuple(each[:3]) for each in seen} == {
        ("42", "error: add: 'a' must be of type integer, got string", "error: add: missing the argument 'b'")
    }
    assert sorted(each[3] for each in seen) == ["1 given ", "2 given ", "3 given "]  # one server for all
    assert len(servers()) == 1


def test_an_empty_text_is_no_output(tools, converse):
    assert converse(tools({"test": STDIO}), ("empty", {})) == ["[no output]"]


def test_the_function_of_a_tool_has_its_name():
    assert mcp_tools.McpTools("test", None).function("add").__name__ == "add"


def test_an_error_of_a_tool_is_an_observation(tools, converse):
    runner = tools({"test": STDIO})
    seen = converse(
        runner, ("fail", {"text": "no such page"}), ("subtract", {"a": 1}), ("add", {"a": 1, "b": 2})
    )
    assert seen[0].startswith("error: ToolError: ")
    assert "no such page" in seen[0]
    assert seen[1].startswith("error: unknown tool 'subtract'")
    assert seen[2] == "3"
    assert runner.metrics()["environment/tool_errors"] == 2


def test_a_server_that_dies_is_started_again(tools, converse):
    seen = converse(tools({"test": STDIO}), ("count", {}), ("die", {}), ("count", {}), ("count", {}))
    assert seen[0].split() == ["1"]
    assert seen[1] == "error: ToolError: MCP server 'test' has ended; the next call starts it again"
    assert [each.split() for each in seen[2:]] == [["1"], ["2"]]


def test_a_server_that_is_killed_between_calls_is_started_again(tools, converse):
    runner = tools({"test": STDIO})
    assert converse(runner, ("count", {}))[0].split() == ["1"]
    [pid] = servers()
    psutil.Process(pid).kill()
    assert wait_for(lambda: not servers())
    seen = converse(runner, ("count", {}), ("count", {}))
    assert seen[0].split() == ["1"] or "has ended" in seen[0]
    assert seen[1].split() == ["1" if "has ended" in seen[0] else "2"]


def test_a_server_that_hangs_costs_a_call_its_time_and_no_more(tools, converse):
    runner = tools({"test": STDIO}, {"tool_timeout_seconds": 2})
    converse(runner, ("add", {"a": 1, "b": 2}))  # it starts
    seen = converse(runner, ("hang", {}), ("add", {"a": 1, "b": 2}))
    assert seen == ["error: no answer after 2 s", "3"]


def test_a_flood_and_control_characters_are_made_harmless(tools, converse):
    runner = tools({"test": STDIO}, {"max_tool_characters": 100})
    seen = converse(runner, ("flood", {"megabytes": 1}), ("flood", {"megabytes": 50}), ("count", {}))
    assert seen[0].startswith("a?xxx")
    assert "characters are left out" in seen[0]
    assert len(seen[0]) < 200
    assert (
        seen[1]
        == "error: ToolError: MCP server 'test' sent more than 16 MiB at once; the next call starts it again"
    )
    assert seen[2].split() == ["1"]


def test_a_name_that_another_tool_has_is_refused_until_tools_are_chosen(tools, converse):
    with pytest.raises(
        ConfigError, match=r"tools.mcp.two offers a tool 'add', a name that mcp.one has already"
    ):
        tools({"one": STDIO, "two": STDIO})
    runner = tools({"one": STDIO | {"only": ["add"]}, "two": STDIO | {"only": ["count"]}}, tools=["python"])
    seen = converse(
        runner, ("add", {"a": 1, "b": 1}), ("count", {}), ("python", {"code": "3"}), ("fail", {"text": "x"})
    )
    assert [each.strip() for each in seen[:3]] == ["2", "1", "3"]
    assert seen[3].startswith("error: unknown tool 'fail'")
    with pytest.raises(ConfigError, match=r"mcp.one.only: the server has no tool 'ad'. Did you mean 'add'"):
        tools({"one": STDIO | {"only": ["ad"]}})


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (
            {"command": ["no-such-program"]},
            r"mcp.test.command: there is no program 'no-such-program'. Install it",
        ),
        (
            {"command": [sys.executable, "-c", "1 / 0"]},
            r"mcp.test: MCP server 'test' cannot be used: .*ZeroDivisionError",
        ),
        (
            {"command": [sys.executable, "-c", "print('hello')"]},
            r"mcp.test: MCP server 'test' cannot be used",
        ),
        ({"command": [sys.executable, "-c", "input(); input()"]}, r"mcp.test: MCP server 'test' .*"),
        ({"url": "http://127.0.0.1:9/mcp"}, r"mcp.test: MCP server 'test' cannot be used: .*"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_the_start(tools, server, message, monkeypatch):
    monkeypatch.setattr(mcp_tools, "START_SECONDS", 2.0)
    with pytest.raises(ConfigError, match=message):
        tools({"test": server})


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({}, "needs either command or url"),
        (STDIO | {"url": "http://127.0.0.1:9"}, "needs either command or url"),
        ({"url": "127.0.0.1:9"}, "must begin with http:// or https://"),
    ],
)
def test_tables_that_cannot_be_are_refused(tools, server, message):
    with pytest.raises(ValueError, match=message):
        tools({"test": server})


@pytest.fixture
def http():
    """An HTTP server: its process and its URL."""
    made = []

    def start(port=0):
        with socket.create_server(("127.0.0.1", port)) as free:
            port = free.getsockname()[1]
        process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
        made.append(process)

        def answers():
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        assert wait_for(answers)
        return process, port

    yield start
    for process in made:
        process.kill()
        process.wait()


def test_tools_of_a_server_by_http_survive_its_restart(tools, converse, http):
    process, port = http()
    runner = tools({"test": {"url": f"http://127.0.0.1:{port}/mcp"}})
    seen = converse(runner, ("add", {"a": 40, "b": 2}), ("fail", {"text": "no"}), ("count", {}))
    assert seen[0] == "42"
    assert "no" in seen[1]
    process.kill()
    process.wait()
    [lost] = converse(runner, ("count", {}))
    assert lost.startswith("error: ")
    http(port)
    seen = converse(runner, ("count", {}), ("count", {}))
    assert seen[-1].split()[0] in ("1", "2")


def test_a_server_by_http_that_restarted_between_two_calls_is_connected_again(tools, converse, http):
    process, port = http()
    runner = tools({"test": {"url": f"http://127.0.0.1:{port}/mcp"}})
    assert converse(runner, ("count", {}))[0].split() == ["1"]
    process.kill()
    process.wait()
    http(port)
    seen = converse(runner, *[("count", {})] * 3)  # the first may find that its session has ended
    assert seen[-1].split()[0] in ("2", "3")


RUN = """
import asyncio, sys
from engine_plugin_agents.mcp_tools import McpTools
from engine_plugin_agents.tool_options import McpServer

async def main():
    tools = McpTools("test", McpServer(command=[sys.executable, "-c", "import time; time.sleep(600)"]))
    asyncio.ensure_future(tools.schemas())
    await asyncio.sleep(1)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_server_ends_with_a_run_that_is_killed():
    """Also a server that does not notice the end of its stdin."""
    run = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "started\n"
    [server] = psutil.Process(run.pid).children(recursive=True)
    assert wait_for(lambda: len(words := server.cmdline()) == 3 and "time.sleep(600)" in words[-1])
    os.kill(run.pid, 9)
    run.communicate()
    assert wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
