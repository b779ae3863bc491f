"""Inputs of a run in place of files: objects from Python, and rows of a data source, ``[data] source = "NAME"``.

The function of the source is called once for each split, before any model is built.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.data.rows import MemoryRows
from engine_core.errors import ConfigError, DataError, PluginError

if TYPE_CHECKING:
    from engine_core.config.evaluation import HeldOut
    from engine_core.config.models import DataConfig
    from engine_core.plugins.plugin_set import PluginSet

log = logging.getLogger("engine")


class GivenRows:
    """The rows of a run that are in no file.

    Args:
        config: ``[data]``.
        plugins: one of them offers the data source.
        live: rows to train on, given from Python; None: there are none.
    """

    def __init__(self, config: DataConfig, plugins: PluginSet, live: Any = None) -> None:
        self.config, self.plugins, self.live = config, plugins, live
        self._kept: dict[str, MemoryRows] = {}  # by split

    @property
    def place(self) -> str:
        """The origin of the training rows, for messages: a key of the run file, or "the argument data"."""
        if self.live is not None:
            return "the argument data"
        return "data.source" if self.config.source else "data.train"

    def train(self) -> Any:
        """Return the rows to train on; None if files hold them.

        Raises:
            PluginError: the function of the data source failed, or returned no sequence of dicts.
            DataError: it returned no rows.
        """
        return self.live if self.live is not None else self._of_source("train")

    def held_out(self, held_out: HeldOut) -> MemoryRows | None:
        """Return the rows of a held-out set; None if files hold them.

        Raises:
            PluginError: the function of the data source failed, or returned no sequence of dicts.
        """
        has_files = bool(held_out.name) or any(held_out.path)  # the set of `data.validation` may have none
        return None if has_files else self._of_source("validation")

    def _of_source(self, split: str) -> MemoryRows | None:
        if not self.config.source:
            return None
        if split not in self._kept:
            self._kept[split] = self._read(split)
        return self._kept[split]

    def _read(self, split: str) -> MemoryRows:
        """Call the function of the data source for a split; check every row, unless the rows have a ``digest``.

        Raises:
            PluginError: the function failed, or returned no sequence of dicts.
            DataError: the split ``train`` has no rows.
        """
        name, options, plugins = self.config.source, self.config.options, self.plugins
        spec, plugin = plugins.chosen["data_sources", name]
        function, digest = plugins.function("data_sources", name), hashlib.sha256()
        about = [f"{key} {value}" for key in ("license", "revision", "url") if (value := getattr(spec, key))]
        if split == "train":
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
            rows = plugins.guarded("data_sources", name, read)()  # rows may be computed as they are read
        except PluginError as error:
            raise PluginError(f"data.source = '{name}', split '{split}': {error}") from error
        if split == "train" and not len(rows):
            raise DataError(f"data.source = '{name}': {plugin.label} returned no rows for the split 'train'.")
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
