"""Checks of an environment before a run starts, and of the rollouts that it returns."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from engine_core.data.rows import BadRow
from engine_core.errors import ConfigError, DataError, PluginError, did_you_mean
from engine_core.types import Rollout
from engine_plugin_agents.reader import parameters_of

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.config.models import EnvironmentConfig
    from engine_core.data.chat import ChatFormat
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import Environment
    from engine_plugin_agents.episode import Episode

Play = Callable[["Episode"], Awaitable[Any]]


def load_environment(config: EnvironmentConfig, plugins: PluginSet) -> tuple[Play, str]:
    """Load the environment.

    Returns:
        The function that plays an episode, with its options bound, and a label for messages.

    Raises:
        PluginError: the environment is not asynchronous, or cannot be called with an episode and its options.
    """
    found = plugins.resolve("environments", config.name)
    label = f"{plugins.chosen['environments', config.name][1].label}: environment '{config.name}'"
    options = config.options.model_dump() if config.options else {}
    if isinstance(found, type):
        _check_call(label, f"{found.__name__}({_named(options)})", found, (), options)
        made = found(**options)
        _check_async(label, getattr(found, "__call__", None), f"{found.__name__}.__call__")  # noqa: B004
        _check_call(label, f"{found.__name__}(...)(episode)", made, ("episode",), {})
        return made, label
    _check_async(label, found, getattr(found, "__name__", repr(found)))
    _check_call(
        label, f"f(episode{', *, ' + _named(options) if options else ''})", found, ("episode",), options
    )

    def play(episode: Episode) -> Awaitable[Any]:
        """Play an episode with the environment's options."""
        return cast("Awaitable[Any]", found(episode, **options))

    return play, label


def _named(options: Collection[str]) -> str:
    return ", ".join(sorted(options))


def _check_async(label: str, function: Any, shown: str) -> None:
    if not inspect.iscoroutinefunction(inspect.unwrap(function) if callable(function) else function):
        raise PluginError(
            f"{label}: {shown} must be an 'async def' that takes an episode and returns its rollout. Blocking code "
            "goes into 'await episode.call(function)'."
        )


def _check_call(label: str, call: str, found: Any, given: tuple[str, ...], options: dict[str, Any]) -> None:
    try:
        inspect.signature(found).bind(*given, **options)
    except TypeError as error:
        raise PluginError(f"{label} must be callable as {call}: {error}.") from error


def check_reward_names(config: EnvironmentConfig, spec: Environment, others: Collection[str]) -> None:
    """Refuse weights of rewards that the environment does not set, and reward names that ``[[reward]]`` also has.

    Raises:
        ConfigError: such a name exists; the message suggests the nearest known name.
    """
    problems = [
        f"environment.reward_weights: environment '{config.name}' sets no reward '{name}'."
        f"{did_you_mean(name, spec.rewards)}"
        for name in config.reward_weights
        if name not in spec.rewards
    ]
    problems += [
        f"Reward '{name}' is set by environment '{config.name}' and stands in [[reward]] too. Each name may stand "
        "once: take one out."
        for name in sorted(set(spec.rewards) & set(others))
    ]
    if problems:
        raise ConfigError(problems)


def check_columns(config: EnvironmentConfig, spec: Environment, columns: Collection[str]) -> None:
    """Refuse data that lacks a column which the environment needs.

    Raises:
        DataError: a column is missing.
    """
    for column in sorted(spec.needs - set(columns)):
        raise DataError(
            f"Environment '{config.name}' needs the column '{column}', which the data lacks."
            f"{did_you_mean(column, columns)}"
        )


def check_tools(label: str, tools: Sequence[Mapping[str, Any]], chat: ChatFormat, shown: bool) -> None:
    """Refuse an environment that declares a tool twice, and a chat template that does not show its tools.

    Args:
        label: the names of the environment and its plugin, for messages.
        tools: the JSON schemas of its tools, which prompts show.
        chat: the chat template of the policy's tokenizer.
        shown: whether prompts show tools; `data.columns.tools` = "" turns that off.

    Raises:
        PluginError: two tools have one name.
        ConfigError: the chat template leaves the tools out.
    """
    names = [name for tool in tools for name in parameters_of([tool])]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise PluginError(f"{label} declares the tool '{twice[0]}' twice. Remove one from its Environment.")
    if not (names and shown):
        return
    question = [{"role": "user", "content": "a"}]
    try:
        found = chat.prompt(question, tools).text != chat.prompt(question).text
        problem = "" if found else "shows no tools in prompts"
    except (BadRow, DataError) as error:
        problem = f"cannot show them ({error})"
    if problem:
        raise ConfigError(
            f"{label} declares tools ({', '.join(names)}), but the tokenizer's chat template {problem}. Use a tokenizer "
            "with tool support ('engine check-template FOLDER'), or describe the tools in the prompts and set "
            'data.columns.tools = "".'
        )


def check_rollout(label: str, made: Any, episode: Episode) -> Rollout:
    """Check the return value of an environment and its branches, and set ``extras["turns"]``.

    Args:
        label: the names of the environment and its plugin, for messages.
        made: the environment's return value.
        episode: the episode, whose policy has recorded the sampled turns.

    Returns:
        ``made``.

    Raises:
        PluginError: it is no rollout, has another prompt, is too long, or marks a token in ``loss_mask`` that the
            policy did not sample there.
    """
    if not isinstance(made, Rollout):
        shown = f"{made!r:.60} ({type(made).__name__})"
        raise PluginError(f"{label} must return a Rollout, such as episode.rollout(); it returned {shown}.")
    length, prompt = len(made.token_ids), made.prompt.token_ids
    for column in ("loss_mask", "rollout_log_probs", "policy_versions"):
        if len(getattr(made, column)) != length:
            raise PluginError(f"{label} gave {len(getattr(made, column))} {column} for {length} tokens.")
    if made.prompt.id != episode.prompt.id or made.token_ids[: len(prompt)].tolist() != prompt:
        raise PluginError(f"{label} returned a rollout that does not begin with its prompt's tokens.")
    if length > episode.policy.limits.tokens:
        raise PluginError(
            f"{label} returned {length} tokens; at most {episode.policy.limits.tokens} are allowed (environment.max_tokens)."
        )
    made.extras["turns"] = _check_sampled(label, made, episode)
    for branch in made.branches:
        check_rollout(label, branch, episode)
    return made


def _check_sampled(label: str, made: Rollout, episode: Episode) -> Tensor:
    """Check that the policy sampled each token of ``loss_mask`` after exactly the tokens before it, with its log-prob.

    Returns:
        [T] int32: 0 in the prompt, then the number of the turn that a token belongs to or follows.

    Raises:
        PluginError: a token of ``loss_mask`` was not sampled there, or has other log-probs or policy versions.
    """
    token_ids = made.token_ids.tolist()
    left, turns = made.loss_mask.bool().clone(), made.policy_versions.new_zeros(len(token_ids))
    problems: list[tuple[int, int, str]] = []  # first token, end, text; another turn may have the same tokens
    for turn in episode.policy.turns:
        start, end = len(turn.before), len(turn.before) + len(turn.token_ids)
        if token_ids[:end] != turn.before + turn.token_ids:
            continue
        learned = made.loss_mask[start:end].bool()
        if not bool((made.rollout_log_probs[start:end] == turn.log_probs)[learned].all()):
            problem = f"{label} gave turn {turn.number} log-probs that are not those it was sampled with."
            problems.append((start, end, problem))
        elif not bool((made.policy_versions[start:end] == turn.policy_versions)[learned].all()):
            problem = f"{label} gave turn {turn.number} policy versions that are not its own."
            problems.append((start, end, problem))
        else:
            left[start:end] = False
            turns[start:] = turn.number
    if bool(left.any()):
        at = int(left.nonzero()[0])
        for problem in (text for start, end, text in problems if start <= at < end):
            raise PluginError(problem)
        raise PluginError(
            f"{label} marks token {at} ({episode.tokenizer.decode(token_ids[at : at + 1])!r}) in loss_mask, which the "
            "policy did not sample there. Text must not be encoded again, and answers of tools are not learned; "
            "episode.rollout() keeps to it."
        )
    return turns
