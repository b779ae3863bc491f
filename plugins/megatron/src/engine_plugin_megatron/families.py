"""What was seen of the backend `megatron` with models of each type. Written by docs/model_table.py."""

from collections.abc import Mapping

FAMILIES: Mapping[str, str] = {
    "llama": "",
    "qwen2": "",
    "qwen3": "",
    "qwen3_moe": "",
    "mistral": "",
    "gemma": "",
}
"""``model_type`` -> what differs or fails; empty if every test of the family passed."""
