"""Data: from files of rows to tokenized prompts, in an order that can be stopped and resumed.

::

    rows.py       JSONL, JSON, Parquet, CSV -> row number i as a dict, and its location in its file
    layouts.py    a dict of any known layout -> Row (text or messages, response, other columns)
    chat.py       messages -> token ids: chat template, further turns, loss masks
    render.py     Row -> token ids: text or messages, over-long rows
    source.py     Preparer (one row through these steps), Source, PromptSource: seeded order, skips, position
    tokenizer.py  load a tokenizer and check that it fits the model

Worker processes that tokenize rows ahead are the part ``row_workers``. Not included: streaming from a hub (download
the files first), mixing by weight, packing (the engines do it).
"""

from engine_core.data.source import PromptSource
from engine_core.data.tokenizer import check_tokenizer, load_tokenizer, tokenizer_hash, tokens_differ

__all__ = ["PromptSource", "check_tokenizer", "load_tokenizer", "tokenizer_hash", "tokens_differ"]
