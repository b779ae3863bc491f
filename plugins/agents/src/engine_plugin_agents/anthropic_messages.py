"""Anthropic's messages: read a request of ``POST /v1/messages`` and write its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PositiveInt

from engine_plugin_agents.chat_completions import Asking, TextPart
from engine_plugin_agents.conversations import Answer, Message, Question

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Text = str | list[TextPart]


class ToolUse(BaseModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResult(BaseModel):
    """The answer of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""


Block = Annotated[TextPart | ToolUse | ToolResult, Field(discriminator="type")]


class BlockMessage(BaseModel):
    """A message of a request."""

    role: Literal["user", "assistant"]
    content: str | list[Block]

    def plain(self) -> Iterator[Message]:
        """Yield the messages as chat templates take them: the answers of tools are messages."""
        blocks = [] if isinstance(self.content, str) else self.content
        for block in (block for block in blocks if isinstance(block, ToolResult)):
            yield {"role": "tool", "content": _joined(block.content), "tool_call_id": block.tool_use_id}
        texts = [block for block in blocks if isinstance(block, TextPart)]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in blocks
            if isinstance(block, ToolUse)
        ]
        text = self.content if isinstance(self.content, str) else _joined(texts)
        if text or calls or not blocks:
            yield {"role": self.role, "content": text} | ({"tool_calls": calls} if calls else {})


class Tool(BaseModel):
    """A tool that the policy may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class MessagesRequest(Asking):
    """A request. Fields that are not listed here, such as ``thinking``, have no effect."""

    model: str = "policy"
    messages: list[BlockMessage] = Field(min_length=1)
    system: Text = ""
    tools: list[Tool] | None = None
    max_tokens: PositiveInt | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def question(self) -> Question:
        """Return the request in the terms of chat templates."""
        system = _joined(self.system)
        return Question(
            [
                *([{"role": "system", "content": system}] if system else []),
                *(plain for message in self.messages for plain in message.plain()),
            ],
            [tool.plain() for tool in self.tools or ()] or None,
            self.max_tokens,
            [text for text in self.stop_sequences or () if text] or None,
            self.drawn,
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of the response."""
        text = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
        calls = [
            {"type": "tool_use", "id": id, "name": call.name, "input": call.arguments}
            for id, call in answer.calls
        ]
        reason = "stop_sequence" if answer.stop else REASONS[answer.finish_reason]
        before, said = len(answer.turn.before), len(answer.turn.token_ids)
        return {
            "id": f"msg_{answer.turn.number}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [*text, *calls],
            "stop_reason": reason,
            "stop_sequence": answer.stop,
            "usage": {"input_tokens": before, "output_tokens": said},
        }

    def events(self, answer: Answer) -> Iterator[str]:
        """Yield the response as server-sent events. A turn is sampled as a whole, so each block is one delta."""
        whole = self.whole(answer)
        ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_start", message={**whole, "content": [], **dict.fromkeys(ends)})
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                written = json.dumps(block["input"], ensure_ascii=False)
                empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=ends, usage=whole["usage"])
        yield _event("message_stop")


def _event(kind: str, **body: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n"


def _joined(content: Text) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
