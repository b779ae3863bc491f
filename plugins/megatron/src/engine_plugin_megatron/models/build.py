"""Construction of megatron-core models from Hugging Face configs, without Transformer Engine and apex."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from engine_plugin_megatron.layout import check_layout
from engine_plugin_megatron.models.architecture import architecture_of
from engine_plugin_megatron.models.attention import PackedAttention
from engine_plugin_megatron.models.layers import (
    HeadNorm,
    RMSNorm,
    Router,
    StretchRotary,
    ValueHead,
    hide_padding,
    hold_padding_token,
    padded_vocabulary,
    scale_embeddings,
)
from engine_plugin_megatron.ranks import token_group

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from transformers import PretrainedConfig

    from engine_core.plugins.plugin_set import PluginSet
    from engine_plugin_megatron.layout import MeshLayout
    from engine_plugin_megatron.options import MegatronOptions

UNFUSED: dict[str, Any] = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
"""Kernels of Transformer Engine and apex, which nothing here needs."""


def transformer_config(
    hf_config: PretrainedConfig,
    layout: MeshLayout,
    options: MegatronOptions,
    *,
    dtype: torch.dtype,
    plugins: PluginSet | None = None,
    table: str = "megatron",
    **further: Any,
) -> TransformerConfig:
    """Return megatron-core's config of a model on a layout.

    Args:
        hf_config: the model's config.
        layout: the layout of the ranks.
        options: the option table, of which only ``sequence_parallel`` is read.
        dtype: type of parameters, activations and messages between pipeline stages.
        table: the option table's name, for messages: ``actor.megatron``.
        plugins: the run's plugins, which may offer architectures.
        further: other arguments of ``TransformerConfig``, such as those of recomputation; they take precedence.

    Raises:
        ConfigError: the architecture is unknown, or the layout does not fit; nothing was built.
    """
    architecture = architecture_of(hf_config, plugins)
    check_layout(hf_config, layout, table, sequence_parallel=options.sequence_parallel)
    arguments = {
        **architecture.arguments(hf_config),
        **UNFUSED,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": options.sequence_parallel and layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "overlap_p2p_comm": layout.vp > 1,  # else two stages mistake activations for gradients
        "batch_p2p_comm": layout.vp == 1,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": layout.pp > 1,  # each pack has its own length
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
        "moe_token_dispatcher_type": "alltoall",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        **further,
    }
    config = TransformerConfig(**arguments)
    config.architecture = architecture
    return config


def gpt_model(
    hf_config: PretrainedConfig,
    config: TransformerConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    value_head: bool = False,
) -> GPTModel:
    """Build this rank's part of the model (with `virtual_pp` one chunk of it) on its device, without loading weights.

    Megatron's parallel state must be initialized, with ``expert_tensor_parallel_size`` as in ``config``.

    Args:
        hf_config: the model's config.
        config: the result of ``transformer_config``.
        pre_process: the chunk has the embedding.
        post_process: the chunk has the last norm and the output layer.
        vp_stage: number of the chunk with `virtual_pp`.
        value_head: the output is one number per token ([batch, length, 1]) instead of logits.
    """
    model = GPTModel(
        config,
        _block(config, vp_stage),
        vocab_size=padded_vocabulary(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings) and not value_head,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    frequencies = config.architecture.inverse_frequencies(hf_config)
    if token_group() is None:
        model.rotary_pos_emb.inv_freq = frequencies  # moved at its first use
    else:
        model.rotary_pos_emb = StretchRotary(frequencies)
    model.value_head = value_head
    if pre_process and hf_config.pad_token_id is not None:
        hold_padding_token(model.embedding.word_embeddings, hf_config.pad_token_id)
    if pre_process and (factor := config.architecture.embedding_scale(hf_config)) != 1.0:
        scale_embeddings(model.embedding.word_embeddings, factor)
    if post_process and value_head:
        model.output_layer = ValueHead(config)
    elif post_process:
        hide_padding(model.output_layer, hf_config.vocab_size)
    return model.to(torch.cuda.current_device())


def _block(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the specs of this chunk's layers, with or without experts."""
    first = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage)
    sparse = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    layers = [_layer(config, bool(sparse[index])) for index in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    """Return Megatron's local layer spec with this plugin's norms, attention and router."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    if sparse:
        parts.mlp.submodules.router = Router
    return layer
