"""The reward ``http``: samples are posted to a server in batches, scores come back.

::

    POST {"prompts": ["2+2="], "completions": ["4"], "columns": {"answer": ["4"]}}
    200  {"scores": [1.0]}

A score is a finite number, or null where the reward does not apply; ``"errors": {"3": "why"}`` names
samples that the server could not score. Each request has a time limit, and is tried again when it
failed for a reason that may pass. What a batch failed of, its samples fail of; other batches count.
With ``[reward.http.chat]`` a language model is asked instead: ``http_chat``. Which addresses it may go to: ``http_address``; the connection: ``http_connection``.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import Parameter, Signature
from typing import Any

import urllib3
from urllib3.util.retry import Retry

from engine_core.errors import ConfigError
from engine_plugin_rewards.http_address import AddressRefused
from engine_plugin_rewards.http_chat import Chat, ChatOptions, mean_vote
from engine_plugin_rewards.http_connection import Connections, Passing

SHARE_OF_TIMEOUT = 0.9  # of the time that a call may take; the rest is for the way back
LONGEST_BACKOFF = 8.0
SHOWN = 160  # characters of a response in a message
PASSING = {429, *range(500, 600)}  # statuses that another try may change

Score = float | None | Exception


class ScorerError(Exception):
    """A request that gave no scores, for good."""


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
    requests_per_second: float | None = None,
    secret_headers: Mapping[str, str] | None = None,
    allow_addresses: Sequence[str] = (),
    chat: ChatOptions | None = None,
) -> Callable[..., list[Score]]:
    """The reward function of one worker; for the arguments see ``HTTPOptions``.

    Raises:
        ConfigError: a variable with a secret is not set, or holds what is none; the address is one that was not named.
    """
    headers, secrets = secret_parts(token_env, secret_headers or {})
    connections_to = Connections(url, [ipaddress.ip_network(each) for each in allow_addresses])
    try:
        connections_to.check()
    except AddressRefused as error:
        raise ConfigError(f"[reward.http] url: {error}") from None
    scorer = Scorer(
        connections_to,
        headers,
        secrets,
        try_seconds,
        retries,
        backoff_seconds,
        max_response_kb * 1024,
        Pace(requests_per_second),
    )
    judge = None if chat is None else Chat(chat)
    if judge is not None:
        columns, batch_size = judge.columns, 1
    threads = ThreadPoolExecutor(connections, thread_name_prefix="http-reward")
    whole = "group_ids" in columns  # samples that are compared with each other stay together

    def http(**given: Sequence[Any]) -> list[Score]:
        deadline, count = time.monotonic() + SHARE_OF_TIMEOUT * timeout, len(given["completions"])
        size = max(count, 1) if whole else batch_size
        starts = range(0, count, size)
        batches = [{name: values[i : i + size] for name, values in given.items()} for i in starts]
        if chat is None:
            asked = [threads.submit(scorer.scores, batch, deadline) for batch in batches]
            return [score for future in asked for score in future.result()]
        voting = [
            [threads.submit(scorer.scores, batch, deadline, judge) for _ in range(chat.votes)]
            for batch in batches
        ]
        return [mean_vote([future.result()[0] for future in votes]) for votes in voting]

    named: dict[str, Any] = dict.fromkeys(("prompts", "completions", *columns), Parameter.empty)
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=d) for name, d in (named | {"messages": None}).items()
    ]
    http.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return http


def secret_parts(
    token_env: str | None, secret_headers: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The headers whose values come from the environment, and the values.

    Args:
        token_env: variable of the token.
        secret_headers: variable of each further header.
    """
    headers, secrets = {}, []
    if token_env is not None:
        secrets.append(_secret("token_env", token_env))
        headers["Authorization"] = f"Bearer {secrets[-1]}"
    for name, variable in secret_headers.items():
        secrets.append(_secret(f"secret_headers.{name}", variable))
        headers[name] = secrets[-1]
    return headers, secrets


def _secret(key: str, variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"[reward.http] {key}: ${variable} is not set. Put the server's token there.")
    if not (value.isascii() and value.isprintable() and " " not in value):
        raise ConfigError(f"[reward.http] {key}: ${variable} holds spaces or characters that no token has.")
    return value


class Pace:
    """At most so many requests a second, evenly; used by several threads.

    Args:
        rate: requests a second; None: as they come.
    """

    def __init__(self, rate: float | None) -> None:
        self.gap = 0.0 if rate is None else 1.0 / rate
        self.next, self.lock = 0.0, threading.Lock()

    def wait(self, deadline: float) -> bool:
        """Wait for a place; False, at once and without taking one, where it lies after the deadline."""
        with self.lock:
            place = max(self.next, time.monotonic())
            if place >= deadline:
                return False
            self.next = place + self.gap
        time.sleep(max(0.0, place - time.monotonic()))
        return True


class Scorer:
    """Posts batches to one server; used by several threads.

    Args:
        connections: to the server.
        headers: sent with every request, with ``secrets`` in them, which are never written down.
        secrets: what no message shows.
        try_seconds: for one try.
        retries: further tries.
        backoff_seconds: before the second try.
        max_bytes: longest response.
        pace: of all requests.
    """

    def __init__(
        self,
        connections: Connections,
        headers: Mapping[str, str],
        secrets: Sequence[str],
        try_seconds: float,
        retries: int,
        backoff_seconds: float,
        max_bytes: int,
        pace: Pace,
    ) -> None:
        self.connections, self.secrets, self.try_seconds = connections, secrets, try_seconds
        self.retries, self.backoff_seconds, self.max_bytes = retries, backoff_seconds, max_bytes
        self.pace = pace
        self.headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # and what is packed all the same is never unpacked
            **headers,
        }
        self.random = random.Random()  # not the run's: a pause must not change what is drawn elsewhere

    def scores(
        self, batch: Mapping[str, Sequence[Any]], deadline: float, judge: Chat | None = None
    ) -> list[Score]:
        """A score for each sample of a batch; of a batch that failed, the same exception for each.

        Args:
            batch: the columns; of one sample where a judge is asked.
            deadline: of ``time.monotonic``, for all tries.
            judge: asks and reads, where the server is a language model.
        """
        count = len(batch["completions"])
        extra = {name: values for name, values in batch.items() if name not in ("prompts", "completions")}
        sent = {"prompts": batch["prompts"], "completions": batch["completions"], "columns": extra}
        asked = sent if judge is None else judge.request(batch)
        if asked is None:
            return [None]
        try:
            answer = self._answer(json.dumps(asked).encode(), deadline)
            return (
                read_scores(answer, count, self._shown) if judge is None else [self._verdict(judge, answer)]
            )
        except (ScorerError, TimeoutError) as error:
            return [error] * count

    def _verdict(self, judge: Chat, answer: bytes) -> float:
        try:
            return judge.read(answer, self._shown)
        except ValueError as error:
            raise ScorerError(str(error)) from None

    def _shown(self, text: bytes | str, last: bool = False) -> str:
        """The beginning or the end of a text for a message; servers quote what they were sent, so secrets go before it is cut."""
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        for secret in self.secrets:
            whole = whole.replace(secret, "[redacted]")
        return whole[-SHOWN:] if last else whole[:SHOWN]

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
            if not self.pace.wait(deadline):
                raise TimeoutError("requests_per_second leaves no time for a try")
            try:
                return self._try(body, min(self.try_seconds, deadline - time.monotonic()))
            except AddressRefused as error:
                raise ScorerError(str(error)) from None
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
        response, answer = self.connections.post(body, self.headers, seconds, self.max_bytes)
        status = response.status
        if answer is None:
            raise ScorerError(f"the response is longer than {self.max_bytes // 1024} KB (max_response_kb)")
        if status in PASSING:
            raise Passing(f"status {status}: {self._shown(answer)!r}", _pause_asked_for(response))
        if status != 200:
            raise ScorerError(f"status {status}: {self._shown(answer)!r}")
        return answer


def read_scores(body: bytes, count: int, shown: Callable[[bytes | str], str]) -> list[Score]:
    """The scores in a response.

    Args:
        body: of the response.
        count: samples.
        shown: a text as a message may show it.

    Raises:
        ScorerError: it is not the JSON that is expected, for ``count`` samples.
    """
    wanted = f'expected {{"scores": [...]}} with {count} finite numbers or nulls'
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise ScorerError(f"the response is no JSON: {shown(body)!r}; {wanted}") from None
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        got = f"{len(scores)} scores" if isinstance(scores, list) else repr(shown(body))
        raise ScorerError(f"the response has {got}; {wanted}")
    errors = answer.get("errors") or {}
    if not isinstance(errors, dict):
        raise ScorerError(f"the response's errors are no object: {shown(body)!r}")
    return [
        ScorerError(shown(str(errors[str(i)]))) if str(i) in errors else _number(score, i, shown)
        for i, score in enumerate(scores)
    ]


def _number(score: Any, position: int, shown: Callable[[bytes | str], str]) -> Score:
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float):
        return ScorerError(
            f"score {position} of the response is {shown(str(score))!r}, expected a number or null"
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
