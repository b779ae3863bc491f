"""Plugin of the public data sets: data sources, and the command ``engine data``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from engine_core.hooks import hookimpl
from engine_core.specs import Command, DataSource
from engine_plugin_trainers.datasets.loading import rows_of
from engine_plugin_trainers.datasets.table import SETS


@hookimpl
def engine_data_sources() -> Mapping[str, DataSource]:
    """Offer public data sets."""
    return {
        name: DataSource(
            load=partial(rows_of, name),
            config=chosen.options,
            license=chosen.license,
            revision=chosen.revision,
            url=chosen.url,
        )
        for name, chosen in SETS.items()
    }


@hookimpl
def engine_commands() -> Mapping[str, Command]:
    """Offer ``engine data``."""
    return {"data": Command(load="engine_plugin_trainers.data_command:data")}
