"""Results of the backend `deepspeed` with models of each type. Written by docs/model_table.py."""

FAMILIES = dict.fromkeys(
    """
    llama qwen2 qwen3 qwen3_5_text qwen3_moe qwen3_next mistral ministral ministral3 mixtral gemma
    gemma2 gemma3_text phi3 smollm3 olmo2 olmo3 granite granitemoehybrid glm4 glm4_moe falcon_h1
    gpt_oss cohere2 deepseek_v3 exaone4 lfm2 hunyuan_v1_dense seed_oss ernie4_5
    """.split(),  # noqa: SIM905
    "",
) | {
    "apertus": "DeepSpeed cannot write a weight of one number over two ranks",
}
"""``model_type`` -> what differs or fails; empty if every test of the family passed."""
