"""The hooks of this distribution: the name, options and function of each reward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine_core import hookimpl
from engine_core.config.rewards import WrittenVerdict
from engine_core.specs import Command, FilePath, Options, Part, Reward
from engine_plugin_processes.http.options import ServerOptions, says_it_is_secret
from engine_plugin_rewards.code_options import CodeOptions

OWN_HEADERS = frozenset(
    {"host", "content-type", "content-length", "transfer-encoding", "connection", "accept", "accept-encoding"}
)


class ExactMatchOptions(Options):
    """``[reward.exact_match]``: 1 if the response is the column ``answer``, else 0."""

    after: str | None = None
    """Compare only what follows the last occurrence of this text in the response; 0 where it does not occur."""
    ignore_case: bool = False
    """Compare without regard to case."""
    strip: bool = True
    """Leave out white space at both ends."""


class NumericOptions(Options):
    """``[reward.numeric]``: 1 if the last number of the response is the last one of the column ``answer``, else 0."""

    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """Largest absolute difference."""
    relative_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Largest difference as a share of the answer, where that is more."""
    boxed: Literal["prefer", "only", "ignore"] = "prefer"
    """The last ``\\boxed{...}`` of the response: look there first, only there, or treat it as text."""


class MathOptions(Options):
    """``[reward.math]``: 1 if the response and the column ``answer`` are the same mathematics, else 0 (math-verify)."""

    precision: Annotated[int, Field(ge=1, le=15)] = 6
    """Decimals to which floating-point results are compared."""
    strict: bool = True
    """``x`` and ``y`` are different; sets, tuples and intervals too."""


class FormatOptions(Options):
    """``[reward.format]``: 1 if the response has a form, else 0."""

    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
    """Regular expression (Python's); ``.`` matches line breaks."""
    match: Literal["full", "search"] = "full"
    """The whole response must match, or some part of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as exc:
            raise ValueError(f"not a regular expression: {exc}") from exc
        return pattern


class LengthOptions(Options):
    """``[reward.length]``: 0 for responses up to ``max_tokens - buffer_tokens``, then falling to ``-penalty`` (DAPO)."""

    max_tokens: Annotated[int, Field(gt=0)]
    """Length with the full penalty; usually `rollout.max_response_tokens`."""
    buffer_tokens: Annotated[int, Field(gt=0)]
    """Tokens before that over which the penalty grows."""
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Largest penalty."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens = {self.buffer_tokens} is more than max_tokens = {self.max_tokens}; choose at most that"
            )
        return self


class ChatOptions(WrittenVerdict):
    """``[reward.http.chat]``: ``url`` is the ``/v1/chat/completions`` of a language model, which judges each response."""

    model: str
    """Its name at the server."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest answer."""


class HTTPOptions(ServerOptions):
    """``[reward.http]``: the scores that a server gives, such as ``engine serve-reward``."""

    url: str
    """Where samples are posted: ``http://`` or ``https://``, a host, a path."""
    columns: list[str] = []
    """What is sent besides prompts and completions: columns of the data such as ``answer``, or arguments of a reward such as ``response_lengths``."""
    secret_headers: dict[str, str] = {}
    """Further headers, such as ``{ "X-Api-Key" = "JUDGE_KEY" }``: the environment variable of each value, named as in ``token_env``."""
    chat: ChatOptions | None = None
    """Its table makes the server a language model that is asked about each response."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Samples in one request. A worker has at most 32 at a time."""
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most requests of one worker in a second, tries counted, at even distances."""
    attempt_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """Time for one try. All tries together have nine tenths of `timeout_seconds` of the ``[[reward]]``."""
    max_response_kb: Annotated[int, Field(ge=1)] = 1024
    """A longer response is refused unread."""

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.chat is not None and self.columns:
            raise ValueError(
                "columns are sent to a server of scores; the prompt of chat names its columns itself."
            )
        return self

    @field_validator("columns")
    @classmethod
    def _names(cls, columns: list[str]) -> list[str]:
        for name in columns:
            if not name.isidentifier() or name in ("prompts", "completions", "messages"):
                raise ValueError(
                    f"'{name}' cannot be a column here. Prompts, messages and completions are sent anyway."
                )
        return columns

    @field_validator("secret_headers")
    @classmethod
    def _headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, variable in headers.items():
            if not re.fullmatch(r"[A-Za-z0-9-]+", name) or name.lower() in OWN_HEADERS:
                raise ValueError(f"'{name}' is no header that can be set here.")
            says_it_is_secret(variable)
        return headers


class PythonOptions(Options):
    """``[reward.python]``: a function from a Python file, next to the run file."""

    path: FilePath
    """The ``.py`` file, relative to the run file's folder and inside it."""
    function: str = "score"
    """Name of the function in it."""
    allow_local_code: bool = False
    """Say true: the file is run with your rights."""
    conversational: bool = False
    """Give prompts and completions as TRL does for conversations: lists of ``{role, content}``."""
    arguments: dict[str, Any] = {}
    """Further arguments of the function."""

    @model_validator(mode="after")
    def _allowed(self) -> Self:
        if PurePath(self.path).suffix != ".py":
            raise ValueError(f"path = '{self.path}' must end in .py")
        if not self.allow_local_code:
            raise ValueError(
                f"'{self.path}' would be run with your rights. If you trust it, write allow_local_code = true"
            )
        return self


@hookimpl
def engine_rewards() -> Mapping[str, Reward]:
    """Offer the rewards."""
    here = "engine_plugin_rewards"
    return {
        "code": Reward(
            load=f"{here}.code:make_code",
            config=CodeOptions,
            factory=True,
            health=f"{here}.code:health",
            workers="cores",
            check=f"{here}.code:make_check",
        ),
        "exact_match": Reward(load=f"{here}.text:exact_match", config=ExactMatchOptions, answers=True),
        "format": Reward(
            load=f"{here}.text:make_format", config=FormatOptions, factory=True, on_timeout="zero"
        ),
        "http": Reward(load=f"{here}.http_scorer:make_http", config=HTTPOptions, factory=True),
        "length": Reward(load=f"{here}.text:soft_overlong", config=LengthOptions),
        "math": Reward(
            load=f"{here}.mathematics:same_mathematics",
            config=MathOptions,
            answers=True,
            workers="cores",
            on_timeout="zero",
        ),
        "numeric": Reward(load=f"{here}.numeric:numeric", config=NumericOptions, answers=True),
        "python": Reward(
            load=f"{here}.python_file:make_python", config=PythonOptions, factory=True, answers=True
        ),
    }


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Offer ``reward_models`` and ``reward_workers``."""
    return {
        "reward_models": Part(load="engine_plugin_rewards.models.roles:REWARD_MODELS"),
        "reward_workers": Part(load="engine_plugin_rewards.worker_pool:REWARD_WORKERS"),
    }


@hookimpl
def engine_commands() -> Mapping[str, Command]:
    """Offer ``serve-reward``."""
    return {"serve-reward": Command(load="engine_plugin_rewards.server.command:serve_reward")}
