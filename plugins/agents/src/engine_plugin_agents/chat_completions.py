"""OpenAI's chat completions: read a request of ``POST /v1/chat/completions`` and write its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, PositiveInt, model_validator

from engine_plugin_agents.conversations import Answer, Question

Text = dict[str, Any]


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """The function of a tool call."""

    name: str
    arguments: str


class Call(BaseModel):
    """A tool call of an earlier answer."""

    id: str = ""
    function: Function


class ChatMessage(BaseModel):
    """A message of a request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    def plain(self) -> Text:
        """Return the message as chat templates take it."""
        parts = (
            [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        )
        made: Text = {"role": self.role, "content": "".join(parts)}
        if self.tool_calls:
            made["tool_calls"] = [{"type": "function", **call.model_dump()} for call in self.tool_calls]
        return made | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


def _function(tool: Text) -> Text:
    if tool.get("type", "function") != "function":
        raise ValueError("the type must be 'function'")
    return tool


class TextFormat(BaseModel):
    """The form of the answer; constrained decoding would sample from another distribution than the policy's."""

    type: Literal["text"]


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class Drawn(BaseModel):
    """The sampling parameters of a request, which a run that trains ignores: it samples as ``[rollout]`` says."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def drawn(self) -> dict[str, float]:
        """The parameters that are set."""
        given = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in given.items() if value is not None}


class Asking(Drawn):
    """A request whose last message is not the assistant's."""

    messages: Any

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message must not be the assistant's")
        return self


class ChatRequest(Asking):
    """A request. Fields that are not listed here, such as ``seed``, have no effect."""

    model: str = "policy"
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Annotated[Text, AfterValidator(_function)]] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None
    n: Literal[1] | None = None
    response_format: TextFormat | None = None
    logprobs: Literal[False] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def question(self) -> Question:
        """Return the request in the terms of chat templates."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Question(
            [message.plain() for message in self.messages],
            self.tools or None,
            self.max_completion_tokens or self.max_tokens,
            [text for text in stop if text] if stop else None,
            self.drawn,
        )

    def whole(self, answer: Answer) -> Text:
        """Return the body of the response."""
        message: Text = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = _calls(answer)
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        return self._head(answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[str]:
        """Yield the response as server-sent events. A turn is sampled as a whole, so it is one event."""
        delta: Text = {"role": "assistant", "content": answer.content}
        if answer.calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(_calls(answer))]
        head = self._head(answer, "chat.completion.chunk")
        for part, reason in ((delta, None), ({}, answer.finish_reason)):
            choice = {"index": 0, "delta": part, "finish_reason": reason, "logprobs": None}
            yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
        if self.stream_options and self.stream_options.include_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': _usage(answer)})}\n\n"
        yield "data: [DONE]\n\n"

    def _head(self, answer: Answer, kind: str) -> Text:
        head = {"id": f"chatcmpl-{answer.turn.number}", "object": kind}
        return head | {"created": int(time.time()), "model": self.model}


def _calls(answer: Answer) -> list[Text]:
    return [
        {
            "id": id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for id, call in answer.calls
    ]


def _usage(answer: Answer) -> Text:
    before, said = len(answer.turn.before), len(answer.turn.token_ids)
    return {"prompt_tokens": before, "completion_tokens": said, "total_tokens": before + said}


def error_body(status: int, code: str, message: str) -> Text:
    """Return the body of an error, in the form of both protocols."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": code}}
