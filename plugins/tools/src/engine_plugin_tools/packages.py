"""Packages that only some uses of this distribution need, installed by its extras."""

from __future__ import annotations

import importlib.util

from engine_core.errors import PluginError


def require_package(package: str, extra: str, user: str, otherwise: str = "") -> None:
    """Check that a package is installed, without importing it.

    Args:
        package: the package's name; its module has the same name, with ``_`` for ``-``.
        extra: the extra of engine-plugin-tools that installs the package.
        user: the feature that needs the package; the message begins with it.
        otherwise: an alternative, for the end of the message.

    Raises:
        PluginError: the package is not installed.
    """
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise PluginError(
            f"{user} needs the package {package}, which is not installed. "
            f"Try: pip install 'engine-plugin-tools[{extra}]'{otherwise}."
        )
