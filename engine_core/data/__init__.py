"""Data: files of rows to tokenized prompts and examples, in an order that can be stopped and resumed.

::

    rows.py       JSONL, JSON, Parquet, CSV -> row number i as a dict, and its place in its file
    layouts.py    a dict of any known layout -> Row (text or messages, response, other columns)
    chat.py       messages -> token ids: chat template, further turns, which tokens are learned
    render.py     Row -> token ids: text or messages, over-long rows
    prepare.py    one row through these steps, and the outcome
    source.py     Source, PromptSource: seeded order, skips, position
    workers.py    the same rows tokenized ahead by other processes
    tokenizer.py  load a tokenizer and check that it fits the model

Left out: streaming from a hub (download the files first), mixing by weight, packing (the engines do it).
"""

from engine_core.data.render import Example
from engine_core.data.source import PromptSource
from engine_core.data.tokenizer import check_tokenizer, load_tokenizer, tokenizer_hash, tokens_differ

__all__ = ["Example", "PromptSource", "check_tokenizer", "load_tokenizer", "tokenizer_hash", "tokens_differ"]
