"""How many tokens the model of a run can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.model_config import load_hf_config

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun

POSITION_TABLES = frozenset(
    {"biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"}
)
"""Decoders (``model_type``) that are known to look positions up in a table of ``max_position_embeddings`` rows, and to fail beyond it.
Where positions are computed, the number is what the model was trained for, and longer sequences can be learned."""


def held_tokens(run: TrainingRun) -> int:
    """Tokens of prompt and response together that both the model and a sampler that is told its length can hold."""
    told = getattr(run.config.rollout.options, "max_model_len", None)
    return min(model_length(run), told or 1 << 30)


def model_length(run: TrainingRun) -> int:
    """Tokens that the model can hold; one that does not say sets no limit."""
    return getattr(_text_config(run), "max_position_embeddings", None) or 1 << 30


def table_length(run: TrainingRun) -> int | None:
    """Positions of a model that has a table of them, the longest sequence that it can learn; None of others."""
    text = _text_config(run)
    if getattr(text, "model_type", None) not in POSITION_TABLES:
        return None
    length: int | None = getattr(text, "max_position_embeddings", None)
    return length


def _text_config(run: TrainingRun) -> Any:
    """Of the text model in transformers' words; None of models that a plugin builds."""
    if "model" in run.live:
        hf_config = getattr(run.live["model"], "config", None)
    elif run.plugins.overrides("engine_build_model"):
        return None
    else:
        hf_config = load_hf_config(run.config.model)
    get = getattr(hf_config, "get_text_config", None)
    return get() if get is not None else None
