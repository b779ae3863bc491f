"""A tiny tokenizer with a chat template, tiny models, and the engines around them."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.local.runtime import LocalRuntime
from engine_plugin_rewards.models.roles import model_rewards, reward_roles

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]


def make_tokenizer(template=CHATML, first="<pad>"):
    """Make a tokenizer with a token for each byte; ``first`` shifts all ids, so that it is another tokenizer."""
    names = [first, *SPECIAL] if first != "<pad>" else SPECIAL
    vocabulary = {token: i for i, token in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=SPECIAL[2:]
    )
    fast.chat_template = template
    return fast


def make_folder(folder, kind=Qwen3ForSequenceClassification, tokenizer=None, labels=1, seed=0, **changes):
    """Make a model folder, with weights that give different texts different scores, and its tokenizer."""
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "pad_token_id": tokenizer.pad_token_id,
            **changes,
        }
    )
    if kind is Qwen3ForSequenceClassification:
        config.num_labels = labels
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def tokenizer_of():
    return make_tokenizer


@pytest.fixture
def folder_of(tmp_path):
    """Return ``folder_of("rm", labels=2)``: a classifier's folder, or a language model's by ``kind``."""

    def write(name="rm", **settings):
        return make_folder(tmp_path / name, **settings)

    write.language_model = Qwen3ForCausalLM
    return write


@pytest.fixture
def asking():
    """Return ``asking("model", path, actor=tokenizer, columns=("messages",), score_at="end")``.

    It makes a reward by a model on a real runtime.
    """
    runtimes = []

    def make(kind, path, actor=None, columns=(), **settings):
        config = load_config(overrides={"reward": [{"name": "r", kind: {"path": path, **settings}}]})
        runtimes.append(LocalRuntime(config, plugins_for(config), {}))
        asked = model_rewards(config, plugins_for(config), lambda role: groups[role], actor, columns)
        groups = runtimes[-1].start(reward_roles(config), 0)
        return asked["r"]

    yield make
    for runtime in runtimes:
        runtime.close()
