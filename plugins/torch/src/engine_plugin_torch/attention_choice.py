"""The choice of the attention implementation: a check of ``[model] attention``, and the meaning of ``auto``.

| model | ``auto`` |
|---|---|
| attends through transformers' interface, no recurrent layers | ``varlen``; on a CUDA device without torch's kernel ``sdpa`` |
| recurrent layers: sequences go through it one at a time | ``sdpa`` |
| custom attention code | ``sdpa``, or ``eager`` where it has none |
| no fused attention at all (attention sinks) | ``eager`` |
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engine_core.errors import ConfigError
from engine_plugin_torch.attention import check_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine_core.config import ModelConfig

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Attention -> the distribution that has its kernels."""

KERNEL_CAPABILITY = (8, 0)  # least compute capability for torch's kernel for packed sequences
KERNEL_HEAD = 256  # largest head size of that kernel


def choose_attention(name: str, config: PretrainedConfig | None, device: torch.device) -> tuple[str, str]:
    """Return the attention implementation of a model and the reason for the choice.

    Args:
        name: value of ``[model] attention``.
        config: the model's config; None where it is not known.
        device: the device that the model runs on.

    Raises:
        ConfigError: the named implementation would mix packed sequences, cannot train, or is not installed.
    """
    if name != "auto":
        check_attention(name, device)
        _check_installed(name, device)
        return name, "model.attention names it"
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) if config is not None else None
    if kind is None:
        return ("sdpa" if config is not None else "varlen"), "the model's class is not known here"
    if not kind._supports_sdpa:
        return "eager", f"{kind.__name__} has no fused attention (attention sinks, or custom code)"
    if getattr(kind, "_is_stateful", False) or not attends_only(config):
        return "sdpa", "recurrent layers: one sequence at a time, nothing is packed"
    if not kind._supports_attention_backend:
        return "sdpa", f"{kind.__name__} has custom attention code"
    if device.type != "cuda":
        return "varlen", "packed sequences as rectangles of similar lengths, exact"
    if reason := _no_kernel(config, device):
        return "sdpa", reason
    return "varlen", "packed sequences: torch's kernel in half precision, else rectangles of similar lengths"


def with_attention(model: ModelConfig, config: PretrainedConfig | None, device: torch.device) -> ModelConfig:
    """Return ``[model]`` with ``auto`` replaced by the implementation that ``choose_attention`` returns."""
    name, _ = choose_attention(model.attention, config, device)
    return model if name == model.attention else model.model_copy(update={"attention": name})


def attends_only(config: Any) -> bool:
    """Return whether a config has attention layers only: recurrent state would run across packed sequences."""
    layers = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    return set(layers) <= ATTENTION_LAYERS


def _no_kernel(config: Any, device: torch.device) -> str:
    """Return why torch's kernel for packed sequences does not run; "" where it does."""
    if torch.cuda.get_device_capability(device) < KERNEL_CAPABILITY:
        return (
            "this device is older than torch's kernel for packed sequences asks for (compute capability 8.0)"
        )
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads
    if size > KERNEL_HEAD:
        return f"torch's kernel for packed sequences has heads up to {KERNEL_HEAD}, not {size}"
    return ""


def _check_installed(name: str, device: torch.device) -> None:
    package = PACKAGES.get(name)
    if package is None:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"model.attention '{name}' runs on CUDA devices only, and this is {device}. Use 'auto'."
        )
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"model.attention '{name}' needs the package {package}, which is not installed. Install it, or use "
            "'auto', which takes torch's own kernel for packed sequences."
        ) from None
