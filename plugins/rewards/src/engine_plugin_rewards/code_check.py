"""The checks of the reward ``code`` before a run begins: options, this machine, rows without usable tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_core.errors import did_you_mean
from engine_plugin_rewards import code_cases
from engine_plugin_rewards.code import check_kinds, least_tier, settled
from engine_plugin_rewards.code_options import CodeOptions
from engine_plugin_rewards.sandbox import tiers


def make_check(
    timeout: float, modules: Sequence[str], root: Path, allow_code: bool, **options: Any
) -> Callable[[Mapping[str, Any]], None]:
    """Make the function that checks rows; the arguments are those of ``code.make_code``.

    The function raises LookupError for a row without tests, and ValueError for tests that cannot be used.

    Raises:
        EnvironmentProblem: this machine's sandbox is weaker than `min_isolation`.
        ConfigError: the options contradict each other.
        PluginError: no plugin offers the language.
    """
    chosen = CodeOptions.model_validate(options)
    _, language = settled(chosen, timeout, modules, root, allow_code)
    tiers.demand(least_tier(chosen, language))

    def check(columns: Mapping[str, Any]) -> None:
        """Raise LookupError for a row without tests, ValueError for tests that cannot be used."""
        column = next((name for name in ("tests", "answer") if columns.get(name) is not None), None)
        if column is None:
            raise LookupError(
                "finds no tests: the row has no value in a column 'tests' or 'answer'."
                f'{did_you_mean("tests", [str(name) for name in columns])} Name their column in [data.columns]: answer = "...". '
                f"Forms of tests: {code_cases.FORMS}."
            )
        try:
            cases = code_cases.parse(columns[column], columns.get("entry_point"), columns.get("test_setup"))
            check_kinds(cases[: chosen.max_tests or None], chosen.language, language)
        except code_cases.BadTests as error:
            raise ValueError(
                f"cannot use the tests in column '{column}': {error}. Forms of tests: {code_cases.FORMS}."
            ) from None

    return check
