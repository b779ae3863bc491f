"""The command ``python -m engine_plugin_testing``: prints the contracts as Markdown tables for docs/reference/contracts.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import engine_plugin_testing as kit

if TYPE_CHECKING:
    from engine_plugin_testing.suite import Suite


def table(suite: type[Suite]) -> str:
    """Return a table with a row for each contract: its test, its promise, the planted faults that it catches."""
    rows = ["| test | what it promises | catches |", "|---|---|---|"]
    for made in suite.contracts.values():
        promise = made.promise.replace("``", "`")
        if made.capability:
            promise += f" (Capability `{made.capability}`.)"
        if made.role:
            promise += f" (Role `{made.role}`.)"
        rows.append(f"| `{made.name}` | {promise} | {'; '.join(made.catches)} |")
    return "\n".join(rows)


def main() -> None:
    """Print the tables of all suites."""
    for name in kit.__all__:
        print(f"<!-- {name} -->\n{table(getattr(kit, name))}\n<!-- end of {name} -->\n")


if __name__ == "__main__":
    main()
