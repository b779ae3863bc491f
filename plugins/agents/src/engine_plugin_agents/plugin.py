"""The plugin's registration: multi-turn episodes, for ``[environment]``, and the forms of tool calls."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Part
from engine_plugin_agents.tables import ToolFormat

FORMATS = ("hermes", "qwen3_coder", "gpt_oss", "mistral", "llama3", "json")
"""The tool formats, functions of ``formats``, in the order in which ``auto`` tries them."""


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Return the part ``episodes``."""
    return {"episodes": Part(load="engine_plugin_agents.runner:EnvironmentRunner")}


@hookimpl
def engine_tool_formats() -> Mapping[str, ToolFormat]:
    """Return the tool formats of this plugin."""
    return {name: ToolFormat(load=f"engine_plugin_agents.formats:{name}") for name in FORMATS}
