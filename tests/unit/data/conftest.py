"""Real tokenizers and files, made in the test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine_core.config.models import DataConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    "What is 12 plus 7?",
    "The answer is 19.",
    "user assistant system you are brief",
    "0123456789 one two three",
]


def make_tokenizer(
    template: str | None = CHATML, text: list[str] = TEXT, size: int = 400
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose end token is <|im_end|>."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session", name="make_tokenizer")
def _make_tokenizer():
    return make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(template=None)


def write_jsonl(path: Path, rows: list[object]) -> Path:
    """One JSON value a line; a str or bytes value is written as it is."""
    lines = [
        row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
        for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture
def config_of(tmp_path: Path):
    """A `[data]` table over rows that are written as JSONL."""

    def make(rows: list[object], **keys: object) -> DataConfig:
        return DataConfig(train=str(write_jsonl(tmp_path / "train.jsonl", rows)), **keys)

    return make
