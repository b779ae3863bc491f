"""Requests to one server, with redacted secrets in messages, a rate limit, and retries of temporary failures."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import urllib3
from urllib3.util.retry import Retry

from engine_core.errors import ConfigError
from engine_plugin_processes.http.connections import Connections, Passing

LONGEST_BACKOFF = 8.0
SHOWN = 160  # characters of a response in a message
PASSING = {429, *range(500, 600)}  # statuses that another try may change


class NoAnswer(Exception):
    """An error: a request failed for good.

    Args:
        reason: safe for a log.
        status: of the response; 0 without a response.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


def secret_parts(
    token_env: str | None, secret_headers: Mapping[str, str], table: str
) -> tuple[dict[str, str], list[str]]:
    """Return the headers whose values come from the environment, and these values.

    Args:
        token_env: variable of the token.
        secret_headers: variable of each further header.
        table: of the run file, for messages.

    Raises:
        ConfigError: a variable is not set, or its value cannot be a token.
    """
    headers, secrets = {}, []
    if token_env is not None:
        secrets.append(_secret(table, "token_env", token_env))
        headers["Authorization"] = f"Bearer {secrets[-1]}"
    for name, variable in secret_headers.items():
        secrets.append(_secret(table, f"secret_headers.{name}", variable))
        headers[name] = secrets[-1]
    return headers, secrets


def _secret(table: str, key: str, variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"[{table}] {key}: ${variable} is not set. Put the server's token there.")
    if not (value.isascii() and value.isprintable() and " " not in value):
        raise ConfigError(f"[{table}] {key}: ${variable} holds spaces or characters that no token has.")
    return value


class Pace:
    """A rate limit: requests are spaced evenly. Thread-safe.

    Args:
        rate: requests a second; None: no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.gap = 0.0 if rate is None else 1.0 / rate
        self.next, self.lock = 0.0, threading.Lock()

    def wait(self, deadline: float) -> bool:
        """Wait for the next slot and return True; return False at once if that slot is after the deadline."""
        with self.lock:
            place = max(self.next, time.monotonic())
            if place >= deadline:
                return False
            self.next = place + self.gap
        time.sleep(max(0.0, place - time.monotonic()))
        return True


class Asker:
    """A client of one server. Thread-safe.

    Args:
        connections: to the server.
        headers: sent with every request; contain ``secrets`` and are never logged.
        secrets: texts that are redacted in messages.
        attempt_timeout_seconds: for one attempt.
        retries: further attempts.
        backoff_seconds: before the second attempt.
        max_bytes: longest response.
        pace: of all requests.
        longest_key: the option that allows a longer response, for the message.
    """

    def __init__(
        self,
        connections: Connections,
        headers: Mapping[str, str],
        secrets: Sequence[str],
        attempt_timeout_seconds: float,
        retries: int,
        backoff_seconds: float,
        max_bytes: int,
        pace: Pace | None = None,
        longest_key: str = "max_response_kb",
    ) -> None:
        self.connections, self.secrets, self.attempt_timeout_seconds = (
            connections,
            secrets,
            attempt_timeout_seconds,
        )
        self.retries, self.backoff_seconds, self.max_bytes = retries, backoff_seconds, max_bytes
        self.pace, self.longest_key = pace or Pace(None), longest_key
        self.headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # a body that is compressed nevertheless is never decompressed
            **headers,
        }
        self.random = random.Random()  # not the run's: a pause must not change other random draws

    def shown(self, text: bytes | str, last: bool = False) -> str:
        """Return the beginning, or the end, of a text for a message.

        Secrets are redacted before the text is cut: servers quote requests.
        """
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        for secret in self.secrets:
            whole = whole.replace(secret, "[redacted]")
        return whole[-SHOWN:] if last else whole[:SHOWN]

    def answer(self, body: bytes | None, deadline: float, path: str | None = None) -> bytes:
        """Return the body of a response with status 200.

        Args:
            body: to post; None: a GET request.
            deadline: of ``time.monotonic``, for all attempts.
            path: instead of the path of the server's address.

        Raises:
            TimeoutError: no such response before the deadline.
            NoAnswer: another status that is not retried, a too long response, or no success after all attempts.
        """
        for number in range(self.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self.pace.wait(deadline):
                raise TimeoutError("requests_per_second leaves no time for a try")
            try:
                return self._try(body, min(self.attempt_timeout_seconds, deadline - time.monotonic()), path)
            except Passing as failed:
                last = failed
            if number == self.retries:
                raise NoAnswer(f"{last} (try {number + 1} of {self.retries + 1})")
            backoff = min(self.backoff_seconds * 2**number, LONGEST_BACKOFF) * self.random.uniform(0.5, 1.5)
            pause = backoff if last.wait is None else last.wait
            if time.monotonic() + pause >= deadline:
                raise TimeoutError(f"{last} (try {number + 1}), and no time is left for another")
            time.sleep(pause)
        raise TimeoutError("no time was left for a try")

    def _try(self, body: bytes | None, seconds: float, path: str | None) -> bytes:
        response, answer = self.connections.exchange(body, self.headers, seconds, self.max_bytes, path)
        status = response.status
        if answer is None:
            raise NoAnswer(f"the response is longer than {self.max_bytes // 1024} KB ({self.longest_key})")
        if status in PASSING:
            raise Passing(f"status {status}: {self.shown(answer)!r}", _pause_asked_for(response))
        if status != 200:
            raise NoAnswer(f"status {status}: {self.shown(answer)!r}", status)
        return answer


def _pause_asked_for(response: Any) -> float | None:
    """Return the seconds of ``Retry-After``; None if the header is missing, or neither a number nor a date."""
    try:
        return Retry().get_retry_after(response)
    except urllib3.exceptions.InvalidHeader:
        return None
