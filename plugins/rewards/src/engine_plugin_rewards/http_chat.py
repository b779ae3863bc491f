"""The variant ``chat`` of the reward ``http``: a judge at an OpenAI-compatible address, one question for each sample.

::

    POST {"model": "judge", "messages": [{"role": "user", "content": "..."}], "max_tokens": 256, "temperature": 0.0}
    200  {"choices": [{"message": {"content": "Right. Score: 8"}}]}

The response to be judged is inserted into the question once and unchanged, and the verdict is read only from the
judge's own words. Left out on purpose: tools, streams.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from engine_core.specs import Options

PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)\}")
NUMBER = r"-?\d+(?:\.\d+)?"
OFFERED = ("completion", "prompt", "question")


class ChatOptions(Options):
    """``[reward.http.chat]``: ``url`` is the ``/v1/chat/completions`` of a language model, which judges each response."""

    model: str
    """Its name at the server."""
    prompt: str
    """The question, in which ``{completion}`` is the response, ``{question}`` the last message of the user, ``{prompt}`` the whole prompt, and any other name a column of the data."""
    system: str | None = None
    """System message before it."""
    pattern: str = NUMBER
    """Regular expression (Python's) of the verdict, a number: its last match counts, of it the first group."""
    scale: tuple[float, float] | None = None
    """The number's range, mapped to 0..1; a number outside is a failure. Default: the number itself."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest answer."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Sampling temperature; 0 is greedy."""
    votes: Annotated[int, Field(ge=1, le=64)] = 1
    """Answers to each question, a request each; the reward is the mean of those that can be read."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str) -> str:
        if "completion" not in PLACEHOLDER.findall(prompt):
            raise ValueError("{completion} is missing: the judge would not see the response.")
        return prompt

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}.") from error
        if self.scale is not None and not (
            all(map(math.isfinite, self.scale)) and self.scale[0] < self.scale[1]
        ):
            raise ValueError(f"scale = {list(self.scale)}: expected [low, high] with low below high.")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"votes = {self.votes} with temperature = 0 gives the same answer each time; set temperature."
            )
        return self


class Chat:
    """A builder of questions and reader of verdicts, by ``ChatOptions``."""

    def __init__(self, options: ChatOptions) -> None:
        self.options = options
        self.pattern = re.compile(options.pattern)
        named = dict.fromkeys(PLACEHOLDER.findall(options.prompt))
        self.columns = [name for name in named if name not in OFFERED]

    def request(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any] | None:
        """Return the request body for a batch of one; None if the row lacks a value that the question names."""
        sample = {name: values[0] for name, values in batch.items()}
        asked = [m["content"] for m in sample.get("messages") or () if m["role"] == "user"]
        values = {name: sample.get(name) for name in self.columns} | {
            "completion": sample["completions"],
            "prompt": sample["prompts"],
            "question": asked[-1] if asked else sample["prompts"],
        }
        if any(values[name] is None for name in self.columns):
            return None
        text = PLACEHOLDER.sub(lambda found: _text(values[found[1]]), self.options.prompt)
        messages = [{"role": "user", "content": text}]
        if self.options.system is not None:
            messages.insert(0, {"role": "system", "content": self.options.system})
        options = self.options
        return {
            "model": options.model,
            "messages": messages,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }

    def read(self, body: bytes, shown: Callable[..., str]) -> float:
        """Read the verdict from a response.

        Args:
            body: the response's body.
            shown: redacts and cuts a text for a message; with ``last=True`` it keeps the end.

        Raises:
            ValueError: there is no verdict, or one out of bounds; the message is safe for a log.
        """
        try:
            said = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, KeyError, IndexError, TypeError):
            said = None
        if not isinstance(said, str):
            raise ValueError(f"the response is no chat completion: {shown(body)!r}")
        found = None
        for found in self.pattern.finditer(said):  # noqa: B007
            pass
        number = "" if found is None else (found[1] if self.pattern.groups else found[0]) or ""
        if not re.fullmatch(NUMBER, number.strip()):
            raise ValueError(f"no verdict in the judge's answer: {shown(said, last=True)!r}")
        value, (low, high) = float(number), self.options.scale or (-math.inf, math.inf)
        if not (low <= value <= high and math.isfinite(value)):
            raise ValueError(f"the judge's verdict {shown(number)} is out of bounds")
        return value if self.options.scale is None else (value - low) / (high - low)


def mean_vote(votes: Sequence[float | Exception | None]) -> float | Exception | None:
    """Return the mean of the readable verdicts; without any, the first vote."""
    read = [vote for vote in votes if isinstance(vote, float)]
    return sum(read) / len(read) if read else votes[0]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
