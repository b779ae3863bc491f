"""The order of the rows: a seeded permutation in each epoch, a mix of parts by weight, or the rounds of a curriculum.

The order of an epoch is a function of the parts, the seed and the epoch, so a position in it needs no further state. Each part of a
mix has an endless sequence of rows: one permutation of the part after another. An epoch takes the next rows of each
sequence, as many as the weight of the part gives, and interleaves the parts. So no row of a part repeats before all
rows of the part have come, in however many epochs.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.errors import DataError, PluginError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine_core.data.rows import Rows
    from engine_core.plugins import PluginSet
    from engine_core.specs import Options
    from engine_core.types import Rollout


def shares(parts: Sequence[tuple[float, range]]) -> list[int]:
    """Return how many rows of an epoch come from each part; an epoch has as many rows as the parts together.

    The rows that are left after rounding down go to the parts with the largest remainders, of equal ones to the first.

    Args:
        parts: weight and row numbers of each part.

    Raises:
        DataError: a part would give no row.
    """
    total, weights = sum(len(rows) for _, rows in parts), np.array([weight for weight, _ in parts])
    exact = total * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    if not counts.all():
        few = f"part {counts.argmin()} with weight {weights[counts.argmin()]:g} gives none of the {total} rows of an epoch"
        raise DataError(f"[data] mix: {few}. Raise its weight, or remove the part.")
    return [int(count) for count in counts]


def order_of(parts: Sequence[tuple[float, range]], seed: int | None, epoch: int) -> NDArray[Any]:
    """Return the row numbers of an epoch in their order.

    Args:
        parts: weight and row numbers of each part; one part is no mix.
        seed: seed of the order; None: rows in the order of the files, parts evenly interleaved.
        epoch: number of the epoch, from 0.

    Returns:
        [N] int64; N is the number of rows of all parts.
    """
    if len(parts) == 1:
        return _turn(len(parts[0][1]), seed, epoch)
    counts = shares(parts)
    owners = np.repeat(np.arange(len(parts)), counts)  # [N]
    if seed is None:
        owners = owners[np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in counts]), kind="stable")]
    else:
        owners = np.random.default_rng([seed, epoch]).permutation(owners)
    order = np.empty(len(owners), dtype=np.int64)
    for part, ((_, rows), count) in enumerate(zip(parts, counts, strict=True)):
        first, skipped = divmod(epoch * count, len(rows))
        turns = range(first, first + (skipped + count - 1) // len(rows) + 1)
        sequence = np.concatenate([_turn(len(rows), seed, turn, part + 1) for turn in turns])
        order[owners == part] = rows.start + sequence[skipped : skipped + count]
    return order


def _turn(size: int, seed: int | None, *numbers: int) -> NDArray[Any]:
    return np.arange(size) if seed is None else np.random.default_rng([seed, *numbers]).permutation(size)


class CurriculumOrder:
    """The order of the rows that a curriculum chooses, round by round instead of epoch by epoch.

    Args:
        name: name of the curriculum.
        options: its options; None: it has none.
        plugins: one of them offers the curriculum.

    Raises:
        PluginError: the curriculum cannot be called with its arguments.
    """

    def __init__(self, name: str, options: Options | None, plugins: PluginSet) -> None:
        self._where = f"{plugins.chosen['curricula', name][1].label}: curriculum '{name}'"
        found, given = plugins.function("curricula", name), options.model_dump() if options else {}
        self._guard = partial(plugins.guarded, "curricula", name)
        self._call: Callable[..., Any] = partial(found, **given)
        self._made: Any = None  # a curriculum that learns from rewards
        if isinstance(plugins.resolve("curricula", name), type):
            self._made = self._call()
            self._call = self._guard(self._made)
        self._orders: dict[int, NDArray[Any]] = {}  # of the last two rounds

    def order(self, rows: Rows, number: int) -> NDArray[Any]:
        """Return the numbers of the rows of round ``number`` in their order: [N] integers.

        Raises:
            PluginError: the curriculum failed, or returned no rows or something else than row numbers.
        """
        if number not in self._orders:
            made, last = self._call(rows, number), len(rows) - 1
            order = self._guard(np.asarray)(made)
            whole = order.ndim == 1 and order.size and order.dtype.kind in "iu"
            if not (whole and 0 <= order.min() <= order.max() <= last):
                must = f"{self._where} must return row numbers from 0 to {last}, at least one"
                raise PluginError(f"{must}; for round {number} it returned {made!r:.80}.")
            self._orders = {n: o for n, o in self._orders.items() if n == number - 1}
            self._orders[number] = order
        return self._orders[number]

    def report(self, rollouts: Iterable[Rollout]) -> None:
        """Report the mean reward of each row to a curriculum that learns from rewards; rollouts without one are left out."""
        rewards = collections.defaultdict[int, list[float]](list)
        for rollout in rollouts if self._made is not None else ():
            if rollout.valid:
                rewards[int(rollout.prompt.id.rpartition(":")[2])].append(rollout.reward)
        if rewards:
            self._guard(self._made.update)({row: statistics.fmean(each) for row, each in rewards.items()})

    def state(self, number: int) -> dict[str, Any] | None:
        """Return the state of a curriculum that learns from rewards, with the order of round ``number``; else None."""
        # the module imports torch, which workers that read rows do not have
        from engine_core.runs.state_files import plain_state

        if self._made is None:
            return None
        kept = plain_state(self._where, self._guard(self._made.state)())
        order = self._orders.get(number)
        return {"state": kept, "order": None if order is None else order.tolist()}

    def load_state(self, state: Mapping[str, Any], number: int) -> None:
        """Continue in round ``number`` from the result of ``state``."""
        if self._made is not None:
            self._orders = {number: np.asarray(state["order"])} if state["order"] else {}
            self._guard(self._made.load_state)(state["state"])
