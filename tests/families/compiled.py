"""A context of workers in which a unit that cannot be compiled is an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from engine_plugin_torch import units


@contextmanager
def no_fallback(rank: int, world_size: int) -> Iterator[None]:
    """Raise where the engine would run a unit or the log-probs without compilation and log that."""

    def fail(name: str, error: Exception) -> None:
        raise AssertionError(f"{name} was not compiled") from error

    with patch.object(units, "_say_that_it_runs_plain", fail):
        yield
