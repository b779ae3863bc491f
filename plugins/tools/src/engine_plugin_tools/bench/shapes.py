"""Models by shape: folders with a config and no weights; the arithmetic of a token, and the rates of devices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError, did_you_mean

_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        **_qwen3(64, 192, 4, 4, True),
        "vocab_size": 512,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
}
"""Published sizes of Qwen3, and a tiny one."""


def write_shape(name: str, folder: Path) -> str:
    """Write the ``config.json`` of a shape into ``folder``; return the folder as a path for `[model]`.

    Raises:
        ConfigError: there is no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"--shape '{name}' is not known.{did_you_mean(name, SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1), encoding="utf-8")
    return str(folder)


@dataclass(frozen=True)
class Cost:
    """The operations of a dense decoder, forward and backward together: ``6`` a weight and token.

    ``6 N_body T + 6 V H T_head + 6 L n_q d S T``, where S is the mean length of a sequence that a token is in (a
    causal token sees half of it, and both products count). Recomputed work does not count.
    """

    body: int  # weights of the layers, without embeddings and head
    head: int  # V * H
    attention: int  # L * n_q * d
    streams: int = 0  # L * (H + F + n_q * d): elements of a token's vectors
    layers: int = 0  # L

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Cost | None:
        """Return the cost of a model by its config; None if it is not a dense decoder of the usual kind."""
        from engine_core.model_config import is_dense  # brings transformers

        if not is_dense(config):
            return None
        try:
            hidden, layers = config["hidden_size"], config["num_hidden_layers"]
            heads = config["num_attention_heads"]
            wide = config["intermediate_size"]
            vocabulary = config["vocab_size"]
        except KeyError:
            return None
        size = config.get("head_dim") or hidden // heads
        projections = hidden * size * 2 * (heads + (config.get("num_key_value_heads") or heads))
        streams = layers * (hidden + wide + heads * size)
        body = layers * (projections + 3 * hidden * wide)
        return cls(body, vocabulary * hidden, layers * heads * size, streams, layers)

    def train(self, lengths: Sequence[float], head_tokens: float) -> float:
        """Return the operations of one forward and backward pass over sequences of these lengths."""
        tokens = sum(lengths)
        seen = sum(n * n for n in lengths)  # S * T, summed over sequences
        return 6.0 * (self.body * tokens + self.head * head_tokens + self.attention * seen)


DENSE_BF16_FLOPS: dict[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H800": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 operations a second from the vendors' data sheets, by words in the device's name, the longer words first."""

BANDWIDTH: dict[str, float] = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H800": 3.35e12,
    "H100 PCIe": 2.0e12,
    "H100 NVL": 3.9e12,
    "H100": 3.35e12,
    "A100": 2.0e12,
    "L40S": 0.864e12,
    "RTX 4090": 1.008e12,
}
"""Bytes a second between a device and its memory, from the same data sheets."""


def flops_of(name: str) -> float | None:
    """Return the dense bf16 operations a second of a device by its name; None for a device without an entry."""
    return next((flops for word, flops in DENSE_BF16_FLOPS.items() if word in name), None)
