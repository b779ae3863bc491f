"""The keys of a table that names a server by its address."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, field_validator

from engine_core.redaction import names_secret
from engine_core.specs import Options


class ServerOptions(Options):
    """The options of every server; a subclass adds those of its purpose."""

    url: str
    """Address of the server: ``http://`` or ``https://``, a host, a path."""
    token_env: str | None = None
    """Name of the environment variable with the server's token. The token is sent as ``Authorization: Bearer``. One word of the name must be TOKEN, KEY or SECRET."""
    connections: Annotated[int, Field(ge=1, le=256)] = 4
    """Maximum number of concurrent requests."""
    attempt_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """Maximum time for one attempt."""
    retries: Annotated[int, Field(ge=0)] = 4
    """Maximum number of retries. A request is retried if the connection fails, the attempt times out, or the status is 429 or 5xx."""
    backoff_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.25
    """Pause before the first retry. The pause doubles before each further retry and varies randomly by up to half. A server's ``Retry-After`` replaces the pause."""

    @field_validator("url")
    @classmethod
    def _an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected http://HOST:PORT/PATH or https://HOST/PATH.")
        secret = any(names_secret(name) for name, _ in parse_qsl(parts.query))
        if secret or parts.username is not None or parts.password is not None:
            raise ValueError("a name, password or token in the address would be written down; set token_env.")
        if not (url.isascii() and url.isprintable()) or set(url) & set(" \\@"):
            raise ValueError(
                "spaces, backslashes, @ and what is not ASCII are read differently by different programs."
            )
        _ = parts.port  # raises ValueError for a port that is no number
        return url

    @field_validator("token_env")
    @classmethod
    def _kept_secret(cls, variable: str | None) -> str | None:
        if variable is not None:
            says_it_is_secret(variable)
        return variable


def says_it_is_secret(variable: str) -> None:
    """Raise for a variable whose value logs would not redact.

    Raises:
        ValueError: its name does not say that it holds a secret.
    """
    if not names_secret(variable):
        raise ValueError(
            f"the value of ${variable} would not be kept out of logs. Name it so that it says what it is: SCORER_TOKEN."
        )
