"""The reward ``http``: samples are posted to a server in batches, and scores come back.

::

    POST {"prompts": ["2+2="], "completions": ["4"], "columns": {"answer": ["4"]}}
    200  {"scores": [1.0]}

A score is a finite number, or null where the reward does not apply; ``"errors": {"3": "why"}`` names samples that the
server could not score. Each request has a timeout, and is retried after a failure that may pass. If a batch fails, all
its samples fail; other batches count. With ``[reward.http.chat]`` a language model judges instead (``http_chat``).
``engine_plugin_processes.http`` has addresses, connections and retries.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import Parameter, Signature
from typing import Any

from engine_plugin_processes.http.connections import Connections
from engine_plugin_processes.http.requests import Asker, NoAnswer, Pace, secret_parts
from engine_plugin_rewards.http_chat import Chat, ChatOptions, mean_vote

SHARE_OF_TIMEOUT = 0.9  # of a call's timeout; the rest is for returning the scores

Score = float | None | Exception


class ScorerError(Exception):
    """An error: a request gave no scores, for good."""


def make_http(
    url: str,
    columns: Sequence[str],
    token_env: str | None,
    batch_size: int,
    connections: int,
    attempt_timeout_seconds: float,
    retries: int,
    backoff_seconds: float,
    max_response_kb: int,
    timeout: float,
    requests_per_second: float | None = None,
    secret_headers: Mapping[str, str] | None = None,
    chat: ChatOptions | None = None,
) -> Callable[..., list[Score]]:
    """Make the reward function of one worker; the arguments are the fields of ``HTTPOptions``.

    Raises:
        ConfigError: a variable with a secret is not set, or its value cannot be a token.
    """
    headers, secrets = secret_parts(token_env, secret_headers or {}, "reward.http")
    asker = Asker(
        Connections(url),
        headers,
        secrets,
        attempt_timeout_seconds,
        retries,
        backoff_seconds,
        max_response_kb * 1024,
        Pace(requests_per_second),
    )
    scorer = Scorer(asker)
    judge = None if chat is None else Chat(chat)
    if judge is not None:
        columns, batch_size = judge.columns, 1
    threads = ThreadPoolExecutor(connections, thread_name_prefix="http-reward")
    whole = "group_ids" in columns  # samples that the reward compares stay together

    def http(**given: Sequence[Any]) -> list[Score]:
        """Score the samples of one call; its signature names the columns that the server receives."""
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


class Scorer:
    """A client that posts batches to one server. Thread-safe.

    Args:
        asker: sends requests to the server.
    """

    def __init__(self, asker: Asker) -> None:
        self.asker = asker

    def scores(
        self, batch: Mapping[str, Sequence[Any]], deadline: float, judge: Chat | None = None
    ) -> list[Score]:
        """Return a score for each sample of a batch; for a failed batch, the same exception for each.

        Args:
            batch: the columns; of one sample if ``judge`` is given.
            deadline: moment of ``time.monotonic`` at which all attempts end.
            judge: builds the request and reads the response, if the server is a language model.
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
                read_scores(answer, count, self.asker.shown)
                if judge is None
                else [self._verdict(judge, answer)]
            )
        except (ScorerError, TimeoutError) as error:
            return [error] * count

    def _answer(self, body: bytes, deadline: float) -> bytes:
        try:
            return self.asker.answer(body, deadline)
        except NoAnswer as error:
            raise ScorerError(str(error)) from None

    def _verdict(self, judge: Chat, answer: bytes) -> float:
        try:
            return judge.read(answer, self.asker.shown)
        except ValueError as error:
            raise ScorerError(str(error)) from None


def read_scores(body: bytes, count: int, shown: Callable[[bytes | str], str]) -> list[Score]:
    """Read the scores in a response.

    Args:
        body: the response's body.
        count: number of samples.
        shown: redacts and cuts a text for a message.

    Raises:
        ScorerError: the response is not the expected JSON for ``count`` samples.
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
