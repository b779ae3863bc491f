"""The plugin's registration: multi-turn episodes, environments, their tasks as data, forms of tool calls, commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from engine_core.hooks import hookimpl
from engine_core.specs import Command, DataSource, Environment, Options, Part
from engine_plugin_agents.tables import ToolFormat
from engine_plugin_agents.tool_options import Arguments, ToolsOptions
from engine_plugin_agents.world_options import (
    GymnasiumOptions,
    GymnasiumRows,
    OpenEnvOptions,
    OpenEnvRows,
    VerifiersOptions,
    VerifiersRows,
)

FORMATS = ("hermes", "qwen3_coder", "glm", "deepseek_v3", "gpt_oss", "mistral", "llama3", "json")
"""The tool formats, functions of ``formats``, in the order in which ``auto`` tries them."""


class EndpointOptions(Options):
    """``[environment.endpoint]``: a command runs each episode through an endpoint of the OpenAI API."""

    command: Annotated[Arguments, Field(min_length=1)]
    """Program and arguments, started in an empty folder. ``{NAME}`` becomes the row's column, ``{prompt}`` its prompt. An argument that names a file in the run file's folder becomes its absolute path. The process finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, and the row as JSON in ``EPISODE_ROW``."""
    reward: Literal["none", "stdout"] = "none"
    """``stdout``: the last line that the command prints is the reward ``harness``, a number. ``none``: only `[[reward]]` judges."""


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Return the part ``episodes``."""
    return {"episodes": Part(load="engine_plugin_agents.runner:EnvironmentRunner")}


@hookimpl
def engine_commands() -> Mapping[str, Command]:
    """Return ``serve`` and ``chat``."""
    return {name: Command(load=f"engine_plugin_agents.serve_command:{name}") for name in ("serve", "chat")}


@hookimpl
def engine_tool_formats() -> Mapping[str, ToolFormat]:
    """Return the tool formats of this plugin."""
    return {name: ToolFormat(load=f"engine_plugin_agents.formats:{name}") for name in FORMATS}


@hookimpl
def engine_environments() -> Mapping[str, Environment]:
    """Return the environments of this plugin."""
    load = "engine_plugin_agents.policy_endpoint:CommandEnvironment"
    return {
        "endpoint": Environment(load=load, config=EndpointOptions, rewards=frozenset({"harness"})),
        "tools": Environment(
            load="engine_plugin_agents.tool_environment:ToolEnvironment", config=ToolsOptions, tools=_schemas
        ),
        "gymnasium": Environment(
            load="engine_plugin_agents.step_worlds:GymnasiumEnvironment",
            config=GymnasiumOptions,
            rewards=frozenset({"score"}),
            needs=frozenset({"seed"}),
        ),
        "openenv": Environment(
            load="engine_plugin_agents.step_worlds:OpenEnvEnvironment",
            config=OpenEnvOptions,
            rewards=frozenset({"score"}),
            needs=frozenset({"seed"}),
        ),
        "verifiers": Environment(
            load="engine_plugin_agents.verifiers_environment:VerifiersEnvironment",
            config=VerifiersOptions,
            rewards=frozenset({"score"}),
            needs=frozenset({"task"}),
        ),
    }


@hookimpl
def engine_data_sources() -> Mapping[str, DataSource]:
    """Return the data sources that worlds give."""
    load, license = "engine_plugin_agents.world_process", "that of the environment"
    return {
        "gymnasium": DataSource(load=f"{load}:gymnasium_rows", config=GymnasiumRows, license=license),
        "openenv": DataSource(load=f"{load}:openenv_rows", config=OpenEnvRows, license=license),
        "verifiers": DataSource(load=f"{load}:verifiers_rows", config=VerifiersRows, license=license),
    }


def _schemas(options: ToolsOptions) -> tuple[Mapping[str, Any], ...]:
    from engine_plugin_agents.tool_environment import tool_schemas

    return tool_schemas(options)
