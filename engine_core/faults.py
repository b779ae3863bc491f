"""Named points at which a test injects a fault into the running engine.

Unless ``ENGINE_FAULT`` is set, a point reads one variable and returns. Otherwise the part ``faults`` acts (``contracts.parts``).
"""

from __future__ import annotations

import os
from collections.abc import Callable

_passed: Callable[[str], None] | None = None


def arm(text: str | None = None) -> None:
    """Have the part ``faults`` act from now on, as ``ENGINE_FAULT`` (or ``text``) says; an empty one disarms.

    Raises:
        ConfigError: ``ENGINE_FAULT`` is not understood.
        PluginError: it is set, and no installed plugin has the part ``faults``.
    """
    global _passed
    _passed = None
    if text := os.environ.get("ENGINE_FAULT", "") if text is None else text:
        from engine_core.plugins import PluginSet

        _passed = PluginSet().require("parts", "faults")(text)


def point(name: str) -> None:
    """Pass the point ``name``: whatever is armed for it happens now."""
    if _passed is not None:
        _passed(name)
