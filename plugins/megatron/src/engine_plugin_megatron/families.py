"""Results of the backend `megatron` with models of each type. Written by docs/model_table.py."""

FAMILIES = dict.fromkeys(
    """
    llama qwen2 qwen3 qwen3_moe mistral mixtral gemma smollm3 seed_oss
    """.split(),  # noqa: SIM905
    "",
) | {
    "qwen3_5_text": "recurrent layers are not built here",
    "qwen3_next": "recurrent layers are not built here",
    "ministral": "attention here has no sliding windows",
    "ministral3": "rotary positions of YaRN are not built here",
    "gemma2": "megatron-core 0.16 has no soft caps and no norms after attention",
    "gemma3_text": "megatron-core 0.16 has no norms after attention and feed-forward",
    "phi3": "a rank would need several ranges of its fused weights",
    "olmo2": "megatron-core 0.16 has no norms after attention and feed-forward",
    "olmo3": "megatron-core 0.16 has no norms after attention and feed-forward",
    "granite": "megatron-core 0.16 has no factor of residuals",
    "granitemoehybrid": "recurrent layers are not built here",
    "glm4": "megatron-core 0.16 has no norms after attention and feed-forward",
    "glm4_moe": "rotary positions of a part of each head are not built here",
    "falcon_h1": "recurrent layers are not built here",
    "gpt_oss": "attention here has no sinks",
    "cohere2": "megatron-core 0.16 computes feed-forward after attention, not next to it",
    "deepseek_v3": "latent attention is not built here",
    "exaone4": "megatron-core 0.16 has no norms after attention and feed-forward",
    "lfm2": "recurrent layers are not built here",
    "hunyuan_v1_dense": "megatron-core 0.16 normalizes heads before their rotation, not after it",
    "ernie4_5": "interleaved rotary positions are not built here",
    "apertus": "megatron-core 0.16 has no activation xIELU",
}
"""``model_type`` -> what differs or fails; empty if every test of the family passed."""
