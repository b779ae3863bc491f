"""Inputs of a run in place of files: objects from Python, and rows of data sources: ``source = "NAME"``.

``[data]``, a part of ``data.mix`` and each ``[[eval.set]]`` may name a source. Its function is called once for each split
of ``[data]``, once for each part and once for each such set.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import bare
from engine_core.config.read import key_text
from engine_core.data.rows import MemoryRows
from engine_core.errors import ConfigError, DataError, EngineError, PluginError

if TYPE_CHECKING:
    from engine_core.config.evaluation import HeldOut
    from engine_core.config.models import DataConfig
    from engine_core.plugins.plugin_set import PluginSet

log = logging.getLogger("engine")


class GivenRows:
    """The rows of a run that are in no file.

    Args:
        config: ``[data]``.
        plugins: they offer the data sources.
        live: rows to train on, given from Python; None: there are none.
    """

    def __init__(self, config: DataConfig, plugins: PluginSet, live: Any = None) -> None:
        self.config, self.plugins, self.live = config, plugins, live
        self._kept: dict[tuple[str, str, str], MemoryRows] = {}  # by key and name of the source, and split

    @property
    def place(self) -> str:
        """The origin of the training rows, for messages: a key of the run file, or "the argument data"."""
        if self.live is not None:
            return "the argument data"
        return "data.source" if self.config.source else "data.mix" if self.config.mix else "data.train"

    def train(self) -> Any:
        """Return the rows to train on, or of a mix those of its sources by name; None if files hold all rows.

        Raises:
            PluginError: the function of a data source failed, or returned no sequence of dicts.
            DataError: it returned no rows.
        """
        if self.live is not None:
            return self.live
        key = "data.source" if self.config.source else "data.mix: source"
        sources = [part.source for part in self.config.parts if part.source]
        found = {name: self._of_source(key, name, self._options(name), "train") for name in sources}
        return found.get(self.config.source, found) or None

    def arrange(self, source: Any) -> Any:
        """Return the source of the training rows, which follows the curriculum if there is one.

        Raises:
            PluginError: the curriculum cannot be used.
        """
        if name := self.config.curriculum:
            rounds = self.plugins.require("parts", "curriculum")
            source.curriculum = rounds(name, self.config.curriculum_options, self.plugins)
        return source

    def held_out(self, held_out: HeldOut) -> MemoryRows | None:
        """Return the rows of a held-out set; None if files hold them.

        Raises:
            PluginError: the function of the data source failed, or returned no sequence of dicts.
            DataError: it returned no rows for an ``[[eval.set]]``.
        """
        if any(held_out.path) or not (name := held_out.source):
            return None
        if not held_out.name:
            return self._of_source("data.source", name, self._options(name), "validation")
        return self._of_source(key_text(held_out.key("source")), name, held_out.options, "validation")

    def _options(self, name: str) -> Any:
        """Return the options of a data source in ``[data.NAME]``."""
        return self.config.options.get(bare(name))

    def _of_source(self, key: str, name: str, options: Any, split: str) -> MemoryRows:
        if (key, name, split) not in self._kept:
            self._kept[key, name, split] = self._read(key, name, options, split)
        return self._kept[key, name, split]

    def _read(self, place: str, name: str, options: Any, split: str) -> MemoryRows:
        """Call the function of a data source for a split; check every row, unless the rows have a ``digest``.

        Args:
            place: the key that names the source, for messages.
            name: the source.
            options: its table, or None.
            split: ``train`` or ``validation``.

        Raises:
            PluginError: the function failed, or returned no sequence of dicts.
            DataError: there are no rows; only the split ``validation`` of ``[data]`` may be empty.
        """
        spec, plugin = self.plugins.chosen["data_sources", name]
        function, digest = self.plugins.function("data_sources", name), hashlib.sha256()
        about = [f"{key} {value}" for key in ("license", "revision", "url") if (value := getattr(spec, key))]
        may_be_empty = (place, split) == ("data.source", "validation")
        if not may_be_empty:
            log.info(
                "Data source '%s' of %s: %s.", name, plugin.label, ", ".join(about) or "no license is named"
            )

        def read() -> Any:
            """Return the rows, each checked and added to the digest; raise PluginError for another type."""
            rows = function(split, **(options.model_dump() if options else {}))
            wrong = type(rows).__name__ if isinstance(rows, Mapping) or not hasattr(rows, "__len__") else ""
            for number in range(0 if wrong or getattr(rows, "digest", "") else len(rows)):
                if not isinstance(row := rows[number], dict):
                    wrong = wrong or f"{type(row).__name__} as row {number}"
                digest.update(json.dumps(row, default=str, skipkeys=True).encode())
            if wrong:
                raise PluginError(f"{plugin.label} must return a sequence of dicts, got {wrong}.")
            return rows

        try:
            rows = self.plugins.guarded("data_sources", name, read)()  # rows may be computed as they are read
        except EngineError as error:
            raise type(error)(f"{place} = '{name}', split '{split}': {error}") from error
        if not len(rows) and not may_be_empty:
            raise DataError(f"{place} = '{name}': {plugin.label} returned no rows for the split '{split}'.")
        made = MemoryRows(rows, f"data source '{name}' ({split})")
        made.digest = getattr(rows, "digest", "") or digest.hexdigest()
        return made


def check_live(live: Mapping[str, Any]) -> None:
    """Refuse names and paths given in place of Python objects; name the key where each belongs.

    Raises:
        ConfigError: a value is a text or a path, or ``rewards`` is not a list of functions.
    """
    keys = {
        "model": "model.path",
        "tokenizer": "model.tokenizer",
        "rewards": "[[reward]]",
        "data": "data.train",
    }
    problems = [
        f"{name}: got the text {value!r}; expected the object itself. A name or path belongs in {keys[name]}."
        for name, value in live.items()
        if isinstance(value, (str, Path))
    ]
    rewards = live.get("rewards")
    if rewards is not None and not problems and (callable(rewards) or not all(callable(r) for r in rewards)):
        problems.append("rewards: expected a list of functions. A reward by name belongs in [[reward]].")
    if problems:
        raise ConfigError(problems)
