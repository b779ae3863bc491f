"""The episode: the argument of an environment's function, from which it builds the rollout."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core import timeline
from engine_core.errors import did_you_mean
from engine_core.types import SUPPORT, Rollout, padded_support
from engine_plugin_agents.calls import (
    MESSAGE_CHARACTERS,
    ToolBroken,
    ToolCall,
    as_answer,
    error_text,
    limited,
    misfit,
)
from engine_plugin_agents.policy import LimitReached, Policy, Turn
from engine_plugin_agents.reader import parameters_of

if TYPE_CHECKING:
    from engine_core.data.chat import ChatFormat
    from engine_core.types import Prompt
    from engine_plugin_agents.reader import CallReader

__all__ = ["Episode", "LimitReached"]

TOOL_NAME = re.compile(r"[\w.-]{1,64}")
MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")  # the only ids that templates require to be of a form


class Episode:
    """An episode: a prompt, the policy, and the sequence of tokens so far.

    Example::

        async def solve(episode):
            while episode.goes_on:
                turn = await episode.sample(stop=["</calc>"])
                task = find_tag(turn.text, "calc")
                if task is None:
                    break
                episode.append("=" + await episode.call(calculate, task))
            return episode.rollout({"correct": float(turn.text.endswith(episode.prompt.columns["answer"]))})

    Args:
        policy: the policy, which samples for this episode only.
        chat: the chat template of the policy's tokenizer.
        reader: reads the tool calls of turns.
        names: names of the rewards that the environment sets.
    """

    def __init__(
        self, policy: Policy, chat: ChatFormat, reader: CallReader, names: frozenset[str] = frozenset()
    ) -> None:
        self.policy, self.chat, self.reader = policy, chat, reader  #: constructor argument
        self.prompt: Prompt = policy.request.prompt  #: with the row's columns
        self.tokenizer: Any = policy.tokenizer  #: the policy's tokenizer
        self.token_ids: list[int] = list(self.prompt.token_ids)  #: the sequence so far
        self.messages: list[
            dict[str, Any]
        ] = []  #: the same after the prompt, as text, with what took how long
        self.counts: Counter[str] = Counter()  #: tool_calls, tool_errors, tool_timeouts
        self.branches: list[
            Rollout
        ] = []  #: further sequences, which are learned with the rewards of this one
        self._names = names
        self._turns: list[tuple[int, Turn]] = []  # position of its first token, and the turn
        self._calls: list[dict[str, Any]] = []  # tool calls since the last message
        self._spoke = time.perf_counter()  # when the last message ended

    @property
    def seed(self) -> int:
        """A seed of this episode, equal in a repeated or resumed run: ``random.Random(episode.seed)``.

        The episodes of a group have different seeds; see ``row_seed``.
        """
        return self.policy.request.sampling.seed or 0

    @property
    def row_seed(self) -> int:
        """A 63-bit seed of the row, equal in all its episodes: for a task that a group shares, such as a game's secret."""
        return int.from_bytes(hashlib.sha256(self.prompt.id.encode()).digest()[:8], "big") >> 1

    @property
    def goes_on(self) -> bool:
        """Whether ``sample`` can be called again: a turn and a token are left."""
        return self.policy.turns_left > 0 and self.tokens_left > 0

    @property
    def tokens_left(self) -> int:
        """Number of tokens that still fit into the sequence."""
        return self.policy.limits.tokens - len(self.token_ids)

    async def sample(
        self,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Turn:
        """Sample a turn of the policy and append it to the sequence.

        Args:
            max_tokens, stop, stop_token_ids: as in ``Policy.sample``.

        Raises:
            LimitReached: no turn or no token is left; see ``goes_on``.
            RuntimeError: the sequence was changed while the turn was sampled.
        """
        start = len(self.token_ids)
        turn = await self.policy.sample(
            self.token_ids, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids
        )
        if self.token_ids != turn.before:
            raise RuntimeError(
                "The sequence was changed while the policy was asked to continue it. Await episode.sample() first; "
                "for several continuations of one sequence use episode.policy.sample."
            )
        self.token_ids += turn.token_ids
        self._turns.append((start, turn))
        self.messages.append(said(turn))
        self._spoke = time.perf_counter()
        return turn

    def follow(self, turns: Sequence[Turn], messages: Sequence[dict[str, Any]]) -> None:
        """Replace the sequence by another one that the policy sampled.

        Args:
            turns: at least one turn of ``policy.sample``, each of which continues the one before it. The tokens before
                the first one become the prompt's.
            messages: the texts after the prompt.
        """
        first, last = turns[0], turns[-1]
        self.prompt = dataclasses.replace(self.prompt, token_ids=first.before)
        self.token_ids = [*last.before, *last.token_ids]
        self._turns = [(len(turn.before), turn) for turn in turns]
        self.messages = [*messages]

    def append(self, text: str, role: str = "tool", *, control_tokens: bool = False) -> None:
        """Append a text that the policy did not sample, without the chat template.

        Args:
            text: the text, including any delimiters that the model expects.
            role: the message's role, for logs and rewards; the model does not see it.
            control_tokens: encode control tokens such as ``<|im_end|>`` in the text as such; only for trusted text. By
                default they are encoded as plain text, unless ``[data] control_tokens`` is ``allow``.

        Raises:
            LimitReached: the text does not fit; nothing was appended.
        """
        if control_tokens:
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            ids = self.chat.text(text)
        self._extend(ids, [{"role": role, "content": text}])

    def append_messages(self, *messages: dict[str, str]) -> None:
        """Append messages in the chat template's format, up to the beginning of the policy's next turn.

        Sampled tokens do not change. The end-of-turn token is added if the policy did not sample it.

        Args:
            messages: e.g. ``{"role": "tool", "content": "84"}``. A message of a role that the template does not know
                becomes a user message. Answers of tools without a ``name`` get the names of the last turn's calls, in
                order.

        Raises:
            LimitReached: the messages do not fit; nothing was appended.
            DataError: the tokenizer has no chat template that supports this.
        """
        stops, named = self.policy.request.sampling.stop_token_ids, self._named(messages)
        ids = self.chat.following(named, self.token_ids, self._tools, stops)
        self._extend(ids, named)

    def _named(self, messages: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
        """Return messages; answers of tools have the names of the last turn's calls, which some templates write."""
        answers = any(message["role"] == "tool" for message in messages)
        calls = self.tool_calls(self._turns[-1][1]) if answers and self._turns else ()
        names, named = iter([call.name for call in calls]), list[dict[str, Any]]()
        for message in messages:
            name = next(names, "") if message["role"] == "tool" else ""
            named.append({"name": name, **message} if TOOL_NAME.fullmatch(name) else {**message})
        return named

    @property
    def _tools(self) -> list[Mapping[str, Any]] | None:
        """The JSON schemas that the prompt shows, of the row or of the environment."""
        tools = self.prompt.columns.get("tools")
        usable = isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
        return tools if usable else None

    def _extend(self, token_ids: Sequence[int], messages: Sequence[dict[str, Any]]) -> None:
        """Append tokens and messages; the first one gets the tool calls and the time since the message before."""
        if len(token_ids) > self.tokens_left:
            raise LimitReached(f"{len(token_ids)} tokens do not fit: {self.tokens_left} are left")
        self.token_ids += token_ids
        if messages:
            now = time.perf_counter()
            messages[0]["seconds"] = round(now - self._spoke, 3)
            if self._calls:
                messages[0]["calls"] = self._calls
            self._calls, self._spoke = [], now
        self.messages += messages

    async def call(
        self, tool: Callable[..., Any], /, *arguments: Any, seconds: float | None = None, **named: Any
    ) -> str:
        """Run a tool and return its answer as text; an error or a timeout becomes a text too.

        Args:
            tool: a coroutine function, or a blocking function, which runs in a dedicated thread.
            arguments, named: the tool's arguments.
            seconds: time limit, after which the tool is abandoned; default: `environment.tool_timeout_seconds`.

        Raises:
            ToolBroken: the machine cannot run the tool.
        """
        limit = self.policy.limits.tool_seconds if seconds is None else seconds
        begun, failure = time.perf_counter(), ""
        try:
            with timeline.span(f"tool {_name(tool)}", "episodes", f"#{self.policy.request.id}"):
                answer = str(await limited(partial(tool, *arguments, **named), limit))
        except TimeoutError as error:
            failure, answer = "timeout", f"error: {error}"
        except ToolBroken:
            raise
        except Exception as error:
            failure, answer = "error", error_text(error)
        self._called(_name(tool), begun, failure)
        return as_answer(answer, self.policy.limits.tool_characters)

    def _called(self, name: str, begun: float, failure: str = "") -> None:
        """Count and note a tool call.

        Args:
            name: the tool.
            begun: when, by ``time.perf_counter``.
            failure: "", "error" or "timeout".
        """
        self.counts["tool_calls"] += 1
        if failure:
            self.counts[f"tool_{failure}s"] += 1
        noted = {"name": name, "seconds": round(time.perf_counter() - begun, 3)}
        self._calls.append(noted | ({"failure": failure} if failure else {}))

    def tool_calls(self, turn: Turn) -> list[ToolCall]:
        """Return the tool calls of a turn, read from its tokens in the form that `environment.tool_format` names."""
        return self.reader.read(turn.token_ids, self._tools)

    async def answer_calls(self, turn: Turn, tools: Mapping[str, Callable[..., Any]]) -> int:
        """Run the tool calls of a turn one after another and append the answers as ``tool`` messages.

        A call that cannot be read, names no tool or has wrong arguments is answered with its error.

        Args:
            turn: the result of ``sample``.
            tools: the tools, by the name that the policy uses.

        Returns:
            The number of calls in the turn; 0: nothing was appended.
        """
        answers = []
        for number, call in enumerate(self.tool_calls(turn), 1):
            id = call.id if MISTRAL_ID.fullmatch(call.id) else f"call{number:05}"
            answers.append({"role": "tool", "content": await self._answer(call, tools), "tool_call_id": id})
        if answers:
            self.append_messages(*answers)
        return len(answers)

    async def _answer(self, call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> str:
        problem, tool = call.problem, tools.get(call.name)
        if not problem and tool is None:
            problem = f"unknown tool '{call.name:.60}'.{did_you_mean(call.name, tools)}"
        elif not problem and tool is not None:
            problem = misfit(call, tool, parameters_of(self._tools).get(call.name, {}))
        if problem or tool is None:
            self._called(call.name, time.perf_counter(), "error")
            return as_answer(f"error: {problem}", MESSAGE_CHARACTERS)
        bound = partial(tool, **call.arguments)  # bound here: names such as "seconds" are the tool's
        return await self.call(bound)

    def rollout(self, rewards: Mapping[str, float | None] | None = None) -> Rollout:
        """Return the episode so far as a rollout.

        Args:
            rewards: values by the names that the environment declares; None or absent: the reward does not apply.

        Returns:
            A rollout whose ``loss_mask`` [T] is True exactly on sampled tokens. ``extras["turns"]`` [T] int32 is 0 in
            the prompt, then the number of the turn that a token belongs to or follows. ``finish_reason`` is that of the
            last turn, or ``length`` (truncated) where the sequence does not end with a turn.
        """
        import torch

        length, start = len(self.token_ids), len(self.prompt.token_ids)
        mask = torch.zeros(length, dtype=torch.bool)
        log_probs, versions = torch.zeros(length), torch.zeros(length, dtype=torch.int32)
        turns, extras = torch.zeros(length, dtype=torch.int32), _blank(self._turns, length)
        for at, turn in self._turns:
            part = slice(at, at + len(turn.token_ids))
            mask[part], log_probs[part], versions[part] = True, turn.log_probs, turn.policy_versions
            turns[at:] = turn.number
            for name, values in turn.extras.items():
                wide = padded_support(values, extras[name].shape[1]) if name == SUPPORT else values
                extras[name][part] = wide
        last = self._turns[-1] if self._turns else None
        spoke_last = last is not None and last[0] + len(last[1].token_ids) == length
        request = self.policy.request
        return Rollout(
            request_id=request.id,
            prompt=self.prompt,
            token_ids=torch.tensor(self.token_ids),
            loss_mask=mask,
            rollout_log_probs=log_probs,
            policy_versions=versions,
            finish_reason=last[1].finish_reason if last and spoke_last else "length",
            group_id=request.group_id,
            index=request.index,
            text=self.tokenizer.decode(self.token_ids[start:], skip_special_tokens=True),
            rewards={name: _number(name, value, self._names) for name, value in (rewards or {}).items()},
            messages=[dict(message) for message in self.messages],
            extras={**extras, "turns": turns},
            branches=[*self.branches],
        )


def said(turn: Turn) -> dict[str, Any]:
    """Return a turn as a message, with the time in which it was sampled."""
    return {"role": "assistant", "content": turn.text, "seconds": round(turn.seconds, 3)}


def _blank(turns: Sequence[tuple[int, Turn]], length: int) -> dict[str, Any]:
    """Return blank extras of the sequence's length: zeros, and -1 (no token) for the support."""
    found = {name: values for _, turn in turns for name, values in turn.extras.items()}
    blank = {name: values.new_zeros((length, *values.shape[1:])) for name, values in found.items()}
    if widths := [turn.extras[SUPPORT].shape[1] for _, turn in turns if SUPPORT in turn.extras]:
        blank[SUPPORT] = found[SUPPORT].new_full((length, max(widths)), -1)
    return blank


def _name(tool: Any) -> str:
    """Return the name of a tool, a function or an object, which may be bound to arguments."""
    found = getattr(tool, "func", tool)
    return str(getattr(found, "__name__", type(found).__name__))


def _number(name: str, value: Any, names: frozenset[str]) -> float | None:
    if name not in names:
        raise ValueError(
            f"reward '{name}' is not declared by the environment: Environment(..., rewards=frozenset({{'{name}'}}))."
            f"{did_you_mean(name, names)}"
        )
    if value is not None and not math.isfinite(float(value)):
        raise ValueError(f"reward '{name}' must be a finite number or None, got {value!r}")
    return None if value is None else float(value)
