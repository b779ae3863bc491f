"""What a chat template is to render, and texts that several families share."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

YEAR = str(datetime.datetime.now().year)
THINK = ("<think>", "</think>")
TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass
class Family:
    """One template, its tokens, and what it is to render.

    Attributes:
        special: special tokens.
        eos: the end of sequence.
        prompt: the prompt of ``Hi``.
        more: what follows the end of a turn for the message ``More?``.
        tool: what follows the end of a turn for the answer ``42`` of a tool.
        learned: of the whole dialogue, turns separated by a bar.
        whole: the text of the whole dialogue.
        system: the prompt of the system message ``Rule`` and ``Hi``.
        end: what follows a turn that was cut, before ``more``.
        added: added tokens that are not special.
        bos: the beginning of a sequence.
        notes: of `ChatFormat`, about ``tool``.
        system_notes: of `ChatFormat`, about ``system``.
        ends: ids of ``generation_config.json``, as tokens.
        calls: what is learned of a call and the response after its answer; None: the template leaves calls out.
        ended_with: what the policy samples at the end of a call, where it is not ``end``.
    """

    special: tuple[str, ...]
    eos: str
    prompt: str
    more: str
    tool: str
    learned: str
    whole: str
    system: str
    end: str = ""
    added: tuple[str, ...] = ()
    bos: str | None = None
    notes: tuple[str, ...] = ()
    system_notes: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    calls: str | None = None
    ended_with: str = ""


def chatml(*turns: str) -> str:
    roles = ("user", "assistant") * 2
    return "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, turns, strict=False)
    )


IM = "<|im_start|>assistant\n"
QWEN_TOOL = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
QWEN_MORE = "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
DEFAULT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
RULE = "<|im_start|>system\nRule<|im_end|>\n"
HERMES = '<tool_call>\n{"name": "f", "arguments": {"q": "6*7"}}\n</tool_call><|im_end|>'
XML = "<tool_call>\n<function=f>\n<parameter=q>\n6*7\n</parameter>\n</function>\n</tool_call><|im_end|>"
GEMMA_DIALOGUE = (
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nMore?<end_of_turn>\n<start_of_turn>model\nBye<end_of_turn>\n"
)
GEMMA_MORE = "\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA_MORE = HEADER.format("user") + "More?<|eot_id|>" + HEADER.format("assistant")
LLAMA_DIALOGUE = "".join(
    HEADER.format(role) + text + "<|eot_id|>"
    for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "More?"), ("assistant", "Bye"))
)
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
DATE = HEADER.format("system") + f"Today Date: {YEAR}\n\n"
OSS = f"<|start|>system<|message|>You are a large language model.\nCurrent date: {YEAR}<|end|>"
JOINED = "consecutive user messages are joined"
AS_USER = "answers of tools are rendered as user messages"
SYSTEM_JOINED = "the system message is put before the next user message"
GRANITE = f"<|start_of_role|>system<|end_of_role|>Today is {YEAR}.<|end_of_text|>\n"
ROLE = "<|start_of_role|>{}<|end_of_role|>"
BEGUN = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"
COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
