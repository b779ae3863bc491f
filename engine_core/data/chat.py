"""Chat templates: rendering of prompts, further turns, tools and learned conversations to token ids.

The tokenizer's template renders everything. Two kinds of placeholders, each a number between two private-use
characters, pass through a rendering:

- *control strings*. External text (a row, the result of a tool) must not produce control tokens. Each control
  string in it is replaced by a placeholder before the rendering and encoded as plain text afterwards. Only the
  text between placeholders is encoded with special tokens. A text without control strings gets the tokens of
  the plain rendering.
- *marks*, which represent no text. They show where a message ends in the rendering of the whole conversation,
  and whether the template omitted a message. Prefixes of conversations are never compared, because many
  templates render earlier turns differently once others follow.

If a template refuses or omits a role, the messages are changed, see `NOTES`; each kind of change is logged once.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.data.layouts import Message
from engine_core.data.rows import BadRow
from engine_core.data.tokenizer import end_ids
from engine_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = Sequence[int]
Messages = list[Message]
Tools = Sequence[Mapping[str, Any]] | None
Spans = list[tuple[int, int]]

OPEN, CLOSE = "\ue000", "\ue001"
PLACEHOLDER = re.compile(f"{OPEN}([0-9]+){CLOSE}")
GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
MERGE, SYSTEM, TOOL = 1, 2, 4
NOTES = {
    MERGE: "consecutive user messages are joined",
    SYSTEM: "the system message is put before the next user message",
    TOOL: "answers of tools are rendered as user messages",
}
"""Changes to messages that a template refuses; all combinations are tried in the order of their sum."""
USER: Message = {"role": "user", "content": "a"}
CALLED = {"tool_call_id": "call00001", "name": "f"}  # Mistral's templates accept this id
ANSWER: Message = {"role": "tool", "content": "c", **CALLED}
SYSTEM_ROLES = ("system", "developer")
UNCLEAR = "so the assistant's tokens cannot be identified. Use a template with {% generation %} marks"

logger = logging.getLogger("engine")


@dataclass(slots=True)
class Rendered:
    """The rendering of a row: text, tokens and loss mask."""

    text: str  #: the whole row as text
    token_ids: list[int]  #: [T] ids of the text
    loss_mask: list[bool]  #: True on the tokens that the assistant wrote
    messages: list[Message] | None = None  #: the row as messages; None for plain text


class ChatFormat:
    """The chat template of one tokenizer.

    Args:
        tokenizer: a tokenizer with a chat template, unless only ``text`` is called.
        control_tokens: ``text``: control tokens in messages become plain text; ``allow``: they are recognized.
        arguments: further arguments of the template, such as ``enable_thinking``.

    Attributes:
        ends: tokens that end a response, of the tokenizer and of the model's generation config.
        notes: changes to messages that the template has needed so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        control_tokens: str = "text",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.notes, self._arguments = tokenizer, set[str](), dict(arguments or {})
        self._source = str(tokenizer.chat_template or "")
        added = list(tokenizer.added_tokens_decoder.values())
        self._special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        known = self._special | {str(token) for token in added if str(token) in self._source}
        self._controls = [*sorted(known), OPEN, CLOSE]
        hidden = known if control_tokens == "text" else set[str]()
        self._outside = _any_of({*hidden, OPEN, CLOSE})
        self._own = _any_of({*hidden & self._special, OPEN, CLOSE})
        self.ends = set(tokenizer.convert_ids_to_tokens(sorted(end_ids(tokenizer))))
        self._cuts = _any_of({*known, "\n"})
        self._shapes: dict[Any, tuple[int, int]] = {}
        self._closing = functools.cache(self._find_closing)
        self._header = functools.lru_cache(64)(self._find_header)
        self._as_text = functools.cache(self._encode_control)
        if not hidden:
            _log_once('[data] control_tokens = "allow": text of messages can forge roles and ends of turns')

    def text(self, text: str) -> list[int]:
        """Return the tokens of an external text in the middle of a sequence."""
        return self._encode(self._hide(text, self._outside))[0]

    def prompt(self, messages: list[Message], tools: Tools = None) -> Rendered:
        """Render messages with the generation prompt; a last message of the assistant is continued instead.

        Raises:
            BadRow: the template refuses the messages, or omits one.
        """
        continued = messages[-1]["role"] == "assistant"
        asks = {"add_generation_prompt": not continued}
        return self._rendered(messages, tools, asks, continue_final_message=continued)

    def whole(self, messages: list[Message], tools: Tools = None) -> Rendered:
        """Render a conversation, including the text that the template writes after the last message.

        Raises:
            BadRow: the template refuses the messages, or omits one.
        """
        return self._rendered(messages, tools, {})

    def _rendered(self, messages: Messages, tools: Tools, asks: dict[str, bool], **more: bool) -> Rendered:
        tools = self._hide(tools, self._outside)
        _, shaped = self._shape([self._hidden(messages)], tools, **asks)
        text = self._template(shaped, tools, **asks, **more)
        return Rendered(self._shown(text), *self._encode(text), messages)

    def following(self, messages: Messages, before: Ids, tools: Tools = None, stops: Ids = ()) -> list[int]:
        """Return the tokens after a sampled turn: its end if that is missing, messages, and the generation prompt.

        Args:
            messages: messages of any role, such as ``{"role": "tool", "content": "84"}``. Answers with a
                ``tool_call_id`` follow the calls that the sampled turn made; their ``name`` is that of the tool.
            before: the sequence so far; it ends with the sampled turn, which is not changed.
            tools: the prompt's tools.
            stops: further tokens that stop sampling; special tokens among them end a turn.

        Raises:
            DataError: the template cannot render the messages.
        """
        hidden, tools = self._hidden(messages), self._hide(tools, self._outside)
        named = [{**CALLED, **message} if message["role"] == "tool" else message for message in hidden]
        stub, answers = self._mark(1), [message for message in named if message["role"] == "tool"] or [CALLED]
        variants = [[USER, _turn(stub, False), *hidden], [USER, _turn(stub, True, answers), *named]]
        called = any("tool_call_id" in message for message in hidden)  # first as a call
        try:
            number, shaped = self._shape(variants[:: -1 if called else 1], tools, add_generation_prompt=True)
            text, marks = self._unmarked(self._template(shaped, tools, add_generation_prompt=True))
        except BadRow as error:
            raise DataError(
                f"The chat template cannot append messages to a sampled turn: {error}. Use episode.append(text, "
                "control_tokens=True) with the text that the model expects; see 'engine check-template'."
            ) from error
        call = bool(number) != called
        at, closing = marks[-1][1], self._closing(call)
        found = _any_of(closing | self.ends, "+").search(text, at)
        last = str(self.tokenizer.convert_ids_to_tokens(before[-1])) if before else ""
        ended = last in closing | self.ends or (last in self._special and before[-1] in stops)
        if found and ended:
            # If the template writes no end, the sampled end may be the template's next header.
            _, shown, rest = found[0].partition(last)
            at = found.end() - len(rest) if shown or closing else found.start()
        elif found and call:
            at = found.start()
        return self._encode(text[at:])[0]

    def conversation(self, messages: list[Message], first: int = 0, tools: Tools = None) -> Rendered:
        """Render a whole conversation and mark the tokens that the assistant wrote, the end of each turn included.

        A turn begins after its generation prompt. A first message of the assistant is not learned, because no
        prompt precedes it.

        Args:
            messages: all messages, from the system message on.
            first: index of the first message that may be learned.
            tools: tools that the template may show.

        Raises:
            BadRow: the template refuses the messages, or the assistant's tokens cannot be identified.
            DataError: the tokenizer is not a fast one.
        """
        if not self.tokenizer.is_fast:
            raise DataError("Learning conversations needs a fast tokenizer (it must know character offsets).")
        tools = self._hide(tools, self._outside)
        _, shaped = self._shape([self._hidden(messages)], tools)
        turns = [i for i, message in enumerate(shaped) if message["role"] == "assistant"]
        skipped = sum(message["role"] == "assistant" for message in messages[:first])
        text, spans = self._generated(shaped, tools)
        if spans is None or (skipped and len(spans) != len(turns)):
            marks = self._ends_of(shaped, text, tools)
            spans = [self._span(shaped, i, text, marks) for i in turns[skipped:] if i > 0]
        else:
            spans = spans[skipped:]
        return Rendered(self._shown(text), *self._encode(text, spans), messages)

    def _shape(self, variants: list[Messages], tools: Tools, **asks: bool) -> tuple[int, Messages]:
        """Return the first variant that the template renders completely, with the changes that it needs.

        The search runs once for each sequence of roles.
        """
        roles = tuple((message["role"], *message) for message in variants[0])
        key = (len(variants), roles, bool(tools), *asks.values())
        if key not in self._shapes:
            self._shapes[key] = self._find_shape(variants, tools, **asks)
        number, flags = self._shapes[key]
        return number, _reshaped(variants[number], flags)

    def _find_shape(self, variants: list[Messages], tools: Tools, **asks: bool) -> tuple[int, int]:
        problems = []
        for flags, number in itertools.product(range(sum(NOTES) + 1), range(len(variants))):
            shaped = _reshaped(variants[number], flags)
            try:
                text, marks = self._marked(shaped, tools, **asks)
                if lost := [m["role"] for i, m in enumerate(shaped) if i not in marks and not _is_empty(m)]:
                    raise BadRow(f"the chat template leaves out a message of the role '{lost[0]}'")
            except BadRow as error:
                problems.append(error)
                continue
            self.notes.update(note for flag, note in NOTES.items() if flags & flag)
            if tools and self._marked(shaped, None, **asks)[0] == text:
                self.notes.add("tools are left out")
            for note in sorted(self.notes):
                _log_once(f"The chat template supports less than the conversations need: {note}")
            return number, flags
        raise problems[0]

    def _generated(self, messages: list[Message], tools: Tools) -> tuple[str, Spans | None]:
        """Return the rendering and the spans within ``{% generation %}``; None if the template has no such marks."""
        source: str = self.tokenizer.get_chat_template(tools=tools)  # type: ignore[arg-type]
        template, count = GENERATION.subn(rf"{{%\1 if true %}}{self._mark(0)}{{% endif \3%}}", source)
        text, marks = self._unmarked(self._template(messages, tools, chat_template=template))
        places = [place for _, place in marks]
        return text, list(zip(places[::2], places[1::2], strict=True)) if count else None

    def _span(self, messages: list[Message], i: int, text: str, marks: dict[int, int]) -> tuple[int, int]:
        """Return the span of ``text`` that the assistant wrote as message ``i``: content, tool calls and the end."""
        about = ((k, v) for k, v in messages[i - 1].items() if k != "content" and isinstance(v, str))
        core, prompt = self._header(*about)
        before, at, call = marks.get(i - 1, 0), marks[i], bool(messages[i].get("tool_calls"))
        if not text.startswith(core, before):
            raise BadRow(f"the chat template begins message {i} unlike a generation prompt, {UNCLEAR}")
        shared = _shared(prompt, text[before:at])
        cuts = (found.end() for found in self._cuts.finditer(prompt))
        start = before + max(len(core), *(cut for cut in (*cuts, len(prompt), 0) if cut <= shared))
        ends = _any_of(self._closing(call) | self.ends, "+")
        found = ends.search(text, at, marks.get(i + 1, len(text)))
        if call and not found:
            raise BadRow(f"the chat template writes no end token after the tool calls of message {i}")
        return start, found.end() if found and (call or not text[at : found.start()].strip()) else at

    def _find_header(self, *previous: tuple[str, str]) -> tuple[str, str]:
        """Return the text between a message and the assistant's content, in earlier turns and as generation prompt."""
        turn: Message = {**dict(previous), "content": "b"}
        context = {"assistant": [USER], "tool": [USER, _turn("d", True)]}.get(turn["role"], [])
        at, messages = len(context), [*context, turn]
        later, marks = self._marked([*messages, _turn("d", False), USER], None)
        prompt, places = self._marked(messages, None, add_generation_prompt=True)
        prompt, later = prompt[places[at] :], later[marks[at] : marks[at + 1] - len("d")]
        shared = _shared(prompt, later)
        if prompt[shared:].strip() and later[shared:].strip():
            raise BadRow(f"the chat template begins a turn unlike a generation prompt, {UNCLEAR}")
        return prompt[:shared], prompt

    def _find_closing(self, call: bool) -> set[str]:
        """Return the tokens that the template writes at the end of the last turn or of an earlier one, if any."""
        turn, ends = [USER, _turn("b", call)], set[str]()
        with suppress(BadRow):
            for messages in [turn] if call else [turn, [*turn, USER]]:
                text, marks = self._marked(messages, None)
                if not (found := _any_of(self._special).findall(text, marks.get(1, len(text)))):
                    break
                ends.add(found[-1 if call else 0])  # a tool call may contain others, such as quotes
        return ends

    def _ends_of(self, messages: list[Message], text: str, tools: Tools) -> dict[int, int]:
        """Return the end of each message in the rendering ``text``, without white space that the template trims."""
        for candidate in (messages, [{**m, "content": m["content"].strip()} for m in messages]):
            plain, marks = self._marked(candidate, tools)
            if plain == text:
                return marks
        raise BadRow(f"the chat template renders messages differently if they have more text, {UNCLEAR}")

    def _marked(self, messages: Sequence[Message], tools: Tools, **asks: bool) -> tuple[str, dict[int, int]]:
        """Render messages with a mark at the end of each; return the text without marks, and each mark's position."""
        marked = [m if _is_empty(m) else _with_mark(m, self._mark(i)) for i, m in enumerate(messages)]
        text, marks = self._unmarked(self._template(marked, tools, **asks))
        return text, dict(reversed(marks))  # the first position, if a template repeats a text

    def _unmarked(self, text: str) -> tuple[str, Spans]:
        """Return ``text`` without its marks, and the number and position of each mark."""
        parts, marks, at, length = list[str](), Spans(), 0, 0
        for found in PLACEHOLDER.finditer(text):
            if (number := int(found[1]) - len(self._controls)) >= 0:
                parts.append(text[at : found.start()])
                at, length = found.end(), length + len(parts[-1])
                marks.append((number, length))
        return "".join([*parts, text[at:]]), marks

    def _mark(self, number: int) -> str:
        return f"{OPEN}{len(self._controls) + number}{CLOSE}"

    def _hidden(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with control strings replaced; in the assistant's messages only special ones are."""
        shaped = (self._with_arguments(message) for message in messages)
        return [self._hide(m, self._own if m["role"] == "assistant" else self._outside) for m in shaped]

    def _with_arguments(self, message: Message) -> Message:
        """Return a message whose tool calls have arguments of a type that the template renders correctly."""
        calls, kinds = list[Any](), self._argument_types
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments")
            if isinstance(arguments, str) and str not in kinds:
                with suppress(ValueError):  # text that is not JSON is kept
                    arguments = json.loads(arguments)
            elif isinstance(arguments, Mapping) and dict not in kinds:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {**function, "arguments": arguments} if "arguments" in function else function
            calls.append({**call, "function": function} if "function" in call else function)
        return {**message, "tool_calls": calls} if calls else message

    @functools.cached_property
    def _argument_types(self) -> set[type]:
        """The types of tool call arguments that the template renders correctly: dict, str (JSON), or both.

        Both are also returned if the template renders neither.
        """
        both: set[type] = {dict, str}
        wrong, (call,) = set[type](), _turn("", True)["tool_calls"]
        for arguments, mistake in (({"x": "8-d-8"}, "{'x'"), ('{"x": "8-d-8"}', '\\"')):
            shown = {**call, "function": {"name": "f", "arguments": arguments}}
            try:
                text = self._render([USER, {**_turn("", True), "tool_calls": [shown]}], None)
            except BadRow:
                text = mistake
            if mistake in text or "8-d-8" not in text:
                wrong.add(type(arguments))
        return both - wrong if len(wrong) == 1 else both

    def _hide(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: f"{OPEN}{self._controls.index(found[0])}{CLOSE}", value)
        if isinstance(value, Mapping):
            return {self._hide(key, pattern): self._hide(item, pattern) for key, item in value.items()}
        return [self._hide(item, pattern) for item in value] if isinstance(value, list | tuple) else value

    def _shown(self, text: str) -> str:
        return PLACEHOLDER.sub(lambda found: self._controls[int(found[1])], text)

    def _template(self, messages: Sequence[Message], tools: Tools, **options: Any) -> str:
        return self._render([self._with_arguments(message) for message in messages], tools, **options)

    def _render(self, messages: Sequence[Message], tools: Tools, **options: Any) -> str:
        from jinja2 import TemplateError

        if not self._source:
            raise DataError(
                "The tokenizer has no chat template, so messages cannot be rendered. Use the tokenizer of an instruct "
                "model; without a template, rows are plain text and an environment calls episode.append(text)."
            )
        render: Callable[..., Any] = self.tokenizer.apply_chat_template  # in transformers' sandbox
        try:
            asked = self._arguments | options
            return str(render(messages, **asked | {"tools": tools or None, "tokenize": False}))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise BadRow(f"the chat template refuses it ({error})") from error

    def _encode(self, text: str, spans: Spans | None = None) -> tuple[list[int], list[bool]]:
        """Return tokens, and for each whether it lies in a span; placeholders are encoded as plain text."""
        ids, mask, at, learned = list[int](), list[bool](), 0, bytearray(len(text))
        for start, end in spans or ():
            learned[start:end] = b"1" * (end - start)
        for found in (*PLACEHOLDER.finditer(text), None):
            piece = text[at : found.start() if found else len(text)]
            with tokenizing():
                encoded: Any = self.tokenizer(
                    piece, add_special_tokens=False, return_offsets_mapping=bool(spans), verbose=False
                )
            ids += encoded["input_ids"]
            places = encoded["offset_mapping"] if spans else ()
            mask += [a < b and bool(learned[at + a] and learned[at + b - 1]) for a, b in places]
            if found:
                written, at = self._as_text(int(found[1])), found.end()
                ids += written
                mask += [bool(learned[at - 1])] * len(written)
        return ids, mask if spans else [False] * len(ids)

    def _encode_control(self, number: int) -> list[int]:
        """Return the tokens of a control string as plain text, without control tokens."""
        string = self._controls[number]
        known: Any = self.tokenizer.convert_tokens_to_ids(self._controls[:-2])
        for parts in ([string], [string[0], string[1:]], list(string)):
            with tokenizing():
                encoded = self.tokenizer(parts, add_special_tokens=False, split_special_tokens=True)
            ids = [i for each in encoded["input_ids"] for i in each]
            if {*ids} & {*known} <= {self.tokenizer.unk_token_id}:
                return ids
        raise BadRow(f"it holds the control token {string!r}, which the tokenizer cannot write as text")


@contextmanager
def tokenizing() -> Iterator[None]:
    """Raise errors of the tokenizer as `BadRow`."""
    try:
        yield
    except Exception as error:  # the tokenizers library raises plain Exception
        raise BadRow(f"the tokenizer refuses it ({error})") from error


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)


def _any_of(strings: Collection[str], times: str = "") -> re.Pattern[str]:
    """Return a pattern that matches the longest of these strings; without strings it matches nothing."""
    longest = sorted(filter(None, strings), key=len, reverse=True)
    return re.compile(f"(?:{'|'.join(map(re.escape, longest)) or '(?!)'}){times}")


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _turn(text: str, call: bool, answers: Sequence[Message] = (CALLED,)) -> Message:
    """Return a turn of the assistant that says ``text``, or makes the calls of ``answers`` with it."""
    if not call:
        return {"role": "assistant", "content": text}
    calls = []
    for answer in answers:
        function = {"name": answer["name"], "arguments": {"x": text}}
        calls.append({"id": answer["tool_call_id"], "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _is_empty(message: Message) -> bool:
    """Return whether a message is a system message without text, which templates render differently."""
    return message["role"] in SYSTEM_ROLES and not message["content"]


def _with_mark(message: Message, mark: str) -> Message:
    """Return ``message`` with a mark at the end of its content, or of the last text in its last tool call."""
    if not message.get("tool_calls"):
        return {**message, "content": f"{message['content']}{mark}"}
    *calls, last = message["tool_calls"]
    function = last.get("function", last)
    arguments, changed = function.get("arguments"), dict[str, Any]()
    if isinstance(arguments, str):
        changed = {"arguments": arguments + mark}
    elif texts := [key for key, value in dict(arguments or {}).items() if isinstance(value, str)]:
        changed = {"arguments": {**arguments, texts[-1]: arguments[texts[-1]] + mark}}
    else:
        changed = {"name": f"{function.get('name')}{mark}"}
    changed = {**function, **changed}
    changed = {**last, "function": changed} if "function" in last else changed
    return {**message, "tool_calls": [*calls, changed]}


def _reshaped(messages: Sequence[Message], flags: int) -> list[Message]:
    """Return ``messages`` with the changes that ``flags`` name, see `NOTES`."""
    moved = {*(SYSTEM_ROLES if flags & SYSTEM else ()), *(("tool",) if flags & TOOL else ())}
    result, joins = list[Message](), False
    for message in messages:
        role = "user" if message["role"] in moved else message["role"]
        if joins and role == "user":
            contents = filter(None, (result[-1]["content"], message["content"]))
            result[-1] = {"role": role, "content": "\n\n".join(contents)}
        else:
            result.append(
                message if role == message["role"] else {"role": role, "content": message["content"]}
            )
        joins = role == "user" and (bool(flags & MERGE) or message["role"] in SYSTEM_ROLES)
    return result
