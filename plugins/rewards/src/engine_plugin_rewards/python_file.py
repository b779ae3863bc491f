"""The reward ``python``: a function from a user's file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError, did_you_mean
from engine_core.plugins.modules import import_file


def make_python(
    path: str,
    function: str,
    allow_local_code: bool,
    conversational: bool,
    arguments: dict[str, Any],
    root: Path,
    allow_code: bool,
) -> Callable[..., Any]:
    """Import the file and return the function; the hash of the file is logged.

    Args:
        path: the file, below ``root``.
        function: its name in the file.
        allow_local_code: checked with the options.
        conversational: give prompts and completions as lists of messages.
        arguments: further arguments of the function.
        root: folder of the run file.
        allow_code: files outside of ``root`` are allowed, too (``--allow-code``).

    Raises:
        PluginError: the file does not exist, lies outside of ``root``, or does not import.
        ConfigError: the file has no such function.
    """
    module, _ = import_file(path, root, allow_code)
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(
            f"[reward.python] '{path}' has no function '{function}'.{did_you_mean(function, names)}"
        )
    if arguments:
        found = functools.partial(found, **arguments)
    return as_conversations(found) if conversational else found


def as_conversations(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that texts become one-message conversations, as TRL gives them for chat data."""
    roles = {"prompts": "user", "prompt": "user", "completions": "assistant", "completion": "assistant"}

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        """Call the function with one-message conversations in place of texts."""
        for name, role in roles.items():
            if isinstance(given.get(name), str):
                given[name] = [{"role": role, "content": given[name]}]
            elif name in given:
                given[name] = [[{"role": role, "content": text}] for text in given[name]]
        return function(**given)

    return call
