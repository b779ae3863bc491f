"""The hooks of this distribution, which offers in addition to its suites the part ``faults`` for tests."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Part


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Offer ``faults``."""
    return {"faults": Part(load="engine_plugin_testing.faults:Faults")}
