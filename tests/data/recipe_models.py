"""The models of the recipes: the sizes that their publishers state, small models of the same kind, and their tokenizers.

A folder has a config and a small tokenizer, and no weights. The tokenizers are those of ``chat_templates``: bytes, the special
tokens and a template that behaves like the family's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chat_templates

QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 = QWEN | {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
QWEN2 = QWEN | {"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 32768}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN2
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen/Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "Qwen/Qwen3-4B": QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-3.1-8B": LLAMA_8B | {"max_position_embeddings": 131072},
    "princeton-nlp/Llama-3-Base-8B-SFT": LLAMA_8B | {"max_position_embeddings": 8192},
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": {
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
    },
}

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
}
SMALL_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
TOKENIZERS: Mapping[str, str] = {
    "Qwen/Qwen2.5": "qwen2_5",
    "Qwen/Qwen3": "qwen3",
    "meta-llama/Llama-3.2-3B-Instruct": "llama3_1_date",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3_1_date",
    "princeton-nlp/": "llama3",
    "google/gemma-3": "gemma3",
}
"""Beginnings of names of models, and the family of the tokenizer. A base model without a chat template is absent."""


def config_of(model: str, small: bool = False) -> dict[str, Any]:
    """Return the config of a model: as published, or of the same kind with tiny sizes."""
    sizes = dict(SIZES[model])
    if not small:
        return sizes
    if "text_config" not in sizes:
        return {name: SMALL.get(name, value) for name, value in sizes.items()}
    text = {name: SMALL.get(name, value) for name, value in sizes["text_config"].items()}
    return sizes | {"text_config": text, "vision_config": sizes["vision_config"] | SMALL_VISION}


def write_config(model: str, folder: Path, small: bool = False) -> Path:
    """Write the config of a model into ``folder`` and return it."""
    from transformers import AutoConfig

    AutoConfig.for_model(**config_of(model, small)).save_pretrained(folder)
    return folder


def write_tokenizer(model: str, folder: Path) -> Path:
    """Write a small tokenizer that behaves like that of a model into ``folder`` and return it.

    Raises:
        StopIteration: the model has no chat template.
    """
    family = next(name for start, name in TOKENIZERS.items() if model.startswith(start))
    return chat_templates.save(family, folder)
