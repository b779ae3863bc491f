"""Redaction of secrets in a run's output: logs, ``env.json``, resolved configs, data sent to trackers.

A secret is the value of an environment variable or config key whose name contains a word such as TOKEN, KEY,
SECRET or PASSWORD, and the password in a URL. Every occurrence of such a value in a text is replaced: in a config dump, a URL, a traceback.

Secrets are not guessed from the form of a value, because hashes and model names would be redacted too.
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
MIN_LENGTH = 6  # a shorter value may occur in ordinary words

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_known: set[str] = set()  # the secrets of all redactors of this process

_WORD = r"(^|[_-])(token|key|apikey|secret|pgpassword|password|passwd|passphrase|sshpass|credentials?|authorization)"
_ENV_NAME = re.compile(_WORD + "(_|$)|(^|_)(pat|auth)$|_pwd$", re.IGNORECASE)  # any word of it
_CONFIG_KEY = re.compile(_WORD + "$", re.IGNORECASE)  # the last word: `stop_token_ids` is no secret
_URL_PASSWORD = re.compile(r"\w://[^/\s:@]*:(?!\d+/)(\S+?)@[^/\s@]+(?:[/\s?#]|$)")  # `/` and `@` may be in it
_HEADER = re.compile(r"(?:authorization|x-api-key)\s*:\s*(.+)", re.IGNORECASE)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")  # `accessToken` is access_Token


class Redactor:
    """A replacer of secrets in texts.

    Args:
        values: the secrets; values shorter than ``MIN_LENGTH`` are ignored.
    """

    def __init__(self, values: Iterable[str]) -> None:
        kept = {value for value in values if len(value) >= MIN_LENGTH}
        _known.update(kept)
        kept |= {json.dumps(value)[1:-1] for value in kept}  # escaped as in JSON and TOML strings
        alternatives = "|".join(re.escape(value) for value in sorted(kept, key=len, reverse=True))
        self._pattern = re.compile(alternatives) if kept else None

    @classmethod
    def of(cls, config: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Redactor:
        """Build a redactor of the secrets of an environment (default: this process's) and of a config."""
        environment = os.environ if env is None else env
        return cls([*_secrets_of(environment), *secrets_in(config or {})])

    def __call__(self, text: str) -> str:
        """Return ``text`` with every secret replaced by ``[redacted]``."""
        return self._pattern.sub(REDACTED, text) if self._pattern else text

    def tree(self, value: Any) -> Any:
        """Return nested dicts and lists with the secrets in every string replaced."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {self(str(key)): self.tree(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]
        return value


def names_secret(variable: str) -> bool:
    """Return whether the value of an environment variable of this name is redacted."""
    return bool(_ENV_NAME.search(variable))


def without_secrets(text: str) -> str:
    """Return ``text`` without the secrets of the environment and of all configs of this process."""
    return Redactor([*_known, *_secrets_of(os.environ)])(text)


def harmless(text: str) -> str:
    """Return a text whose control characters are spelled out, so that no data steers a terminal; lines and tabs stay."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def show_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Print a traceback without secrets, as ``sys.excepthook``; libraries quote URLs and headers in messages."""
    print(without_secrets("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def _secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if _ENV_NAME.search(name):
            yield value
        yield from _URL_PASSWORD.findall(value)


def secrets_in(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the string values of keys such as ``api_key`` and the passwords in URLs, at any depth."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from secrets_in(value)
        elif isinstance(value, list | tuple):
            yield from secrets_in({str(i): item for i, item in enumerate(value)})
        elif isinstance(value, str):
            header = _HEADER.fullmatch(value)
            if header or _CONFIG_KEY.search(_HUMP.sub("_", str(key))):
                yield value if header is None else header[1]
                yield value.rpartition(" ")[2]  # of "Bearer abc"
            yield from _URL_PASSWORD.findall(value)
