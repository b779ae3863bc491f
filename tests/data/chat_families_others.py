"""Gemma, Llama, Mistral, DeepSeek and others: written by hand, see `chat_family.Family`."""

from __future__ import annotations

from chat_family import (
    AS_USER,
    BEGUN,
    COHERE,
    DATE,
    GEMMA_DIALOGUE,
    GEMMA_MORE,
    GRANITE,
    HEADER,
    LLAMA_DIALOGUE,
    LLAMA_MORE,
    LLAMA_SPECIAL,
    ROLE,
    SYSTEM_JOINED,
    THINK,
    Family,
)

FAMILIES = {
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
