"""The reward ``python``: a function from a user's file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError, did_you_mean
from engine_core.plugins.modules import import_file

ROLES = {"prompts": "user", "prompt": "user", "completions": "assistant", "completion": "assistant"}
"""The role of the message that a text becomes, by argument."""


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
    if conversational:
        found = as_conversations(found)
    return functools.partial(found, **arguments) if arguments else found


def as_conversations(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that it receives conversations, as TRL gives them for chat data.

    A prompt is the row's ``messages``, if it has some. Other texts become conversations of one message.
    """
    signature = inspect.signature(function)
    parameters = [*signature.parameters.values()]
    takes = "messages" in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        """Call the function with conversations in place of texts."""
        rows = given.get("messages") if takes else given.pop("messages", None)
        for name, role in ROLES.items():
            if name not in given:
                continue
            single = isinstance(given[name], str)
            texts = [given[name]] if single else given[name]
            asked = [None] * len(texts) if role != "user" or rows is None else [rows] if single else rows
            made = [
                messages or [{"role": role, "content": text}]
                for text, messages in zip(texts, asked, strict=True)
            ]
            given[name] = made[0] if single else made
        return function(**given)

    if not takes:
        asking = inspect.Parameter("messages", inspect.Parameter.KEYWORD_ONLY, default=None)
        call.__signature__ = signature.replace(parameters=[*parameters, asking])  # type: ignore[attr-defined]
    return call
