"""The reward ``http``: samples are posted to a server in batches, and scores come back.

::

    POST {"prompts": ["2+2="], "completions": ["4"], "columns": {"answer": ["4"]}}
    200  {"scores": [1.0]}

A score is a finite number, or null where the reward does not apply; ``"errors": {"3": "why"}`` names samples that the
server could not score. Each request has a timeout, and is retried after a failure that may pass. If a batch fails, all
its samples fail; other batches count. ``engine_plugin_processes.http`` has addresses, connections and retries.

With ``[reward.http.chat]`` the server is a language model at an OpenAI-compatible address, asked once for each sample::

    POST {"model": "judge", "messages": [{"role": "user", "content": "..."}], "max_tokens": 256, "temperature": 0.0}
    200  {"choices": [{"message": {"content": "Right. Score: 8"}}]}
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from engine_plugin_processes.http.requests import Asker, NoAnswer, Pace
from engine_plugin_rewards.judging import VerdictReader, columns_of, filled
from engine_plugin_rewards.plugin import HTTPOptions

if TYPE_CHECKING:
    from engine_plugin_rewards.plugin import ChatOptions

SHARE_OF_TIMEOUT = 0.9  # for a request; the rest is for returning the scores

Score = float | None | Exception


class ScorerError(Exception):
    """An error: a request gave no scores, for good."""


def make_http(timeout: float, **options: Any) -> Callable[..., list[Score]]:
    """Make the reward function of one worker.

    Args:
        timeout: seconds of a request with all its tries, from the moment at which a connection is free for it.
        options: the fields of ``HTTPOptions``.

    Raises:
        ConfigError: a variable with a secret is not set, or its value cannot be a token.
    """
    chosen = HTTPOptions.model_validate(options)
    most, pace = chosen.max_response_kb * 1024, Pace(chosen.requests_per_second)
    asker = Asker(chosen, "reward.http", most, secret_headers=chosen.secret_headers, pace=pace)
    judge = None if chosen.chat is None else Chat(chosen.chat)
    columns = chosen.columns if judge is None else judge.columns
    votes = 1 if chosen.chat is None else chosen.chat.votes
    size = chosen.batch_size if judge is None else 1
    together = "group_ids" in columns  # the reward compares samples: all are one batch
    threads = ThreadPoolExecutor(chosen.connections, thread_name_prefix="http-reward")

    def scores(batch: Mapping[str, Sequence[Any]]) -> list[Score]:
        """Return a score for each sample of a batch; for a failed batch, the same exception for each."""
        body = request_of(batch) if judge is None else judge.request(batch)
        if body is None:
            return [None]
        deadline = time.monotonic() + SHARE_OF_TIMEOUT * timeout
        count, error = len(batch["completions"]), Exception()
        try:
            answer = asker.answer(json.dumps(body).encode(), deadline)
            return (
                read_scores(answer, count, asker.shown)
                if judge is None
                else [judge.read(answer, asker.shown)]
            )
        except NoAnswer as failed:
            error = ScorerError(str(failed))
        except (ScorerError, TimeoutError) as failed:
            error = failed
        return [error] * count

    def http(**given: Sequence[Any]) -> list[Score]:
        """Score the samples of one call; its signature names the columns that the server receives."""
        count = len(given["completions"])
        step = max(count, 1) if together else size
        batches = [
            {name: values[i : i + step] for name, values in given.items()} for i in range(0, count, step)
        ]
        asked = [[threads.submit(scores, batch) for _ in range(votes)] for batch in batches]
        answers = [[future.result() for future in voting] for voting in asked]
        return [mean_vote(sample) for voting in answers for sample in zip(*voting, strict=True)]

    named: dict[str, Any] = dict.fromkeys(("prompts", "completions", *columns), Parameter.empty)
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=d) for name, d in (named | {"messages": None}).items()
    ]
    http.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    # read by the worker pool, which allows a call one timeout for every so many samples
    http.samples_per_timeout = None if together else size * chosen.connections / votes  # type: ignore[attr-defined]
    return http


def request_of(batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the request body for a batch."""
    texts = {name: batch[name] for name in ("prompts", "completions")}
    return texts | {"columns": {name: values for name, values in batch.items() if name not in texts}}


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
        said = shown(str(score))
        return ScorerError(f"score {position} of the response is {said!r}, expected a number or null")
    try:
        value = float(score)
    except OverflowError:
        value = math.inf
    if math.isfinite(value):
        return value
    return ScorerError(f"score {position} of the response is {value}, not finite")


class Chat:
    """A builder of questions and reader of verdicts, by ``ChatOptions``."""

    def __init__(self, options: ChatOptions) -> None:
        self.options, self.reader = options, VerdictReader(options)
        self.columns = [name for name in columns_of(options.prompt) if name not in ("completion", "prompt")]

    def request(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any] | None:
        """Return the request body for a batch of one; None if the row lacks a value that the question names."""
        sample = {name: values[0] for name, values in batch.items()}
        sample |= {"completion": sample["completions"], "prompt": sample["prompts"]}
        options, text = self.options, filled(self.options.prompt, sample)
        if text is None:
            return None
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        return {
            "model": options.model,
            "messages": [*system, {"role": "user", "content": text}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }

    def read(self, body: bytes, shown: Callable[..., str]) -> float:
        """Read the verdict from a response.

        Args:
            body: the response's body.
            shown: redacts and cuts a text for a message; with ``last=True`` it keeps the end.

        Raises:
            ScorerError: there is no verdict, or one out of bounds; the message is safe for a log.
        """
        try:
            said = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, KeyError, IndexError, TypeError):
            said = None
        if not isinstance(said, str):
            raise ScorerError(f"the response is no chat completion: {shown(body)!r}")
        value = self.reader.read(said)
        if value is None:
            raise ScorerError(f"no verdict in the judge's answer: {shown(said, last=True)!r}")
        return value


def mean_vote(votes: Sequence[Score]) -> Score:
    """Return the mean of the readable verdicts; without any, the first vote."""
    read = [vote for vote in votes if isinstance(vote, float)]
    return sum(read) / len(read) if len(read) > 1 else (read or votes)[0]
