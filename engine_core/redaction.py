"""Keep secrets out of what a run writes: logs, ``env.json``, resolved configs, what trackers are sent.

A secret is the value of an environment variable or of a config key whose name says so (a word of it
is TOKEN, KEY, SECRET, PASSWORD, ...). Each occurrence of such a value in a text is replaced,
wherever it comes from: a config dump, a URL, a traceback.

Left out on purpose: guessing secrets by their looks, which would eat hashes and model names.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

REDACTED = "[redacted]"
MIN_LENGTH = 6  # a shorter value would be found in ordinary words

_known: set[str] = set()  # secrets that any redactor of this process was told

_WORD = r"(^|_)(token|key|apikey|secret|password|passwd|passphrase|credentials?)"
_ENV_NAME = re.compile(_WORD + "(_|$)", re.IGNORECASE)  # any word of it
_CONFIG_KEY = re.compile(_WORD + "$", re.IGNORECASE)  # the last: `stop_token_ids` is no secret


class Redactor:
    """Replaces secrets in texts.

    Args:
        values: the secrets; those shorter than ``MIN_LENGTH`` are not looked for.
    """

    def __init__(self, values: Iterable[str]) -> None:
        kept = {value for value in values if len(value) >= MIN_LENGTH}
        _known.update(kept)
        kept |= {json.dumps(value)[1:-1] for value in kept}  # as JSON and TOML strings write them
        alternatives = "|".join(re.escape(value) for value in sorted(kept, key=len, reverse=True))
        self._pattern = re.compile(alternatives) if kept else None

    @classmethod
    def of(cls, config: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Redactor:
        """One that knows the secrets of an environment (default: this process's) and of a config."""
        environment = os.environ if env is None else env
        from_env = [value for name, value in environment.items() if _ENV_NAME.search(name)]
        return cls([*from_env, *secrets_in(config or {})])

    def __call__(self, text: str) -> str:
        """``text`` with every secret replaced by ``[redacted]``."""
        return self._pattern.sub(REDACTED, text) if self._pattern else text

    def tree(self, value: Any) -> Any:
        """The same for every string in nested dicts and lists."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {self(str(key)): self.tree(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]
        return value


def names_secret(variable: str) -> bool:
    """Whether the value of an environment variable of this name is kept out of what a run writes."""
    return bool(_ENV_NAME.search(variable))


def without_secrets(text: str) -> str:
    """``text`` for the screen: without the environment's secrets, and those of any config of this process."""
    return Redactor([*_known, *(v for name, v in os.environ.items() if _ENV_NAME.search(name))])(text)


def show_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """``sys.excepthook`` that shows the traceback without secrets: messages of libraries quote addresses and headers."""
    print(without_secrets("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def secrets_in(config: Mapping[str, Any]) -> Iterator[str]:
    """The string values of keys such as ``api_key``, at any depth."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from secrets_in(value)
        elif isinstance(value, list | tuple):
            yield from secrets_in({str(i): item for i, item in enumerate(value)})
        elif isinstance(value, str) and _CONFIG_KEY.search(str(key)):
            yield value
