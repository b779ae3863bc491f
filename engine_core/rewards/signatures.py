"""Signatures of reward functions: their arguments, how they are called, and the values they may return.

The *form* of a function follows from the names of its arguments:

* plural (``completions``, ``prompts``, ...): called with lists, returns a list of that length;
* singular (``completion``, ``prompt``, ``solution_str``, ...): called for each sample, returns a number;
* neither: called with lists.

A function in plural form is called with a part of the step's samples, so that the samples spread over
workers. A function whose value for a sample depends on other samples must name ``group_ids``: it is called once
with all samples, and a failure is one of all samples.

Texts are always strings, also for conversations: the response as decoded, the prompt as rendered. The messages
after the prompt are in ``dialogues``, and what the policy wrote last, without answers of tools, in ``last_turns``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from engine_core.config.rewards import RewardConfig
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Rollout


def _last_turn(rollout: Rollout) -> str:
    """Return the policy's last turn as text; "" if the episode does not end with one."""
    if not rollout.messages:
        return rollout.text
    last = rollout.messages[-1]
    return last["content"] if last["role"] == "assistant" else ""


def _untimed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what took how long, so that a reward cannot depend on it."""
    return {name: value for name, value in message.items() if name not in ("seconds", "calls")}


OFFERED: Mapping[str, Callable[[Rollout], Any]] = {
    "completions": lambda r: r.text,
    "prompts": lambda r: r.prompt.text,
    "completion_ids": lambda r: r.token_ids[r.prompt_length :].tolist(),
    "prompt_ids": lambda r: r.prompt.token_ids,
    "token_ids": lambda r: r.token_ids.tolist(),  # prompt and response
    "response_lengths": lambda r: r.response_length,  # tokens
    "finish_reasons": lambda r: r.finish_reason,
    "group_ids": lambda r: r.group_id,
    "dialogues": lambda r: [_untimed(m) for m in r.messages] or [{"role": "assistant", "content": r.text}],
    "last_turns": _last_turn,
}
"""What the engine offers besides the columns of the data, which may not take these names."""

PLURAL = frozenset(
    {"completions", "prompts", "response_lengths", "finish_reasons", "group_ids", "dialogues", "last_turns"}
)
SINGULAR = {
    "completion": "completions",
    "solution_str": "completions",  # verl
    "prompt": "prompts",
    "response_length": "response_lengths",
    "finish_reason": "finish_reasons",
    "dialogue": "dialogues",
    "last_turn": "last_turns",
}
COLUMN_ALIASES = {"ground_truth": "answer"}  # verl; used where the data has no column of that name
TRL_NAMES = ("prompts", "completions", "completion_ids")  # passed to **columns with the columns

ASYNC_GRACE_SECONDS = 0.5  # the event loop times out single samples; the guard acts only if the loop hangs
TRACE_CHARACTERS = 3000
ANSWER_CHARACTERS = 1000


@dataclass(frozen=True)
class Signature:
    """The facts about a function that its caller needs; plain values, so that a worker can send them."""

    per_sample: bool
    asynchronous: bool
    whole_batch: bool  # names group_ids: one call with all samples
    names: tuple[str, ...]  # arguments to fill, without options
    required: tuple[str, ...]  # those without a default
    all_columns: bool  # has **kwargs

    @property
    def streams(self) -> bool:
        """Whether samples are scored one after another, so that the sample at which a worker was lost is known."""
        return self.per_sample and not self.asynchronous


@dataclass(frozen=True)
class Outcome:
    """The outcome of one sample: a value (None: not applicable), or a failure."""

    value: float | None = None
    failure: str = ""  # "", "error", "timeout"
    message: str = ""
    trace: str = ""
    contract: bool = False  # the function broke its contract for all samples of the call
    answer: str | None = None  # the response's answer, as the function read it


OnFailure = Callable[[str, int, Outcome], None]  # reward, position of the sample, its outcome


class BadResult(Exception):
    """An error: a function returned a value that is not a reward; the message names the expected form."""


class RewardFunction:
    """A reward function with its options.

    Args:
        name: name of the reward, for messages.
        function: any callable that takes named arguments, synchronous or asynchronous. The arguments that a
            ``functools.partial`` binds by name are not filled from columns.
        options: the arguments that its option table fills.

    Raises:
        ConfigError: the function cannot be called by argument names, or does not take one of the options.
    """

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.name, self.function, self.options = name, function, dict(options)
        self.bound: dict[str, Any] = function.keywords if isinstance(function, partial) else {}
        self.signature = _inspect(name, function, {**self.bound, **self.options})

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function, which may modify the arguments; options and bound arguments win over columns."""
        return self.function(**{**arguments, **self.bound, **copy.deepcopy(self.options)})


def load_reward(
    name: str, plugins: PluginSet, options: Mapping[str, Any] | None, timeout: float
) -> RewardFunction:
    """Load a reward of a plugin and check its options; this imports the plugin's code.

    Args:
        name: as in ``[[reward]] name``.
        plugins: the set of plugins that offers it.
        options: its option table; None: all defaults.
        timeout: seconds that a call may take.

    Raises:
        PluginError: the plugin is broken, or the factory failed.
        ConfigError: the function cannot be called by argument names, or does not take one of the options.
    """
    spec, function = plugins.spec("rewards", name), plugins.resolve("rewards", name)
    values = option_values(spec.config.model_validate(options or {}))
    if not getattr(spec, "factory", False):
        return RewardFunction(name, function, values)
    make = plugins.guarded("rewards", name, partial(call_factory, function))
    return RewardFunction(name, make(values, plugins, timeout), {})


def option_values(table: Any) -> dict[str, Any]:
    """Return the values of an option table by field."""
    return {field: getattr(table, field) for field in type(table).model_fields}


def call_factory(
    function: Callable[..., Any], values: Mapping[str, Any], plugins: PluginSet, timeout: float
) -> Any:
    """Call a factory, or the ``check`` of a reward, with its options and what it names of the run.

    Args:
        function: it may name ``root``, ``allow_code``, ``timeout`` and ``modules``, see ``engine_core.specs.Reward``.
        values: the options by name.
        plugins: plugins of the run.
        timeout: seconds that a call of the reward may take.
    """
    context = {
        "root": plugins.root,
        "allow_code": plugins.allow_code,
        "timeout": timeout,
        "modules": plugins.modules,
    }
    taken = inspect.signature(function).parameters.keys() - values.keys()
    return function(**values, **{name: value for name, value in context.items() if name in taken})


def check_function(reward: RewardConfig, plugins: PluginSet) -> None:
    """Refuse a reward that cannot be called by argument names, if its code is already imported.

    A function that a plugin names by an import path is not imported here. It, and the columns of the data, are
    checked when a run starts.

    Args:
        reward: its ``[[reward]]`` table.
        plugins: plugins of the run file.

    Raises:
        ConfigError: the function cannot be called by argument names, or does not take one of the options.
    """
    spec: Any = None if reward.has_model else plugins.spec("rewards", reward.name)
    if spec is not None and not isinstance(spec.load, str) and not spec.factory:
        RewardFunction(reward.name, spec.load, dict.fromkeys(spec.config.model_fields))


def _inspect(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Signature:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"Reward '{name}' is {function!r}, whose arguments cannot be read. Wrap it in a def."
        ) from exc
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]:
        raise ConfigError(
            f"Reward '{name}' has the positional-only argument '{positional[0]}'; arguments are given by name."
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if not accepts_all and option not in {p.name for p in named}:
            known = did_you_mean(option, [p.name for p in named])
            raise ConfigError(
                f"Reward '{name}' declares the option '{option}' but has no such argument.{known}"
            )
    taken = [p for p in named if p.name not in options]
    singular = [p.name for p in taken if p.name in SINGULAR]
    plural = [p.name for p in taken if p.name in PLURAL]
    if singular and plural:
        raise ConfigError(
            f"Reward '{name}' names '{singular[0]}' (one sample a call) and '{plural[0]}' (lists). Name one form."
        )
    plain = inspect.unwrap(function.func if isinstance(function, partial) else function)
    return Signature(
        per_sample=bool(singular),
        asynchronous=inspect.iscoroutinefunction(plain)
        or inspect.iscoroutinefunction(getattr(plain, "__call__", None)),  # noqa: B004
        whole_batch="group_ids" in plural,
        names=tuple(p.name for p in taken),
        required=tuple(p.name for p in taken if p.default is p.empty),
        all_columns=accepts_all,
    )


def arguments(
    name: str, signature: Signature, rollouts: Sequence[Rollout], columns: Iterable[str] = ()
) -> dict[str, list[Any]]:
    """Return the values of the arguments that a function takes, each a list with one entry per rollout.

    Args:
        name: name of the reward.
        signature: signature of its function.
        rollouts: to score.
        columns: columns of the data, which these rollouts may lack: their values are then None.

    Raises:
        DataError: an argument without a default is neither in ``OFFERED`` nor a column.
    """
    columns = dict.fromkeys([*columns, *(column for r in rollouts for column in r.prompt.columns)])
    if rollouts:
        check_columns(name, signature, columns)
    wanted = dict.fromkeys(signature.names)
    if signature.all_columns:
        wanted |= columns | ({} if signature.per_sample else dict.fromkeys(TRL_NAMES))
    values: dict[str, list[Any]] = {}
    for argument in wanted:
        offered = SINGULAR.get(argument, argument)
        column = argument if argument in columns else COLUMN_ALIASES.get(argument, argument)
        if offered in OFFERED:
            values[argument] = [OFFERED[offered](r) for r in rollouts]
        elif column in columns:
            values[argument] = [r.prompt.columns.get(column) for r in rollouts]
    return values


def check_columns(name: str, signature: Signature, columns: Collection[str]) -> None:
    """Refuse, before anything is sampled, a function that needs a column that the data lacks.

    Args:
        name: name of the reward.
        signature: signature of its function.
        columns: columns of the data.

    Raises:
        DataError: an argument without a default is neither in ``OFFERED`` nor a column.
    """
    for argument in signature.required:
        column = argument if argument in columns else COLUMN_ALIASES.get(argument, argument)
        if SINGULAR.get(argument, argument) not in OFFERED and column not in columns:
            known = did_you_mean(argument, [*columns, *OFFERED, *SINGULAR])
            raise DataError(f"Reward '{name}' needs '{argument}', which is no column of the data.{known}")


def evaluate(
    reward: RewardFunction,
    columns: Mapping[str, Sequence[Any]],
    count: int,
    timeout: float,
    guard: Callable[[float], AbstractContextManager[Any]],
) -> Iterator[tuple[int | None, Outcome]]:
    """Call a function on ``count`` samples.

    Args:
        reward: the function.
        columns: argument values, each with ``count`` entries.
        count: number of samples.
        timeout: seconds for a call; for an asynchronous function in singular form, seconds for a sample.
        guard: context manager around every call, built with the seconds that the call may take.

    Yields:
        Position and outcome, in order of completion; position None: the outcome of the whole call.
    """
    signature = reward.signature
    rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    if signature.streams:
        for position, row in enumerate(rows):
            try:
                with guard(timeout):
                    outcome = outcome_of(reward.name, reward.call(row))
            except (Exception, SystemExit) as exc:
                outcome = failed(exc)
            yield position, outcome
        return
    try:
        with guard(timeout + ASYNC_GRACE_SECONDS if signature.per_sample else timeout):
            if signature.per_sample:
                results = _run(_gather(reward, rows, timeout))
            else:
                results = numbers_of(reward.name, _finish(reward.call(columns)), count)
    except (Exception, SystemExit) as exc:
        yield None, failed(exc)
    else:
        yield from enumerate(results)


def _finish(result: Any) -> Any:
    async def wait() -> Any:
        """Await the result."""
        return await result

    return _run(wait()) if inspect.isawaitable(result) else result


def _run(made: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end; in a thread if this one has a running loop, as a notebook's cell has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(made)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, made).result()


async def _gather(reward: RewardFunction, rows: Sequence[Mapping[str, Any]], timeout: float) -> list[Outcome]:
    async def one(row: Mapping[str, Any]) -> Outcome:
        """Score one sample; turn a timeout or an exception into a failed outcome."""
        try:
            return outcome_of(reward.name, await asyncio.wait_for(reward.call(row), timeout))
        except TimeoutError:
            return Outcome(failure="timeout", message=f"no answer after {timeout:g} s")
        except Exception as exc:
            return failed(exc)

    return list(await asyncio.gather(*(one(row) for row in rows)))


def outcome_of(name: str, value: Any) -> Outcome:
    """Return the outcome for a function's value: a number, or a dict with ``score`` and perhaps ``pred``, the answer.

    Raises:
        BadResult: the value is not a finite number or None.
    """
    said = value.get("pred") if isinstance(value, dict) else None
    return Outcome(number(name, value), answer=None if said is None else str(said)[:ANSWER_CHARACTERS])


def number(name: str, value: Any) -> float | None:
    """Convert one reward to a float: a number, a scalar of NumPy or torch on any device, a bool, verl's dict, or None.

    Raises:
        BadResult: the value is of another type, or not finite.
    """
    if isinstance(value, dict) and "score" in value:
        value = value["score"]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise BadResult(f"Reward '{name}' must give a number or None for each sample, got {_shown(value)}.")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise BadResult(f"Reward '{name}' must give a finite number for each sample, got {result}.")
    return result


def numbers_of(name: str, result: Any, count: int) -> list[Outcome]:
    """Return the outcome of each sample of one call in plural form; an entry that is an exception is a failed sample.

    Raises:
        BadResult: the result is not a list, tuple, array or tensor of ``count`` entries. Scalars are not broadcast.
    """
    wanted = f"Reward '{name}' must return a list of {count} numbers, one for each sample, got"
    shape = getattr(result, "shape", None)
    if shape is not None and hasattr(result, "tolist"):
        if len(shape) != 1:
            raise BadResult(f"{wanted} {type(result).__name__} of shape {tuple(shape)}.")
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise BadResult(f"{wanted} {_shown(result)}.")
    if len(result) != count:
        raise BadResult(f"{wanted} a {type(result).__name__} of length {len(result)}.")
    return [_checked(name, value) for value in result]


def _checked(name: str, value: Any) -> Outcome:
    if isinstance(value, Exception):
        late = isinstance(value, TimeoutError)
        return replace(failed(value), failure="timeout" if late else "error", trace="")  # it was not raised
    try:
        return outcome_of(name, value)
    except BadResult as exc:
        return failed(exc)


def failed(exc: BaseException) -> Outcome:
    """Return the failed outcome for an exception, with the traceback from the function's own frame on.

    The message ends without a full stop, because it becomes a part of sentences.
    """
    if isinstance(exc, BadResult):
        return Outcome(failure="error", message=str(exc).rstrip("."), contract=True)
    frame = exc.__traceback__
    while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    trace = "".join(traceback.format_exception(type(exc), exc, frame))[-TRACE_CHARACTERS:]
    return Outcome(failure="error", message=f"{type(exc).__name__}: {exc}"[:500].rstrip("."), trace=trace)


def _shown(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


class InProcess:
    """A reward that runs in the controller: ``workers = 0``, or a Python function given to the trainer.

    An exception fails the samples of its call: one in singular form, all in plural form. The function cannot be killed:
    if it hangs or crashes the interpreter, so does the run.
    """

    def __init__(self, reward: RewardFunction, timeout: float) -> None:
        self.name, self.reward, self.timeout = reward.name, reward, timeout
        self.signature: Signature | None = reward.signature
        self.outcomes: list[Outcome | None] = []
        self.restarts = 0

    def run(self, columns: Mapping[str, Sequence[Any]], count: int, on_failure: OnFailure) -> None:
        """Score all samples; call ``on_failure`` for each failed one."""
        own = {name: [copy.deepcopy(value) for value in values] for name, values in columns.items()}
        self.outcomes = [None] * count
        for position, outcome in evaluate(self.reward, own, count, self.timeout, contextlib.nullcontext):
            for failing in range(count) if position is None else (position,):
                self.outcomes[failing] = outcome
                if outcome.failure:
                    on_failure(self.name, failing, outcome)
