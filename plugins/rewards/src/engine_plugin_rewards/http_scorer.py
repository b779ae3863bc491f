"""The reward ``http``: samples are posted to a server in batches, scores come back.

::

    POST {"prompts": ["2+2="], "completions": ["4"], "columns": {"answer": ["4"]}}
    200  {"scores": [1.0]}

A score is a finite number, or null where the reward does not apply; ``"errors": {"3": "why"}`` names
samples that the server could not score. Each request has a time limit, and is tried again when it
failed for a reason that may pass. What a batch failed of, its samples fail of; other batches count.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import Parameter, Signature
from typing import Any

import urllib3
from urllib3.util.retry import Retry

from engine_core.errors import ConfigError

SHARE_OF_TIMEOUT = 0.9  # of the time that a call may take; the rest is for the way back
LONGEST_BACKOFF = 8.0
CHUNK_BYTES = 65536
SHOWN = 160  # characters of a response in a message
PASSING = {429, *range(500, 600)}  # statuses that another try may change

Score = float | None | Exception


class ScorerError(Exception):
    """A request that gave no scores, for good."""


class Passing(Exception):
    """A try that failed of what may pass.

    Args:
        reason: for the message of the last try.
        wait: seconds that the server asks for.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def make_http(
    url: str,
    columns: Sequence[str],
    token_env: str | None,
    batch_size: int,
    connections: int,
    try_seconds: float,
    retries: int,
    backoff_seconds: float,
    max_response_kb: int,
    timeout: float,
) -> Callable[..., list[Score]]:
    """The reward function of one worker; for the arguments see ``HTTPOptions``.

    Raises:
        ConfigError: the variable with the token is not set, or holds what is no token.
    """
    scorer = Scorer(url, token_of(token_env), try_seconds, retries, backoff_seconds, max_response_kb * 1024)
    threads = ThreadPoolExecutor(connections, thread_name_prefix="http-reward")
    whole = "group_ids" in columns  # samples that are compared with each other stay together

    def http(**given: Sequence[Any]) -> list[Score]:
        deadline, count = time.monotonic() + SHARE_OF_TIMEOUT * timeout, len(given["completions"])
        size = max(count, 1) if whole else batch_size
        starts = range(0, count, size)
        batches = [{name: values[i : i + size] for name, values in given.items()} for i in starts]
        asked = [threads.submit(scorer.scores, batch, deadline) for batch in batches]
        return [score for future in asked for score in future.result()]

    named: dict[str, Any] = dict.fromkeys(("prompts", "completions", *columns), Parameter.empty)
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=d) for name, d in (named | {"messages": None}).items()
    ]
    http.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return http


def token_of(variable: str | None) -> str | None:
    """The token in an environment variable."""
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"[reward.http] token_env: ${variable} is not set. Put the server's token there.")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"[reward.http] token_env: ${variable} holds spaces or characters that no token has."
        )
    return token


class Scorer:
    """Posts batches to one server; used by several threads.

    Args:
        url: of the server.
        token: sent with every request, never written down.
        try_seconds: for one try.
        retries: further tries.
        backoff_seconds: before the second try.
        max_bytes: longest response.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        try_seconds: float,
        retries: int,
        backoff_seconds: float,
        max_bytes: int,
    ) -> None:
        self.url, self.token, self.try_seconds = url, token, try_seconds
        self.retries, self.backoff_seconds, self.max_bytes = retries, backoff_seconds, max_bytes
        self.headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
        }
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"
        self.pool = urllib3.PoolManager(maxsize=256)
        self.random = random.Random()  # not the run's: a pause must not change what is drawn elsewhere

    def scores(self, batch: Mapping[str, Sequence[Any]], deadline: float) -> list[Score]:
        """A score for each sample of a batch; of a batch that failed, the same exception for each."""
        count = len(batch["completions"])
        extra = {name: values for name, values in batch.items() if name not in ("prompts", "completions")}
        body = json.dumps(
            {"prompts": batch["prompts"], "completions": batch["completions"], "columns": extra}
        ).encode()
        try:
            found = read_scores(self._answer(body, deadline), count)
        except (ScorerError, TimeoutError) as error:
            found = [error] * count
        return [self._without_token(score) if isinstance(score, Exception) else score for score in found]

    def _without_token(self, error: Exception) -> Exception:
        """The same error; servers quote what they were sent."""
        return error if self.token is None else type(error)(str(error).replace(self.token, "[redacted]"))

    def _answer(self, body: bytes, deadline: float) -> bytes:
        """The body of a response with status 200.

        Raises:
            TimeoutError: there was none before the deadline.
            ScorerError: there was another response, or none after all tries.
        """
        for number in range(self.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return self._try(body, min(self.try_seconds, left))
            except Passing as failed:
                last = failed
            if number == self.retries:
                raise ScorerError(f"{last} (try {number + 1} of {self.retries + 1})")
            backoff = min(self.backoff_seconds * 2**number, LONGEST_BACKOFF) * self.random.uniform(0.5, 1.5)
            pause = backoff if last.wait is None else last.wait
            if time.monotonic() + pause >= deadline:
                raise TimeoutError(f"{last} (try {number + 1}), and no time is left for another")
            time.sleep(pause)
        raise TimeoutError("no time was left for a try")

    def _try(self, body: bytes, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        try:
            response = self.pool.request(
                "POST",
                self.url,
                body=body,
                headers=self.headers,
                timeout=seconds,
                retries=False,
                redirect=False,
                preload_content=False,
            )
        except urllib3.exceptions.NewConnectionError as error:  # a time-out too, for this library
            raise Passing(f"no connection: {_reason(error)}") from None
        except urllib3.exceptions.TimeoutError:
            raise Passing(f"no answer within {seconds:.3g} s") from None
        except urllib3.exceptions.HTTPError as error:
            raise Passing(f"no connection: {_reason(error)}") from None
        try:
            return self._read(response, until, seconds)
        except BaseException:
            response.close()
            raise

    def _read(self, response: Any, until: float, seconds: float) -> bytes:
        """The body, in as many bytes and seconds as are allowed; the connection is used again."""
        parts, size = [], 0
        try:
            while part := response.read1(CHUNK_BYTES, decode_content=False):
                parts.append(part)
                size += len(part)
                if size > self.max_bytes:
                    raise ScorerError(
                        f"the response is longer than {self.max_bytes // 1024} KB (max_response_kb)"
                    )
                if time.monotonic() > until:
                    raise Passing(f"the response did not end within {seconds:.3g} s")
        except urllib3.exceptions.TimeoutError:
            raise Passing(f"the response did not end within {seconds:.3g} s") from None
        except urllib3.exceptions.HTTPError as error:
            raise Passing(f"the response broke off: {_reason(error)}") from None
        response.release_conn()
        body = b"".join(parts)
        if response.status in PASSING:
            raise Passing(f"status {response.status}: {_shown(body)}", _pause_asked_for(response))
        if response.status != 200:
            raise ScorerError(f"status {response.status}: {_shown(body)}")
        return body


def read_scores(body: bytes, count: int) -> list[Score]:
    """The scores in a response.

    Raises:
        ScorerError: it is not the JSON that is expected, for ``count`` samples.
    """
    wanted = f'expected {{"scores": [...]}} with {count} finite numbers or nulls'
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise ScorerError(f"the response is no JSON: {_shown(body)}; {wanted}") from None
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        got = f"{len(scores)} scores" if isinstance(scores, list) else _shown(body)
        raise ScorerError(f"the response has {got}; {wanted}")
    errors = answer.get("errors") or {}
    if not isinstance(errors, dict):
        raise ScorerError(f"the response's errors are no object: {_shown(body)}")
    return [
        ScorerError(str(errors[str(i)])[:SHOWN]) if str(i) in errors else _number(score, i)
        for i, score in enumerate(scores)
    ]


def _number(score: Any, position: int) -> Score:
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float):
        return ScorerError(
            f"score {position} of the response is {str(score)[:SHOWN]!r}, expected a number or null"
        )
    try:
        value = float(score)
    except OverflowError:
        value = math.inf
    return (
        value
        if math.isfinite(value)
        else ScorerError(f"score {position} of the response is {value}, not finite")
    )


def _pause_asked_for(response: Any) -> float | None:
    """Seconds of its ``Retry-After``; None where it has none, or one that is neither a number nor a date."""
    try:
        return Retry().get_retry_after(response)
    except urllib3.exceptions.InvalidHeader:
        return None


def _shown(body: bytes) -> str:
    text = body[: 4 * SHOWN].decode("utf-8", "replace")
    return repr(text[:SHOWN])


def _reason(error: Exception) -> str:
    """What went wrong, without the objects that the library's messages begin with."""
    return str(error).rpartition(": ")[2] or type(error).__name__
