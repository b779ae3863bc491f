"""Requests to one server, by urllib3, with redacted secrets in messages, a rate limit, deadlines and retries."""

from __future__ import annotations

import http.client
import os
import random
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, InvalidHeader, NewConnectionError
from urllib3.exceptions import TimeoutError as LateError
from urllib3.util.retry import Retry

from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_plugin_processes.http.options import ServerOptions

CHUNK_BYTES = 65536
LONGEST_BACKOFF = 8.0
SHOWN = 160  # characters of a response in a message
PASSING = {429, *range(500, 600)}  # statuses that another try may change


class Passing(Exception):
    """An error: an attempt failed, and another one may succeed.

    Args:
        reason: for the message of the last attempt.
        wait: seconds that the server asks for.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class NoAnswer(Exception):
    """An error: a request failed for good.

    Args:
        reason: safe for a log.
        status: of the response; 0 without a response.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


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
    """A client of one server, which keeps connections open. Thread-safe. Proxies of the environment are not used.

    Args:
        options: the table that names the server.
        table: its name in the run file, for messages.
        max_bytes: longest response.
        longest_key: the option that allows a longer response, for the message.
        secret_headers: variable of each header whose value comes from the environment.
        pace: of all requests.

    Raises:
        ConfigError: a variable is not set, or its value cannot be a token.
    """

    def __init__(
        self,
        options: ServerOptions,
        table: str,
        max_bytes: int,
        longest_key: str = "max_response_kb",
        secret_headers: Mapping[str, str] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.options, self.max_bytes, self.longest_key = options, max_bytes, longest_key
        self.pool = urllib3.connection_from_url(options.url, maxsize=options.connections)
        self.path = urllib3.util.parse_url(options.url).request_uri
        self.pace = pace or Pace(None)
        given = {
            name: _secret(table, f"secret_headers.{name}", variable)
            for name, variable in (secret_headers or {}).items()
        }
        self.secrets = list(given.values())  # redacted in messages; headers are never logged
        if options.token_env is not None:
            self.secrets.append(_secret(table, "token_env", options.token_env))
            given = {"Authorization": f"Bearer {self.secrets[-1]}", **given}
        self.headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # a body that is compressed nevertheless is never decompressed
            **given,
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
        attempts = self.options.retries + 1
        for number in range(attempts):
            if time.monotonic() >= deadline:
                break
            if not self.pace.wait(deadline):
                raise TimeoutError("requests_per_second leaves no time for a try")
            try:
                left = deadline - time.monotonic()
                return self._try(body, min(self.options.attempt_timeout_seconds, left), path)
            except Passing as failed:
                last = failed
            if number + 1 == attempts:
                raise NoAnswer(f"{last} (try {attempts} of {attempts})")
            backoff = min(self.options.backoff_seconds * 2**number, LONGEST_BACKOFF)
            backoff *= self.random.uniform(0.5, 1.5)
            pause = backoff if last.wait is None else last.wait
            if time.monotonic() + pause >= deadline:
                raise TimeoutError(f"{last} (try {number + 1}), and no time is left for another")
            time.sleep(pause)
        raise TimeoutError("no time was left for a try")

    def _try(self, body: bytes | None, seconds: float, path: str | None) -> bytes:
        response, answer = self._exchange(body, seconds, path or self.path)
        status = response.status
        if answer is None:
            raise NoAnswer(f"the response is longer than {self.max_bytes // 1024} KB ({self.longest_key})")
        if status in PASSING:
            raise Passing(f"status {status}: {self.shown(answer)!r}", _pause_asked_for(response))
        if status != 200:
            raise NoAnswer(f"status {status}: {self.shown(answer)!r}", status)
        return answer

    def _exchange(self, body: bytes | None, seconds: float, path: str) -> tuple[Any, bytes | None]:
        """Return the response, whatever its status, and its raw body; None for one of more than ``max_bytes`` bytes.

        Args:
            body: to post; None: a GET request.
            seconds: for everything, from the connection to the last byte.
            path: of the request.

        Raises:
            Passing: no response came in time, or the connection broke.
        """
        until, response = time.monotonic() + seconds, None
        late = Passing(f"no whole answer within {seconds:.3g} s")
        answer, whole = bytearray(), False
        try:
            response = self.pool.urlopen(
                "GET" if body is None else "POST",
                path,
                body,
                self.headers,
                retries=False,
                timeout=urllib3.Timeout(total=max(seconds, 0.001)),
                preload_content=False,
                decode_content=False,
            )
            while part := response.read1(CHUNK_BYTES):
                answer += part
                if len(answer) > self.max_bytes:
                    return response, None
                if time.monotonic() > until:  # the socket's own timeout restarts with each byte
                    raise late
            whole = True
        except NewConnectionError as error:  # a subclass of urllib3's timeout errors
            raise Passing(f"no connection: {_reason(error)}") from None
        except ConnectTimeoutError:
            raise Passing(f"no connection within {seconds:.3g} s") from None
        except LateError:
            raise late from None
        except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            raise Passing(f"the connection broke off: {_reason(error)}") from None
        finally:
            if response is not None:
                if not whole:  # a connection with unread bytes is of no use
                    response.close()
                response.release_conn()
        return response, bytes(answer)


def _reason(error: Exception) -> str:
    """Return the error's message without the objects with which the library's messages begin."""
    if error.args and isinstance(error.args[-1], Exception):
        error = error.args[-1]
    return str(error).rpartition(": ")[2] or type(error).__name__


def _pause_asked_for(response: Any) -> float | None:
    """Return the seconds of ``Retry-After``; None if the header is missing, or neither a number nor a date in range."""
    try:
        seconds = Retry().get_retry_after(response)
        return None if seconds is None else float(seconds)
    except (InvalidHeader, ValueError, OverflowError):
        return None
