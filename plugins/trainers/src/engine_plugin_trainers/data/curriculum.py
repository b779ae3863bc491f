"""The part ``curriculum``: the rounds of rows that a curriculum chooses, instead of epochs."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.errors import PluginError
from engine_core.runs.state_files import plain_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine_core.config import EngineConfig
    from engine_core.data.rows import Rows
    from engine_core.plugins import PluginSet
    from engine_core.specs import Options, TrainerSpec
    from engine_core.types import Rollout


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

    @staticmethod
    def problems(
        config: EngineConfig, plugins: PluginSet, spec: TrainerSpec, live: Collection[str]
    ) -> Iterator[str]:
        """Yield why the run cannot have its curriculum; a class learns from rewards, a function does not."""
        data, at = config.data, f"data.curriculum: got '{config.data.curriculum}'"
        if spec.stored:
            yield f"{at}, which chooses rows, but trainer '{config.trainer}' reads stored rollouts. Remove it."
        if config.run.steps is None:
            yield f"{at}, whose rounds may have any length, so run.epochs counts nothing. Set run.steps."
        if not isinstance(plugins.resolve("curricula", data.curriculum), type):
            return
        samples = not spec.sections or "rollout" in spec.sections
        if not samples or not (config.reward or config.environment or "rewards" in live):
            yield f"{at}, which learns from rewards, but trainer '{config.trainer}' has none. Use one that is a function."
        if data.num_workers:
            yield f"{at}, which learns from rewards, and workers do not wait for these. Set data.num_workers = 0."
        if data.columns.id is not None:
            yield f"{at}, which learns the rewards of rows by number, but data.columns.id replaces it. Remove that key."

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
