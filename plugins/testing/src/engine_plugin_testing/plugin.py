"""What this distribution offers besides its suites: faults on purpose, for tests."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Part


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    return {"faults": Part(load="engine_plugin_testing.faults:Faults")}
