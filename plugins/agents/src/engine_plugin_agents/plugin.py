"""What this distribution offers: episodes of several turns, for ``[environment]``."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Part


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    return {"episodes": Part(load="engine_plugin_agents.runner:EnvironmentRunner")}
