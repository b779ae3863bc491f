"""Tokenizers with templates that behave like those of published families, and what each is to render.

``FAMILIES`` is written by hand, from the behavior of the families and not with `ChatFormat`. The dialogue is
``Hi`` - ``Hello`` - ``More?`` - ``Bye``, the answer of a tool ``42``; see `Family`.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
YEAR = str(datetime.datetime.now().year)
THINK = ("<think>", "</think>")
TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass
class Family:
    """One template, its tokens, and what it is to render.

    Attributes:
        special: special tokens.
        added: added tokens that are not special.
        eos: the end of sequence.
        bos: the beginning of a sequence.
        prompt: the prompt of ``Hi``.
        more: what follows the end of a turn for the message ``More?``.
        end: what follows a turn that was cut, before ``more``.
        tool: what follows the end of a turn for the answer ``42`` of a tool; empty: see ``tool_refused``.
        notes: parts of the notes about ``tool``.
        learned: of the whole dialogue, turns separated by a bar.
        whole: the text of the whole dialogue.
        tool_dialogue: messages with calls can be learned.
        system: the prompt of the system message ``Rule`` and ``Hi``.
        ends: ids of ``generation_config.json``, as tokens.
        calls: text that the assistant is to learn for a call and an answer, turns separated by a bar.
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


def _chatml(*turns: str) -> str:
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

FAMILIES = {
    "qwen2_5": Family(
        CHATML,
        "<|im_end|>",
        DEFAULT + _chatml("Hi") + IM,
        QWEN_MORE,
        QWEN_TOOL,
        "Hello<|im_end|>|Bye<|im_end|>",
        DEFAULT + _chatml("Hi", "Hello", "More?", "Bye"),
        RULE + _chatml("Hi") + IM,
        "<|im_end|>",
        TOOLS,
        calls="\n" + HERMES + "|It is 42<|im_end|>",
    ),
    "qwen3": Family(
        CHATML,
        "<|im_end|>",
        _chatml("Hi") + IM,
        QWEN_MORE,
        QWEN_TOOL,
        "Hello<|im_end|>|<think>\n\n</think>\n\nBye<|im_end|>",
        _chatml("Hi", "Hello", "More?", "<think>\n\n</think>\n\nBye"),
        RULE + _chatml("Hi") + IM,
        "<|im_end|>",
        TOOLS + THINK,
        ends=("<|im_end|>", "<|endoftext|>"),
        calls=HERMES + "|<think>\n\n</think>\n\nIt is 42<|im_end|>",
    ),
    "qwen3_5": Family(
        CHATML,
        "<|im_end|>",
        _chatml("Hi") + IM + "<think>\n",
        QWEN_MORE + "<think>\n",
        QWEN_TOOL + "<think>\n",
        "Hello<|im_end|>|\n</think>\n\nBye<|im_end|>",
        _chatml("Hi", "Hello", "More?", "<think>\n\n</think>\n\nBye"),
        RULE + _chatml("Hi") + IM + "<think>\n",
        "<|im_end|>",
        TOOLS + THINK,
        calls="\n</think>\n\n" + XML + "|\n</think>\n\nIt is 42<|im_end|>",
    ),
    "qwen3_5_nothink": Family(
        CHATML,
        "<|im_end|>",
        _chatml("Hi") + IM + "<think>\n\n</think>\n\n",
        QWEN_MORE + "<think>\n\n</think>\n\n",
        QWEN_TOOL + "<think>\n\n</think>\n\n",
        "Hello<|im_end|>|Bye<|im_end|>",
        _chatml("Hi", "Hello", "More?", "<think>\n\n</think>\n\nBye"),
        RULE + _chatml("Hi") + IM + "<think>\n\n</think>\n\n",
        "<|im_end|>",
        TOOLS + THINK,
        calls=XML + "|It is 42<|im_end|>",
    ),
    "qwq": Family(
        CHATML,
        "<|im_end|>",
        _chatml("Hi") + IM + "<think>\n",
        QWEN_MORE + "<think>\n",
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "Hello<|im_end|>|Bye<|im_end|>",
        _chatml("Hi", "Hello", "More?", "Bye"),
        RULE + _chatml("Hi") + IM + "<think>\n",
        "<|im_end|>",
        THINK,
    ),
    "smollm3_generation": Family(
        CHATML,
        "<|im_end|>",
        _chatml("Hi") + IM,
        QWEN_MORE,
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n",
        "Hello<|im_end|>|Bye<|im_end|>",
        _chatml("Hi", "Hello", "More?", "Bye"),
        RULE + _chatml("Hi") + IM,
        "<|im_end|>",
    ),
    "gpt_oss": Family(
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"),
        "<|return|>",
        OSS + "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|start|>user<|message|>More?<|end|><|start|>assistant",
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant',
        "<|channel|>final<|message|>Hello<|end|>|<|channel|>final<|message|>Bye<|return|>",
        OSS + "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello<|end|>"
        "<|start|>user<|message|>More?<|end|><|start|>assistant<|channel|>final<|message|>Bye<|return|>",
        OSS + "<|start|>developer<|message|># Instructions\n\nRule<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|end|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        ended_with="<|call|>",
        calls=' to=functions.f<|channel|>commentary json<|message|>{"q": "6*7"}<|call|>'
        "|<|channel|>final<|message|>It is 42<|return|>",
    ),
    "phi3": Family(
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        "<|endoftext|>",
        "<s><|user|>\nHi<|end|>\n<|assistant|>\n",
        "\n<|user|>\nMore?<|end|>\n<|assistant|>\n",
        "\n<|user|>\n42<|end|>\n<|assistant|>\n",
        "Hello<|end|>|Bye<|end|>",
        "<s><|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nMore?<|end|>\n<|assistant|>\nBye<|end|>\n",
        "<s><|user|>\nRule\n\nHi<|end|>\n<|assistant|>\n",
        "<|end|>",
        bos="<s>",
        notes=(AS_USER,),
        system_notes=(SYSTEM_JOINED,),
    ),
    "phi3_5": Family(
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        "<|endoftext|>",
        "<|user|>\nHi<|end|>\n<|assistant|>\n",
        "\n<|user|>\nMore?<|end|>\n<|assistant|>\n",
        "\n<|user|>\n42<|end|>\n<|assistant|>\n",
        "Hello<|end|>|Bye<|end|>",
        "<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nMore?<|end|>\n<|assistant|>\nBye<|end|>\n<|endoftext|>",
        "<|system|>\nRule<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n",
        "<|end|>",
        notes=(AS_USER,),
    ),
    "phi4": Family(
        (*CHATML, "<|im_sep|>"),
        "<|im_end|>",
        "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>",
        "<|im_start|>user<|im_sep|>More?<|im_end|><|im_start|>assistant<|im_sep|>",
        "<|im_start|>tool<|im_sep|>42<|im_end|><|im_start|>assistant<|im_sep|>",
        "Hello<|im_end|>|Bye<|im_end|>",
        "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Hello<|im_end|>"
        "<|im_start|>user<|im_sep|>More?<|im_end|><|im_start|>assistant<|im_sep|>Bye<|im_end|>",
        "<|im_start|>system<|im_sep|>Rule<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>",
        "<|im_end|>",
    ),
    "gemma2": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        GEMMA_MORE.format("More?"),
        GEMMA_MORE.format("42"),
        "Hello<end_of_turn>|Bye<end_of_turn>",
        GEMMA_DIALOGUE,
        "<bos><start_of_turn>user\nRule\n\nHi<end_of_turn>\n<start_of_turn>model\n",
        "<end_of_turn>",
        bos="<bos>",
        notes=(AS_USER,),
        system_notes=(SYSTEM_JOINED,),
    ),
    "gemma3": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        GEMMA_MORE.format("More?"),
        GEMMA_MORE.format("42"),
        "Hello<end_of_turn>|Bye<end_of_turn>",
        GEMMA_DIALOGUE,
        "<bos><start_of_turn>user\nRule\n\nHi<end_of_turn>\n<start_of_turn>model\n",
        "<end_of_turn>",
        bos="<bos>",
        notes=(AS_USER,),
    ),
    "llama2": Family(
        ("<s>", "</s>"),
        "</s>",
        "<s>[INST] Hi [/INST]",
        "<s>[INST] More? [/INST]",
        "<s>[INST] 42 [/INST]",
        " Hello </s>| Bye </s>",
        "<s>[INST] Hi [/INST] Hello </s><s>[INST] More? [/INST] Bye </s>",
        "<s>[INST] <<SYS>>\nRule\n<</SYS>>\n\nHi [/INST]",
        " </s>",
        bos="<s>",
        notes=(AS_USER,),
    ),
    "llama3": Family(
        LLAMA_SPECIAL,
        "<|end_of_text|>",
        "<|begin_of_text|>" + HEADER.format("user") + "Hi<|eot_id|>" + HEADER.format("assistant"),
        LLAMA_MORE,
        HEADER.format("tool") + "42<|eot_id|>" + HEADER.format("assistant"),
        "Hello<|eot_id|>|Bye<|eot_id|>",
        "<|begin_of_text|>" + LLAMA_DIALOGUE,
        "<|begin_of_text|>"
        + HEADER.format("system")
        + "Rule<|eot_id|>"
        + HEADER.format("user")
        + "Hi<|eot_id|>"
        + HEADER.format("assistant"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "llama3_1_date": Family(
        LLAMA_SPECIAL,
        "<|eot_id|>",
        "<|begin_of_text|>"
        + DATE
        + "<|eot_id|>"
        + HEADER.format("user")
        + "Hi<|eot_id|>"
        + HEADER.format("assistant"),
        LLAMA_MORE,
        HEADER.format("ipython") + '"42"<|eot_id|>' + HEADER.format("assistant"),
        "Hello<|eot_id|>|Bye<|eot_id|>",
        "<|begin_of_text|>" + DATE + "<|eot_id|>" + LLAMA_DIALOGUE,
        "<|begin_of_text|>"
        + DATE
        + "Rule<|eot_id|>"
        + HEADER.format("user")
        + "Hi<|eot_id|>"
        + HEADER.format("assistant"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        calls='{"name": "f", "parameters": {"q": "6*7"}}<|eot_id|>|It is 42<|eot_id|>',
    ),
    "mistral_inst": Family(
        ("<s>", "</s>"),
        "</s>",
        "<s>[INST] Hi [/INST]",
        "[INST] More? [/INST]",
        "[INST] 42 [/INST]",
        "Hello</s>|Bye</s>",
        "<s>[INST] Hi [/INST]Hello</s>[INST] More? [/INST]Bye</s>",
        "<s>[INST] Rule\n\nHi [/INST]",
        "</s>",
        bos="<s>",
        notes=(AS_USER,),
        system_notes=(SYSTEM_JOINED,),
    ),
    "mistral_tools": Family(
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
        ),
        "</s>",
        "<s>[INST]Hi[/INST]",
        "[INST]More?[/INST]",
        '[TOOL_RESULTS]{"content": "42", "call_id": "call00001"}[/TOOL_RESULTS]',
        "Hello</s>|Bye</s>",
        "<s>[INST]Hi[/INST]Hello</s>[INST]More?[/INST]Bye</s>",
        "<s>[INST]Rule\n\nHi[/INST]",
        "</s>",
        bos="<s>",
        calls='[TOOL_CALLS][{"name": "f", "arguments": {"q": "6*7"}, "id": "123456789"}]</s>|It is 42</s>',
    ),
    "deepseek_v3": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>",
        "<｜User｜>More?<｜Assistant｜>",
        "<｜tool▁output▁begin｜>42<｜tool▁output▁end｜><｜Assistant｜>",
        "Hello<｜end▁of▁sentence｜>|Bye<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜>"
        "<｜User｜>More?<｜Assistant｜>Bye<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>Rule<｜User｜>Hi<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        bos="<｜begin▁of▁sentence｜>",
        calls='<｜tool▁call▁begin｜>f\n{"q": "6*7"}<｜tool▁call▁end｜><｜end▁of▁sentence｜>|It is 42<｜end▁of▁sentence｜>',
    ),
    "deepseek_r1": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n",
        "<｜User｜>More?<｜Assistant｜><think>\n",
        "<｜User｜>42<｜Assistant｜><think>\n",
        "Hello<｜end▁of▁sentence｜>|Bye<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜>"
        "<｜User｜>More?<｜Assistant｜>Bye<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>Rule<｜User｜>Hi<｜Assistant｜><think>\n",
        "<｜end▁of▁sentence｜>",
        THINK,
        bos="<｜begin▁of▁sentence｜>",
        notes=(AS_USER,),
    ),
    "glm4": Family(
        ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
        "[gMASK]<sop><|user|>\nHi<|assistant|>\n",
        "\nMore?<|assistant|>\n",
        "\n42<|assistant|>\n",
        "Hello<|user|>|Bye",
        "[gMASK]<sop><|user|>\nHi<|assistant|>\nHello<|user|>\nMore?<|assistant|>\nBye",
        "[gMASK]<sop><|system|>\nRule<|user|>\nHi<|assistant|>\n",
        "<|user|>",
        ("<tool_call>", "</tool_call>"),
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        ended_with="<|observation|>",
        calls='<tool_call>f{"q": "6*7"}</tool_call><|observation|>|It is 42',
    ),
    "zephyr": Family(
        ("<s>", "</s>"),
        "</s>",
        "<|user|>\nHi</s>\n<|assistant|>\n",
        "\n<|user|>\nMore?</s>\n<|assistant|>\n",
        "\n<|tool|>\n42</s>\n<|assistant|>\n",
        "Hello</s>|Bye</s>",
        "<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nMore?</s>\n<|assistant|>\nBye</s>\n",
        "<|system|>\nRule</s>\n<|user|>\nHi</s>\n<|assistant|>\n",
        "</s>",
    ),
    "vicuna": Family(
        ("<s>", "</s>"),
        "</s>",
        "USER: Hi ASSISTANT:",
        "USER: More? ASSISTANT:",
        "USER: 42 ASSISTANT:",
        " Hello</s>| Bye</s>",
        "USER: Hi ASSISTANT: Hello</s>USER: More? ASSISTANT: Bye</s>",
        "Rule USER: Hi ASSISTANT:",
        "</s>",
        notes=(AS_USER,),
    ),
    "command_r": Family(
        (
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>" + COHERE.format("USER", "Hi") + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        COHERE.format("USER", "More?") + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        COHERE.format("USER", "42") + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "Hello<|END_OF_TURN_TOKEN|>|Bye<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>"
        + COHERE.format("USER", "Hi")
        + COHERE.format("CHATBOT", "Hello")
        + COHERE.format("USER", "More?")
        + COHERE.format("CHATBOT", "Bye"),
        "<BOS_TOKEN>"
        + COHERE.format("SYSTEM", "Rule")
        + COHERE.format("USER", "Hi")
        + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        notes=(AS_USER,),
    ),
    "command_a": Family(
        (
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>" + COHERE.format("USER", "Hi") + BEGUN,
        COHERE.format("USER", "More?") + BEGUN,
        COHERE.format("USER", "42") + BEGUN,
        "Hello<|END_RESPONSE|><|END_OF_TURN_TOKEN|>|Bye<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>"
        + COHERE.format("USER", "Hi")
        + BEGUN
        + "Hello<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
        + COHERE.format("USER", "More?")
        + BEGUN
        + "Bye<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>" + COHERE.format("SYSTEM", "Rule") + COHERE.format("USER", "Hi") + BEGUN,
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        notes=(AS_USER,),
    ),
    "gemma4": Family(
        (
            "<bos>",
            "<eos>",
            "<|turn>",
            "<turn|>",
            '<|"|>',
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
        ),
        "<turn|>",
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\n",
        "\n<|turn>user\nMore?<turn|>\n<|turn>model\n",
        'response:f{value:<|"|>42<|"|>}<tool_response|>',
        "Hello<turn|>|Bye<turn|>",
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"
        "<|turn>user\nMore?<turn|>\n<|turn>model\nBye<turn|>\n",
        "<bos><|turn>system\nRule<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n",
        "<turn|>",
        bos="<bos>",
        ends=("<turn|>", "<|tool_response>"),
        ended_with="<|tool_response>",
        calls='<|tool_call>call:f{q:<|"|>6*7<|"|>}<tool_call|><|tool_response>|<|turn>model\nIt is 42<turn|>',
    ),
    "granite": Family(
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        GRANITE + ROLE.format("user") + "Hi<|end_of_text|>\n" + ROLE.format("assistant"),
        "\n" + ROLE.format("user") + "More?<|end_of_text|>\n" + ROLE.format("assistant"),
        "\n" + ROLE.format("tool_response") + "42<|end_of_text|>\n" + ROLE.format("assistant"),
        "Hello<|end_of_text|>|Bye<|end_of_text|>",
        GRANITE
        + "".join(
            ROLE.format(role) + text + "<|end_of_text|>\n"
            for role, text in (
                ("user", "Hi"),
                ("assistant", "Hello"),
                ("user", "More?"),
                ("assistant", "Bye"),
            )
        ),
        ROLE.format("system")
        + "Rule<|end_of_text|>\n"
        + ROLE.format("user")
        + "Hi<|end_of_text|>\n"
        + ROLE.format("assistant"),
        "<|end_of_text|>",
    ),
    "no_end": Family(
        ("</s>",),
        "</s>",
        "user: Hi\nassistant: ",
        "\nuser: More?\nassistant: ",
        "\ntool: 42\nassistant: ",
        "Hello|Bye",
        "user: Hi\nassistant: Hello\nuser: More?\nassistant: Bye\n",
        "system: Rule\nuser: Hi\nassistant: ",
    ),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the tokens and the template of a family."""
    family = FAMILIES[name]
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(list(family.special))
    model.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=family.eos, bos_token=family.bos)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    return tokenizer


def save(name: str, folder: Path) -> Path:
    """Save the tokenizer of a family, and the ends of its ``generation_config.json``, as a model folder has them."""
    import json

    tokenizer, ends = tokenizer_of(name), FAMILIES[name].ends
    tokenizer.save_pretrained(folder)
    if ends:
        ids = tokenizer.convert_tokens_to_ids(list(ends))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
