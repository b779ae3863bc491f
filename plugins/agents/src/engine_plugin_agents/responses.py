"""OpenAI's responses: read a request of ``POST /v1/responses`` and write its answer. Nothing is stored between requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, PositiveInt, Tag, model_validator

from engine_plugin_agents.chat_completions import Drawn, TextFormat
from engine_plugin_agents.conversations import Answer, Message, Question


class ItemPart(BaseModel):
    """A part of a message's content."""

    type: Literal["input_text", "output_text"]
    text: str


class MessageItem(BaseModel):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ItemPart]


class CallItem(BaseModel):
    """A tool call of an earlier answer."""

    call_id: str
    name: str
    arguments: str


class OutputItem(BaseModel):
    """The answer of a tool."""

    call_id: str
    output: str | list[ItemPart]


class ReasoningItem(BaseModel):
    """The reasoning of another model, which is left out."""


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(BaseModel):
    """A tool that the policy may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function = {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.parameters or {},
        }
        return {"type": "function", "function": function}


class TextOptions(BaseModel):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ResponsesRequest(Drawn):
    """A request. Fields that are not listed here, such as ``reasoning``, have no effect."""

    model: str = "policy"
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    max_output_tokens: PositiveInt | None = None
    previous_response_id: None = None
    text: TextOptions | None = None
    stream: bool | None = None

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> ResponsesRequest:
        last = self.input[-1] if isinstance(self.input, list) else None
        if isinstance(last, CallItem) or (isinstance(last, MessageItem) and last.role == "assistant"):
            raise ValueError("the last item must not be the assistant's")
        return self

    def question(self) -> Question:
        """Return the request in the terms of chat templates: a text and calls in a row are one message."""
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[Message] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in items:
            if isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": _joined(item.content)})
            elif isinstance(item, OutputItem):
                messages.append(
                    {"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id}
                )
            elif isinstance(item, CallItem):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        tools = [tool.plain() for tool in self.tools or ()] or None
        return Question(messages, tools, self.max_output_tokens, drawn=self.drawn)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of the response."""
        number, cut = answer.turn.number, answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        text = {"type": "output_text", "text": answer.content, "annotations": []}
        message = {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "status": status,
            "content": [text],
        }
        calls = [
            {
                "type": "function_call",
                "id": f"fc_{id}",
                "call_id": id,
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
                "status": "completed",
            }
            for id, call in answer.calls
        ]
        before, said = len(answer.turn.before), len(answer.turn.token_ids)
        return {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": self.model,
            "output": [*([message] if answer.content or not calls else []), *calls],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "usage": {
                "input_tokens": before,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": said,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": before + said,
            },
        }

    def events(self, answer: Answer) -> Iterator[str]:
        """Yield the response as server-sent events. A turn is sampled as a whole, so each item is one delta."""
        whole, number = self.whole(answer), 0

        def event(kind: str, **body: Any) -> str:
            """Return one event; events are numbered."""
            nonlocal number
            number += 1
            body = {"type": f"response.{kind}", "sequence_number": number - 1, **body}
            return f"event: response.{kind}\ndata: {json.dumps(body)}\n\n"

        yield event("created", response={**whole, "status": "in_progress", "output": [], "usage": None})
        for index, item in enumerate(whole["output"]):
            place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
            empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
            yield event(
                "output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"}
            )
            if item["type"] == "message":
                [part] = item["content"]
                place["content_index"] = 0
                yield event("content_part.added", **place, part={**part, "text": ""})
                yield event("output_text.delta", **place, delta=part["text"], logprobs=[])
                yield event("output_text.done", **place, text=part["text"], logprobs=[])
                yield event("content_part.done", **place, part=part)
            else:
                written = item["arguments"]
                yield event("function_call_arguments.delta", **place, delta=written)
                yield event("function_call_arguments.done", **place, name=item["name"], arguments=written)
            yield event("output_item.done", output_index=index, item=item)
        yield event("incomplete" if answer.finish_reason == "length" else "completed", response=whole)


def _joined(content: str | list[ItemPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
