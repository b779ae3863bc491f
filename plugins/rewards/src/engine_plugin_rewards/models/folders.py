"""Checks before a reward's model is built: its config, its weights' names, its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.data import check_tokenizer, load_tokenizer
from engine_core.errors import DataError, EngineError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_core.model_config import load_hf_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from engine_core.config import ModelConfig


def open_folder(model: ModelConfig, table: str) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Return the config and the tokenizer of a model folder, after checking that they fit each other.

    Args:
        model: the model's own table.
        table: ``reward.helpful.model``, for messages.

    Raises:
        EngineError: one does not load, or the tokenizer has ids that the model does not embed.
    """
    try:
        tokenizer = load_tokenizer(model)
        config = load_hf_config(model)
        check_tokenizer(tokenizer, config)
    except EngineError as error:
        raise type(error)(f"{table}: {error}") from error
    return config, tokenizer


def check_classifier(config: PretrainedConfig, path: str, table: str, remote: bool = False) -> None:
    """Raise for a folder without a trained score of one label.

    Args:
        config: the folder's config.
        path: the folder's path.
        table: ``reward.helpful.model``, for messages.
        remote: another process holds the weights; those of the folder are not checked.

    Raises:
        DataError: the folder holds a language model, has several labels or lacks the weights of the head.
    """
    kinds: Any = getattr(config, "architectures", None) or []
    wanted = (
        'Expected a sequence classifier with one label, such as a run with trainer = "reward_model" exports '
        "(engine export RUN OUT)."
    )
    if kinds and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise DataError(f"{table}.path: '{path}' holds a {kinds[0]}, which gives no score. {wanted}")
    if config.num_labels != 1:
        raise DataError(f"{table}.path: '{path}' has {config.num_labels} labels. {wanted}")
    names_here = Path(path).is_dir() and not remote
    if names_here and not any(name.partition(".")[0] == HEAD for name in weight_names(Path(path))):
        raise DataError(f"{table}.path: '{path}' has no weights called '{HEAD}'. {wanted}")


def weight_names(folder: Path) -> Collection[str]:
    """Return the names of all weights of a safetensors folder, read from headers alone."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names: dict[str, Any] = json.loads(index.read_text("utf-8"))["weight_map"]
        return names
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            found |= set(tensors.keys())
    return found


def longest(config: PretrainedConfig, wanted: int | None) -> int:
    """Return the tokens that a sequence may have: the run file's limit, at most the model's positions."""
    text: Any = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or 1 << 30
    return min(wanted or most, most)
