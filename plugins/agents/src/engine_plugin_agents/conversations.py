"""The conversations of one episode whose harness talks to the policy endpoint: a tree of sampled turns.

A request whose messages begin with an earlier conversation, the policy's answer included, continues the tokens of that
conversation: the sampled ones stay as sampled, and only the messages after the answer are rendered. Any other request
begins a branch, whose messages are rendered from the start. So a harness may repeat a request, send several at once, or
rewrite its history: each answer continues the conversation that its request shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_core.data.rows import BadRow
from engine_core.errors import DataError
from engine_plugin_agents.episode import said
from engine_plugin_agents.policy import LimitReached, Turn
from engine_plugin_agents.reader import parameters_of

if TYPE_CHECKING:
    from engine_core.types import Rollout
    from engine_plugin_agents.calls import ToolCall
    from engine_plugin_agents.episode import Episode

Message = dict[str, Any]

SHOWN = ("role", "content", "name")
"""Fields of a message that are recorded."""
KEPT = 256
"""Turns and tool calls that ``RecentConversations`` remembers."""


class Refused(Exception):
    """A request that is answered with an HTTP error.

    Args:
        status: the HTTP status.
        code: a name of the error, for programs.
        message: what is wrong and what to do.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Question:
    """A request for one answer, in the terms of chat templates, whatever its protocol."""

    messages: Sequence[Message]  # "role", "content", perhaps "tool_calls" or "tool_call_id"
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas
    max_tokens: int | None = None
    stop: Sequence[str] | None = None
    drawn: Mapping[str, Any] = field(default_factory=dict)  # "temperature", "top_p"; ignored in training


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled turn, as a harness reads it."""

    turn: Turn
    content: str  # the text before any tool call, without the end of the turn and the stop string
    calls: Sequence[tuple[str, ToolCall]] = ()  # id and call
    finish_reason: str = "stop"  # "stop", "length", "tool_calls"
    stop: str | None = None  # the stop string that ended the turn

    def message(self) -> Message:
        """Return the answer as a message of a conversation."""
        calls = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in self.calls
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A conversation up to a sampled turn."""

    turns: tuple[Turn, ...] = ()  # each continues the one before it
    messages: tuple[Message, ...] = ()  # after those of the first request, for rewards and logs
    ended: float = 0.0  # when its last turn was sampled


class Conversations:
    """The tree of conversations of an episode.

    The episode's sequence is the branch with the most turns, the newest among equals.

    Args:
        episode: the episode, whose policy answers.
    """

    serves = False  #: whether requests choose sampling parameters, and reencoded_tokens are not counted

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self._branches: dict[bytes, Branch] = {}  # by the messages that they show
        self._ends: list[Branch] = []  # those that no request has continued
        self._longest = Branch()
        self._calls: dict[str, str] = {}  # the tool of each call so far, by the call's id
        episode.counts.update(branches=0, reencoded_tokens=0)

    async def answer(self, question: Question) -> Answer:
        """Sample the answer to a request.

        Raises:
            Refused: the episode has no turn or token left, or the chat template refuses the messages.
        """
        asked = time.perf_counter()
        names = Counter(name for tool in question.tools or () for name in parameters_of([tool]))
        if twice := [name for name, count in names.items() if count > 1]:
            raise Refused(400, "invalid_request", f"tools: the tool '{twice[0]}' is declared twice.")
        begun, key, count = self._find(question)
        policy = self.episode.policy
        try:
            if names:
                self.episode.reader.note_tools()
            before = self._render(question, begun, count) if policy.turns_left > 0 else []
            drawn: Mapping[str, Any] = question.drawn if self.serves else {}
            turn = await policy.sample(before, max_tokens=question.max_tokens, stop=question.stop, **drawn)
        except (BadRow, DataError) as error:
            raise Refused(400, "messages_refused", f"The messages cannot be rendered: {error}") from error
        except LimitReached as error:
            no_turn = policy.turns_left < 1
            code = "turn_limit_reached" if no_turn else "context_length_exceeded"
            # statuses after which clients do not try again
            raise Refused(403 if no_turn else 400, code, f"The budget is used up: {error}.") from error
        answer = self._read(question, turn)
        new = [self._plain(message) for message in question.messages[count:]] if begun.turns else []
        if new:
            new[0]["seconds"] = round(asked - begun.ended, 3)
        messages, turns = (*begun.messages, *new, said(turn)), (*begun.turns, turn)
        branch = Branch(turns, messages, time.perf_counter())
        self._keep(begun, _digest(key, _identity(answer.message())), branch)
        return answer

    def others(self) -> list[Rollout]:
        """Return the rollouts of all branches but the episode's sequence; each turn is learned in one of them only."""
        learned, made = {turn.number for turn in self._longest.turns}, []
        for branch in (branch for branch in self._ends if branch is not self._longest):
            self.episode.follow(branch.turns, branch.messages)
            rollout = self.episode.rollout()
            for turn in (turn for turn in branch.turns if turn.number in learned):
                part = slice(len(turn.before), len(turn.before) + len(turn.token_ids))
                rollout.loss_mask[part], rollout.rollout_log_probs[part] = False, 0.0
            learned |= {turn.number for turn in branch.turns}
            made.append(rollout)
        if made:
            self.episode.follow(self._longest.turns, self._longest.messages)
        return made

    def _find(self, question: Question) -> tuple[Branch, bytes, int]:
        """Return the longest branch that a request continues, the request's key, and the number of known messages."""
        key = _digest(b"", question.tools or [])
        found, count = Branch(), 0
        for i, message in enumerate(question.messages, 1):
            key = _digest(key, _identity(message))
            if key in self._branches:
                found, count = self._branches[key], i
        return found, key, count

    def _render(self, question: Question, branch: Branch, count: int) -> list[int]:
        """Return the tokens before the answer, and count those of the policy's messages that had to be rendered."""
        chat, new, tools = self.episode.chat, [*map(self._named, question.messages[count:])], question.tools
        for message in (message for message in new if message["role"] == "assistant" and not self.serves):
            calls = message.get("tool_calls")
            text = message["content"] + (json.dumps(calls) if calls else "")
            self.episode.counts["reencoded_tokens"] += len(chat.text(text))
        if not branch.turns:
            return chat.prompt(new, tools).token_ids
        last, stops = branch.turns[-1], self.episode.policy.request.sampling.stop_token_ids
        before = [*last.before, *last.token_ids]
        return before + chat.following(new, before, tools, stops)

    def _named(self, message: Message) -> Message:
        """Return a message; the answer of a tool gets the tool's name, which some templates write."""
        tool = self._calls.get(message.get("tool_call_id") or "")
        return {"name": tool, **message} if tool and message["role"] == "tool" else message

    def _plain(self, message: Message) -> Message:
        """Return a message for rewards and logs; the answer of a tool has the tool's name."""
        return {name: value for name, value in self._named(message).items() if name in SHOWN}

    def _read(self, question: Question, turn: Turn) -> Answer:
        tokenizer, text = self.episode.tokenizer, turn.text
        found = min(
            ((at, stop) for stop in question.stop or () if (at := text.find(stop)) >= 0), default=None
        )
        at, stop = found or (len(text), None)
        text = text[:at]
        said = turn.token_ids if stop is None else tokenizer.encode(text, add_special_tokens=False)
        shown, calls = self.episode.reader.read_answer(said, question.tools)
        text = text if shown is None else shown
        first = self.episode.counts["tool_calls"] + 1
        self.episode.counts["tool_calls"] += len(calls)
        # Mistral's templates accept ids of nine letters
        named = [(f"call{number:05d}", call) for number, call in enumerate(calls, first)]
        self._calls |= {id: call.name for id, call in named}
        reason = "length" if turn.finish_reason != "stop" else "tool_calls" if calls else "stop"
        return Answer(turn, text, named, reason, stop)

    def _keep(self, begun: Branch, key: bytes, branch: Branch) -> None:
        """Add a branch that continues ``begun``; the episode follows it if it is the longest."""
        self._ends = [*(end for end in self._ends if end is not begun), branch]
        self._branches[key] = branch
        self.episode.counts["branches"] = len(self._ends)
        if len(branch.turns) >= len(self._longest.turns):
            self._longest = branch
            self.episode.follow(branch.turns, branch.messages)


class RecentConversations(Conversations):
    """The conversations of a server that trains nothing and runs without end: those of the last ``KEPT`` turns."""

    serves = True

    def _keep(self, begun: Branch, key: bytes, branch: Branch) -> None:
        """Add a branch as the newest, and forget the oldest."""
        self._branches.pop(key, None)
        self._branches[key] = branch
        remembered: list[dict[Any, Any]] = [self._branches, self._calls]
        for kept in remembered:
            while len(kept) > KEPT:
                del kept[next(iter(kept))]


def _identity(message: Message) -> list[Any]:
    """Return what two messages must share to be the same; clients change white space, ids and the form of arguments."""
    calls = [_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
    role, content = message["role"], message["content"]
    own = role == "assistant"
    return [role, content.strip() if own else content, calls, "" if own else message.get("tool_call_id")]


def _call(function: Mapping[str, Any]) -> list[Any]:
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):  # a text that is not JSON is compared as it is
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [function.get("name"), arguments]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
