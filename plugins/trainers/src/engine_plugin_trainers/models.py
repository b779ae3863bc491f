"""Facts about the models of a trainer: the longest sequence to learn, the tokens that student and teacher share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError
from engine_core.model_config import load_hf_config
from engine_core.train.models import teacher_model, text_config

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.plugins import PluginSet

POSITION_TABLES = frozenset(
    {"biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"}
)
"""Decoders (``model_type``) with a position table of ``max_position_embeddings`` rows, which fail on longer sequences.
For other decoders, which compute positions, the number is the length in training; longer sequences can be learned."""


def table_length(text: Any) -> int | None:
    """Return the number of rows of the model's position table, its longest sequence; None without such a table.

    Args:
        text: result of ``text_config``.
    """
    if getattr(text, "model_type", None) not in POSITION_TABLES:
        return None
    length: int | None = getattr(text, "max_position_embeddings", None)
    return length


def common_vocabulary(config: EngineConfig, plugins: PluginSet, live: Any = None) -> int:
    """Return V, the vocabulary size that student and teacher share.

    Args:
        config: of the run.
        plugins: of the run.
        live: a student given from Python.

    Raises:
        ConfigError: the two models have different vocabulary sizes.
    """
    teacher = int(load_hf_config(teacher_model(config)).get_text_config().vocab_size)
    path = config.actor.path or config.model.path
    text = text_config(config.model.model_copy(update={"path": path}), plugins, live)
    student = teacher if text is None else int(text.vocab_size)  # else known once the student is built
    if student != teacher:
        raise ConfigError(
            f"teacher.path: its model gives {teacher} tokens (vocab_size), the student's {student}, so their "
            "distributions cannot be compared, though the tokenizer is the same. Take a teacher of the same size of "
            'vocabulary, or learn from the sampled tokens alone: trainer = "rl" with algorithm.advantage = "distill".'
        )
    return teacher
