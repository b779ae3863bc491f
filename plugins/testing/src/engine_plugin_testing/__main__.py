"""The command ``python -m engine_plugin_testing``: prints the contracts as Markdown tables for docs/reference/contracts.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import engine_plugin_testing as kit

if TYPE_CHECKING:
    from engine_plugin_testing.contracts import Contract
    from engine_plugin_testing.suite import Suite


def table(suite: type[Suite]) -> str:
    """Return a table with a row for each contract: its test, its promise, what it runs for, the planted faults that it catches.

    The column "runs for" names a capability, a role, an option or sampling options. A suite whose contracts always run has no such column.
    """
    contracts = suite.contracts.values()
    limited = any(map(_runs_for, contracts))
    titles = ["test", "what it promises", *(["runs for"] if limited else []), "catches"]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for made in contracts:
        cells = [f"`{made.name}`", made.promise.replace("``", "`")]
        if limited:
            cells.append(_runs_for(made))
        rows.append(f"| {' | '.join([*cells, '; '.join(made.catches)])} |")
    return "\n".join(rows)


def _runs_for(made: Contract) -> str:
    """Return the capability, options and role that the contract needs, or "" if it always runs."""
    needed = [("capability", made.capability), ("option", made.option), ("role", made.role)]
    found = [f"{kind} `{name}`" for kind, name in needed if name]
    sampling = " or ".join(f"`{name}`" for name in sorted(made.options))
    return ", ".join([*found, *([f"sampling {sampling}"] if sampling else [])])


def main() -> None:
    """Print the tables of all suites."""
    for name in kit.__all__:
        print(f"<!-- {name} -->\n{table(getattr(kit, name))}\n<!-- end of {name} -->\n")


if __name__ == "__main__":
    main()
