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
    """Compare only the text after the last occurrence of this string in the response. The reward is 0 if the string does not occur."""
    ignore_case: bool = False
    """Ignore upper and lower case in the comparison."""
    strip: bool = True
    """Ignore white space at both ends."""


class NumericOptions(Options):
    """``[reward.numeric]``: 1 if the last number of the response equals the last number of the column ``answer``, else 0."""

    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """Maximum absolute difference."""
    relative_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Maximum difference as a share of the answer. The larger of the two tolerances applies."""
    boxed: Literal["prefer", "only", "ignore"] = "prefer"
    """The last ``\\boxed{...}`` of the response: look there first, only there, or treat it as text."""


class MathOptions(Options):
    """``[reward.math]``: 1 if the response and the column ``answer`` are mathematically equal, else 0 (math-verify)."""

    precision: Annotated[int, Field(ge=1, le=15)] = 6
    """Number of decimals to which floating-point results are compared."""
    strict: bool = True
    """Treat the variables ``x`` and ``y`` as different. Treat sets, tuples and intervals as different."""


class FormatOptions(Options):
    """``[reward.format]``: 1 if the response matches a pattern, else 0."""

    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
    """Python regular expression; ``.`` matches line breaks."""
    match: Literal["full", "search"] = "full"
    """``full``: the whole response must match. ``search``: a part of the response must match."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as exc:
            raise ValueError(f"not a regular expression: {exc}") from exc
        return pattern


class LengthOptions(Options):
    """``[reward.length]``: 0 for responses up to ``max_tokens - buffer_tokens``. For longer responses the reward falls to ``-penalty`` (DAPO)."""

    max_tokens: Annotated[int, Field(gt=0)]
    """Response length that gets the full penalty; usually `rollout.max_response_tokens`."""
    buffer_tokens: Annotated[int, Field(gt=0)]
    """Number of tokens before `max_tokens` over which the penalty grows."""
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Maximum penalty."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens = {self.buffer_tokens} is more than max_tokens = {self.max_tokens}; choose at most that"
            )
        return self


class ChatOptions(WrittenVerdict):
    """``[reward.http.chat]``: a language model judges each response. ``url`` is the address of its ``/v1/chat/completions``."""

    model: str
    """Name of the model at the server."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Maximum length of an answer, in tokens."""


class HTTPOptions(ServerOptions):
    """``[reward.http]``: a server gives the scores, for example ``engine serve-reward``."""

    url: str
    """Address to which samples are posted: ``http://`` or ``https://``, a host, a path."""
    columns: list[str] = []
    """Values sent in addition to prompts and completions: columns of the data such as ``answer``, or arguments of a reward such as ``response_lengths``."""
    secret_headers: dict[str, str] = {}
    """Additional headers, such as ``{ "X-Api-Key" = "JUDGE_KEY" }``. Each value is the name of the environment variable with the header's value. The name follows the rule of ``token_env``."""
    chat: ChatOptions | None = None
    """With this table the server is a language model, which judges each response."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Maximum number of samples in one request. A worker handles at most 32 samples at a time."""
    requests_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum number of requests of one worker per second, including retries. The requests are evenly spaced."""
    attempt_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """Maximum time for one attempt. All attempts together may take nine tenths of the reward's `timeout_seconds`."""
    max_response_kb: Annotated[int, Field(ge=1)] = 1024
    """Maximum size of a response of the server, in KiB. A larger response is rejected without being read."""

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
    """``[reward.python]``: a function from a Python file in the folder of the run file."""

    path: FilePath
    """Path of the ``.py`` file, relative to the run file's folder. The file must be inside this folder."""
    function: str = "score"
    """Name of the function in the file."""
    allow_local_code: bool = False
    """Permission to run the file. The file runs with your permissions. The reward requires the value ``true``."""
    conversational: bool = False
    """Pass prompts and completions as lists of ``{role, content}``, as TRL does. A prompt is the row's `messages`; without them, one message of the user."""
    arguments: dict[str, Any] = {}
    """Additional arguments of the function. They replace columns of the same name."""

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
        "gsm8k": Reward(load=f"{here}.numeric:gsm8k", answers=True),
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
