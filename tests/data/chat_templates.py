"""Tokenizers with templates that behave like those of published families, and what each is to render.

``FAMILIES`` is written by hand, from the behavior of the families and not with `ChatFormat`. The dialogue is
``Hi`` - ``Hello`` - ``More?`` - ``Bye``, the answer of a tool ``42``.
"""

from __future__ import annotations

import json
from pathlib import Path

import chat_families_chatml
import chat_families_others
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FAMILIES = chat_families_chatml.FAMILIES | chat_families_others.FAMILIES
TEMPLATES = Path(__file__).parent / "templates"


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the tokens and the template of a family."""
    family = FAMILIES[name]
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(list(family.special))
    model.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=family.eos, bos_token=family.bos)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    return tokenizer


def save(name: str, folder: Path) -> Path:
    """Save the tokenizer of a family, and the ends of its ``generation_config.json``, as a model folder has them."""
    tokenizer, ends = tokenizer_of(name), FAMILIES[name].ends
    tokenizer.save_pretrained(folder)
    if ends:
        ids = tokenizer.convert_tokens_to_ids(list(ends))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
