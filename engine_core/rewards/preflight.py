"""Checks of rewards before a run begins: defaults of ``[[reward]]``, and data that a reward's ``check`` refuses.

If rows lack a column that a reward reads, the run would train on nothing, or on the remaining rows, with a single
log line. A row with an answer in an unknown form would fail in some later step. Only rows spread evenly over the files
are checked: a bad row that was not checked fails its sample later (`on_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError
from engine_core.rewards.signatures import call_factory, option_values
from engine_core.specs import resolve

if TYPE_CHECKING:
    from engine_core.config.rewards import RewardConfig
    from engine_core.plugins.plugin_set import PluginSet

ROWS = 1000
"""Maximum number of rows that are checked."""

MOST_WORKERS = 16
"""Maximum number of workers if `workers` is not set: each worker takes memory."""

RowCheck = Callable[[Mapping[str, Any]], None]


def with_defaults(config: RewardConfig, plugins: PluginSet) -> RewardConfig:
    """Return the table of a reward with the plugin's defaults for `workers` and `on_timeout`."""
    from engine_core.runs.machine import usable_cores  # not at the top: workers import this module

    if config.has_model:
        return config
    spec: Any = plugins.spec("rewards", config.name)  # refuses a name that the run did not load
    cores = min(usable_cores(), MOST_WORKERS) if spec.workers == "cores" else 1
    given = {"workers": cores if config.workers is None else config.workers}
    return config.model_copy(update=given | {"on_timeout": config.on_timeout or spec.on_timeout})


def check_rewards(rewards: Sequence[RewardConfig], plugins: PluginSet) -> dict[str, RowCheck]:
    """Call the ``check`` of every reward that has one.

    Args:
        rewards: the ``[[reward]]`` tables.
        plugins: plugins of the run.

    Returns:
        Functions that check a row, by reward name.

    Raises:
        EngineError: the first reward that cannot work here.
    """
    found = {}
    for reward in rewards:
        spec: Any = None if reward.has_model else plugins.find("rewards", reward.name)
        if spec is None or spec.check is None:
            continue
        table = spec.config() if reward.options is None else reward.options
        check = call_factory(resolve(spec.check), option_values(table), plugins, reward.timeout_seconds)
        if check is not None:
            found[reward.name] = check
    return found


def check_rows(
    checks: Mapping[str, RowCheck], rows: Iterable[tuple[str, Mapping[str, Any]]], most_bad: int, alone: bool
) -> None:
    """Refuse data that a reward cannot use.

    Args:
        checks: result of ``check_rewards``.
        rows: place ("train.jsonl:18") and columns of each row.
        most_bad: number of unusable rows that are allowed.
        alone: whether the reward is the only one, so that a row to which it does not apply is unusable. Else the
            reward must apply to at least one row.

    Raises:
        DataError: names the first unusable row and the reason.
    """
    if not checks:
        return
    lacking: dict[str, list[str]] = {name: [] for name in checks}
    useless: dict[str, list[str]] = {name: [] for name in checks}
    count = 0
    for count, (place, columns) in enumerate(rows, 1):  # noqa: B007
        for name, check in checks.items():
            try:
                check(columns)
            except (IndexError, KeyError):
                raise  # a bug of the check
            except LookupError as error:
                lacking[name].append(f"{place}: reward '{name}' {error}")
            except ValueError as error:
                useless[name].append(f"{place}: reward '{name}' {error}")
    for name in checks:
        bad = useless[name] + (lacking[name] if alone else [])
        if len(bad) > most_bad:
            raise DataError(
                f"{bad[0]} Such rows: {len(bad)} of {count} that were looked at; [data] max_bad_rows is {most_bad}."
            )
        if count and len(lacking[name]) == count:
            raise DataError(f"{lacking[name][0]} None of the {count} rows that were looked at has any.")
