"""Tiny models of many families, and suites that check an engine with each of them.

::

    from engine_plugin_testing import TrainEngineSuite
    from engine_plugin_testing.families import TRAINS, suites

    globals().update(suites(TrainEngineSuite, TRAINS, module=__name__, backend="mine"))

``pytest`` then shows one class for each family: ``TestLlama``, ``TestGemma2``, ... Each runs the contracts in which families
differ: forward pass, packing, gradient, cache, names of weights, adapters.

A model has the architecture of its family, with windows shorter than the sequences of the contracts, soft caps, experts and
recurrent layers where the family has them. Its weights are random: nothing here says how well a model learns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from engine_plugin_testing.suite import Suite

WINDOW = {"sliding_window": 8}
HALF_WINDOW = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"rope_parameters": LLAMA_3},
        "qwen2": {},
        "qwen3": {},
        "qwen3_5_text": GATED_DELTA,
        "qwen3_moe": EXPERTS,
        "qwen3_next": {**EXPERTS, **GATED_DELTA, "shared_expert_intermediate_size": 16},
        "mistral": WINDOW,
        "ministral": HALF_WINDOW,
        "ministral3": {},
        "mixtral": LOCAL_EXPERTS,
        "gemma": {},
        "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
        "gemma3_text": {**HALF_WINDOW, "query_pre_attn_scalar": 8},
        "phi3": {},
        "smollm3": {"no_rope_layers": [1, 0]},
        "olmo2": {},
        "olmo3": HALF_WINDOW,
        "granite": {
            "embedding_multiplier": 6.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        "granitemoehybrid": {
            **MAMBA,
            **LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 32,
            "initializer_range": 0.1,
        },
        "glm4": {},
        "glm4_moe": ROUTED_EXPERTS,
        "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
        "gpt_oss": {
            **HALF_WINDOW,
            **LOCAL_EXPERTS,
            "rope_parameters": YARN,
        },
        "cohere2": {
            **WINDOW,
            "num_hidden_layers": 4,
            "layer_types": [*3 * ["sliding_attention"], "full_attention"],
            "logit_scale": 1.0,
        },
        "deepseek_v3": {**LATENT_ATTENTION, **ROUTED_EXPERTS},
        "exaone4": HALF_WINDOW,
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "hunyuan_v1_dense": {},
        "seed_oss": {},
        "ernie4_5": {},
        "apertus": {},
    }
)
"""``model_type`` of transformers -> what makes its config a tiny one, on top of ``reference.SHAPE``."""

RECURRENT = ("falcon_h1", "granitemoehybrid", "lfm2", "qwen3_5_text", "qwen3_next")
"""Families with recurrent layers, whose state would run from one packed sequence into the next."""

PASSES = (
    "test_log_probs_equal_the_reference",
    "test_a_sequence_does_not_see_its_neighbours",
    "test_long_packs_equal_the_reference",
    "test_the_gradient_is_that_of_the_global_sum",
)
"""Contracts of a train engine's forward and backward pass, for options that change nothing else of a family."""

TRAINS = (
    *PASSES,
    "test_the_generation_module_gives_the_logits_of_the_policy",
    "test_export_is_loaded_by_from_pretrained",
    "test_an_adapter_alone_is_trained",
    "test_a_resumed_run_continues_exactly",
)
"""Contracts of train engines in which families differ."""

SAMPLES = (
    "test_log_probs_equal_the_reference",
    "test_temperature_0_is_greedy",
    "test_a_seed_does_not_depend_on_the_batch",
    "test_many_requests_of_all_sizes_are_sampled_right",
    "test_sampling_follows_new_weights",
    "test_weights_change_under_responses_in_flight",
    "test_a_stopped_response_goes_on",
    "test_a_trained_policy_reaches_the_sampler",
)
"""Contracts of rollout engines in which families differ."""


def suites(
    base: type[Suite],
    contracts: Collection[str],
    *,
    module: str,
    families: Collection[str] = tuple(FAMILIES),
    model: Mapping[str, Any] | None = None,
    gaps: Mapping[str, str | Mapping[str, str]] | None = None,
    fast: Collection[str] = (),
    marks: Sequence[pytest.MarkDecorator] = (),
    **attributes: Any,
) -> dict[str, type[Suite]]:
    """Return a suite for each family, by the name of its class.

    Args:
        base: ``TrainEngineSuite`` or ``RolloutEngineSuite``.
        contracts: the tests of the suites, ``TRAINS`` or ``SAMPLES``.
        module: ``__name__`` of the caller.
        families: names of ``FAMILIES``.
        model: further changes to the config of each model.
        gaps: by family why the engine does not support it, or the ``unsupported`` of its suite.
        fast: families whose tests have no ``marks``.
        marks: marks of pytest for all other families, such as ``pytest.mark.slow``.
        attributes: further attributes of each class.
    """
    found = {}
    for family in families:
        gap = (gaps or {}).get(family, {})
        own = {
            "__module__": module,
            "contracts": {name: made for name, made in base.contracts.items() if name in contracts},
            "model": {"model_type": family, **FAMILIES[family], **(model or {})},
            "unsupported": dict.fromkeys(contracts, gap) if isinstance(gap, str) else gap,
            **attributes,
        }
        if family not in fast:
            own["pytestmark"] = [*marks]
        others = dict.fromkeys(name for name in base.contracts if name not in contracts)  # None: no test
        name = f"Test{family.title().replace('_', '')}"
        found[name] = type(name, (base,), {**others, **own})
    return found
