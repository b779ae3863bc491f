"""Results of the backend `vllm` with models of each type. Written by docs/model_table.py."""

FAMILIES = dict.fromkeys(
    """
    llama qwen2 qwen3 qwen3_moe mistral ministral ministral3 mixtral gemma gemma2 gemma3_text phi3
    smollm3 olmo2 olmo3 granite granitemoehybrid glm4 falcon_h1 exaone4 hunyuan_v1_dense seed_oss
    ernie4_5
    """.split(),  # noqa: SIM905
    "",
) | {
    "qwen3_5_text": "vLLM's class needs torchvision, which was not installed",
    "qwen3_next": "vLLM's CPU build computes its recurrent layers in bfloat16 alone",
    "glm4_moe": "log-probs of vLLM 0.32 on CPUs are off by nats",
    "gpt_oss": "vLLM has no kernel for its experts on CPUs",
    "cohere2": "log-probs of vLLM 0.32 differ behind the sliding window",
    "deepseek_v3": "vLLM has no latent attention of this size on CPUs",
    "lfm2": "vLLM 0.32 reads `conv_dim`, which the config of transformers 5.17 lacks",
    "apertus": "log-probs differ by up to 3e-3 nats in float32",
}
"""``model_type`` -> what differs or fails; empty if every test of the family passed."""
