"""The plugin's registration: multi-turn episodes, the environment ``endpoint``, forms of tool calls, and commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from engine_core.hooks import hookimpl
from engine_core.specs import Command, Environment, Options, Part
from engine_plugin_agents.tables import ToolFormat

FORMATS = ("hermes", "qwen3_coder", "glm", "deepseek_v3", "gpt_oss", "mistral", "llama3", "json")
"""The tool formats, functions of ``formats``, in the order in which ``auto`` tries them."""


class EndpointOptions(Options):
    """``[environment.endpoint]``: a command runs each episode through an endpoint of the OpenAI API."""

    command: Annotated[list[str], Field(min_length=1)]
    """Program and arguments, started in an empty folder. ``{NAME}`` becomes the row's column, ``{prompt}`` its prompt. An argument that names a file in the run file's folder becomes its absolute path. The process finds the endpoint in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, and the row as JSON in ``EPISODE_ROW``."""
    reward: Literal["none", "stdout"] = "none"
    """``stdout``: the last line that the command prints is the reward ``harness``, a number. ``none``: only `[[reward]]` judges."""

    @field_validator("command")
    @classmethod
    def _absolute_files(cls, command: list[str], info: ValidationInfo) -> list[str]:
        folder = Path(
            (info.context or {}).get("folder") or "."
        ).absolute()  # links are kept: that of a venv matters
        return [str(folder / part) if (folder / part).is_file() else part for part in command]


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
    """Return the environment ``endpoint``."""
    load = "engine_plugin_agents.policy_endpoint:CommandEnvironment"
    return {"endpoint": Environment(load=load, config=EndpointOptions, rewards=frozenset({"harness"}))}
