"""Fault injection: named points at which a test injects a fault into the running engine.

A point does nothing unless ``ENGINE_FAULT`` is set. Then it calls the part ``faults`` (``contracts.parts``).
"""

from __future__ import annotations

import os
from collections.abc import Callable

_passed: Callable[[str], None] | None = None


def arm(text: str | None = None) -> None:
    """Enable the faults that ``ENGINE_FAULT`` (or ``text``) describes; an empty text disables all faults.

    Raises:
        ConfigError: ``ENGINE_FAULT`` cannot be parsed.
        PluginError: ``ENGINE_FAULT`` is set, and no installed plugin has the part ``faults``.
    """
    global _passed
    _passed = None
    if text := os.environ.get("ENGINE_FAULT", "") if text is None else text:
        from engine_core.plugins import PluginSet

        _passed = PluginSet().require("parts", "faults")(text)


def point(name: str) -> None:
    """Inject the fault that is enabled for the point ``name``, if any."""
    if _passed is not None:
        _passed(name)
