"""The plugin's registration: multi-turn episodes, for ``[environment]``."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Part


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Return the part ``episodes``."""
    return {"episodes": Part(load="engine_plugin_agents.runner:EnvironmentRunner")}
