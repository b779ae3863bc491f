"""The public data sets that ``[data] source`` knows by name, read from ``sets.toml``, and the options of each set."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from engine_core.specs import FilePath, Options
from engine_plugin_trainers.datasets import conversion

HUB = "https://huggingface.co/datasets/"


class DatasetOptions(Options):
    """``[data.NAME]``: options of a public data set."""

    folder: FilePath | None = None
    """A folder with the files of the hub repository, as ``hf download REPO --repo-type dataset --local-dir FOLDER`` writes it, relative to the run file. Default: the hub."""
    revision: str = ""
    """A commit, tag or branch of the hub repository. Default: the commit of the table of data sets."""
    limit: int = Field(0, ge=0)
    """Take only the first rows of each split. 0: all rows."""


class QuestionOptions(DatasetOptions):
    """``[data.NAME]``: options of a public data set of questions with answers."""

    suffix: str | None = None
    """A text after each question, separated by a space unless it begins with white space. Default: the text of the table of data sets. An empty text: none."""
    shots: int = Field(0, ge=0)
    """Number of worked examples before each question: the first rows of the training split, which training then leaves out."""


class PairOptions(DatasetOptions):
    """``[data.NAME]``: options of a public data set of pairs of responses."""

    unpaired: bool = False
    """For the trainer ``kto``: make two rows of each pair, one for each response, with the column ``label``."""


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """A public data set: where it is, what its rows hold, and what they fit."""

    content: str  #: one noun phrase
    repo: str  #: name on the hub
    revision: str  #: commit of the hub repository
    license: str  #: SPDX identifier, or what the data set card says
    columns: Mapping[str, str]  #: columns of the hub repository that are required, with their types
    trainers: tuple[str, ...]  #: values of ``trainer`` that can learn from it
    config: str | None = None  #: configuration (subset) on the hub
    train: str = ""  #: split on the hub of our split ``train``; empty: none
    validation: str = ""  #: split on the hub of our split ``validation``; empty: none
    rows: Mapping[str, int] = field(default_factory=dict)  #: rows of our splits on the hub
    reward: str = ""  #: reward that fits; empty: none is needed
    suffix: str = ""  #: text after each question
    convert: Callable[[conversion.Row], conversion.Row] = dict  #: makes our columns of a row
    usable: Callable[[conversion.Row], bool] | None = None  #: whether a row can be used; None: each one can

    @property
    def url(self) -> str:
        """The address of the data set card."""
        return HUB + self.repo

    @property
    def pairs(self) -> bool:
        """Whether the rows are pairs of responses."""
        return "dpo" in self.trainers

    @property
    def options(self) -> type[DatasetOptions]:
        """The option model."""
        if self.pairs:
            return PairOptions
        return QuestionOptions if self.reward else DatasetOptions


def _set_of(row: Mapping[str, Any]) -> PublicSet:
    """Make a set of its table in ``sets.toml``, which names functions of ``conversion``."""
    functions = {key: getattr(conversion, row[key]) for key in ("convert", "usable") if key in row}
    return PublicSet(**{**row, "trainers": tuple(row["trainers"]), **functions})


SETS: Mapping[str, PublicSet] = {
    name: _set_of(row)
    for name, row in tomllib.loads(Path(__file__).with_name("sets.toml").read_text("utf-8")).items()
}
