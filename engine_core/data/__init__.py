"""Data: files of rows to tokenised prompts and examples, in an order that can be stopped and resumed.

::

    rows.py       JSONL, JSON, Parquet, CSV -> row number i as a dict, and where it stands in its file
    layouts.py    a dict of any known layout -> Row (text or messages, response, other columns)
    render.py     Row -> token ids: chat template, over-long rows, which tokens are learned
    prepare.py    the way of one row through these, and what came of it
    preferences.py  the same for pairs of responses, and for responses with a label
    source.py     PromptSource, SFTSource, PairSource, JudgedSource: seeded order, skips, position
    stored.py     StoredGroups: rollouts of earlier runs, whole groups
    workers.py    the same rows tokenised ahead by other processes
    tokenizer.py  loading a tokenizer and checking that it fits the model

Left out: streaming from a hub (download the files first), mixing by weight, packing (the engines do it).
"""

from engine_core.data.preferences import Judged, Pair
from engine_core.data.render import Example
from engine_core.data.source import JudgedSource, PairSource, PromptSource, SFTSource
from engine_core.data.stored import Fit, StoredGroups
from engine_core.data.tokenizer import check_tokenizer, load_tokenizer, tokenizer_hash, tokens_differ

__all__ = [
    "Example",
    "Fit",
    "Judged",
    "JudgedSource",
    "Pair",
    "PairSource",
    "PromptSource",
    "SFTSource",
    "StoredGroups",
    "check_tokenizer",
    "load_tokenizer",
    "tokenizer_hash",
    "tokens_differ",
]
