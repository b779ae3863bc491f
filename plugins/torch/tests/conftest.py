"""Tiny real models of several families, and engines around them.

The engine's tests run on another device with ``ENGINE_TEST_DEVICE=cuda``.
"""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    FalconH1Config,
    Gemma2Config,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.config.roles import LoRAConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.hooks import hookimpl
from engine_core.plugins.plugin_set import Plugin, PluginSet
from engine_core.types import Batch
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions

DEVICE = os.environ.get("ENGINE_TEST_DEVICE", "cpu")
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # logits far from uniform, so that a mistake shows
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SHAPE),
    "gemma2": lambda: Gemma2Config(
        **SHAPE,
        sliding_window=8,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=6),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SHAPE, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SHAPE, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    ),
    "granite": lambda: GraniteConfig(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"}, logits_scaling=0.3
    ),
}


def plugins(**hooks):
    """The real plugin set of a run with this engine, and a plugin with these step hooks."""
    plugin_set = PluginSet.load({"train_engines": {"torch"}})
    if hooks:
        module = ModuleType("hooks_of_a_test")
        for name, function in hooks.items():
            setattr(module, name, hookimpl(function))
        plugin_set.manager.register(module, module.__name__)
        plugin = Plugin(module, "Plugin of a test", "test", "0")
        plugin_set.plugins.append(plugin)
        plugin_set.named.append(plugin)
    return plugin_set


@pytest.fixture
def model_folder(tmp_path):
    """Writes a folder with a config and no weights; returns its path."""

    def write(family="qwen3"):
        folder = tmp_path / family
        CONFIGS[family]().save_pretrained(folder)
        return str(folder)

    return write


def exact(options):
    """The device of these tests, and float32 on it where a test asks for no other type."""
    types = {} if options.get("param_dtype") == "bf16" else {"param_dtype": "fp32", "compute_dtype": "fp32"}
    return {"device": DEVICE, **types}


@pytest.fixture
def make_engine(model_folder):
    """Builds an engine: ``make_engine("llama", budget=64, optim={...}, param_dtype="bf16")``; all are closed in the end."""
    made = []

    def make(
        family="qwen3",
        *,
        budget=4096,
        optim=None,
        model=None,
        hooks=None,
        role="actor",
        live=None,
        trainable=True,
        total_steps=10,
        cls=TorchEngine,
        lora=None,
        **options,
    ):
        path = (model or {}).get("path") or model_folder(family)
        config = RoleConfig(
            max_tokens_per_rank=budget,
            optim=OptimConfig(**{"lr": 1e-2, **(optim or {})}),
            lora=None if lora is None else LoRAConfig(**lora),
            options=TorchOptions(**{**exact(options), **options}),
        )
        context = WorkerContext(
            plugins=plugins(**(hooks or {})),
            role=role,
            device=torch.device(DEVICE),
            total_steps=total_steps,
            live=live,
        )
        made.append(cls(config, ModelConfig(**{"path": path, **(model or {})}), context, trainable=trainable))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def tokenizer():
    """A tokenizer of the words "0" to "96", without an end of sequence."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({str(i): i for i in range(97)}, unk_token="0"))
    )


@pytest.fixture
def batch():
    """Eight sequences of 1 to 23 tokens; the first 2 tokens of each are a prompt."""
    return make_batch([7, 23, 1, 12, 5, 12, 2, 9])


def make_batch(lengths, seed=0, temperature=1.0):
    """Random tokens; weights that differ from token to token, 0 outside of the loss mask."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= 2 for n in lengths])
    return Batch(
        token_ids=torch.randint(1, 97, (total,), generator=generator),
        lengths=torch.tensor(lengths),
        tokens={
            "loss_mask": mask,
            "weights": torch.rand(total, generator=generator) * mask / 10,
            "token_share": mask.float() / mask.sum(),
        },
        temperature=temperature,
    )


@pytest.fixture
def batch_of():
    """``make_batch`` for tests that choose lengths."""
    return make_batch
