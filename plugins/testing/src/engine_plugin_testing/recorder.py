"""A plugin of pytest that records which contracts each class of the kit kept, with day, commit and versions.

    pytest -p engine_plugin_testing.recorder --record-contracts FILE.json tests/

The file has an entry for each class, ``path/of/test_file.py::TestClass``: the settings of the class, the day, the
commit, the versions, and for each contract ``passed``, ``failed``, or the reason why it was skipped. The entry of a class that ran
only in part (``-k``, an interrupt) is left unchanged, so that no entry mixes two runs. Works under pytest-xdist.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from packaging.requirements import Requirement

from engine_core.plugins.metadata import CORE, find
from engine_plugin_testing.suite import Suite, plain

if TYPE_CHECKING:
    import pytest

RECORDED = ("backend", "name", "world_size", "resumes_on", "options", "model")
"""Attributes that identify the settings of a suite; a suite has those of its kind."""
COMPUTES = ("torch", "transformers")
PASSED, FAILED = "passed", "failed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record-contracts``."""
    parser.addoption(
        "--record-contracts",
        metavar="FILE",
        help="JSON file in which the outcomes of the conformance kit's classes are kept",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register a ``Recorder`` if ``--record-contracts`` is given."""
    if file := config.getoption("--record-contracts"):
        config.pluginmanager.register(Recorder(Path(file), config), "engine-contracts")


class Recorder:
    """A collector of outcomes that writes them at the end of the session.

    Args:
        file: the record, read and written; may be missing.
        config: configuration of pytest. Under xdist the workers attach properties to tests, and the controller writes.
    """

    def __init__(self, file: Path, config: pytest.Config) -> None:
        self.file, self.config = file, config
        self.writes = not hasattr(config, "workerinput")
        self.entries: dict[str, tuple[dict[str, Any], list[str]]] = {}
        self.outcomes: dict[str, dict[str, str]] = {}
        self.partly: list[str] = []

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Attach class, contract and settings to each test of a suite; its reports carry them."""
        for item in items:
            suite = getattr(item, "cls", None)
            name = getattr(item, "originalname", item.name)
            if isinstance(suite, type) and issubclass(suite, Suite) and name in suite.contracts:
                key = f"{_relative(item.path, self.config)}::{suite.__name__}"
                entry = {**settings(suite), "versions": versions(suite)}
                item.user_properties.append(("contract", [key, name, entry, [*suite.contracts]]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a contract: of its three reports (setup, call, teardown) a failure takes precedence."""
        for what, value in report.user_properties:
            if what != "contract":
                continue
            key, name, entry, contracts = cast(tuple[str, str, dict[str, Any], list[str]], value)
            self.entries[key] = entry, contracts
            kept = self.outcomes.setdefault(key, {})
            outcome = _outcome(report)
            if outcome is not None and kept.get(name) != FAILED:
                kept[name] = outcome

    def pytest_sessionfinish(self) -> None:
        """Write the entries of the classes that ran completely."""
        if not self.writes:
            return
        record = read(self.file)
        for key, outcomes in self.outcomes.items():
            entry, contracts = self.entries[key]
            if missing := [name for name in contracts if name not in outcomes]:
                self.partly.append(f"{key} ({len(missing)} of {len(contracts)} contracts did not run)")
                continue
            record[key] = {
                **entry,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "commit": commit(self.config.rootpath),
                "contracts": {name: outcomes[name] for name in contracts},
            }
        if self.outcomes:
            self.file.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", "utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many classes were recorded and which entries were left unchanged."""
        if not self.writes:
            return
        written = len(self.outcomes) - len(self.partly)
        terminalreporter.write_line(f"contracts: {written} classes recorded in {self.file}")
        for key in self.partly:
            terminalreporter.write_line(f"contracts: left as it was: {key}")


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Read a record; return an empty one if there is no file."""
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def commit(folder: Path) -> str:
    """Return the commit that is checked out in a folder, in eight digits; empty outside of a repository."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def settings(suite: type[Suite]) -> dict[str, Any]:
    """Return the attributes that identify this suite among others of its kind, as JSON values."""
    return {name: plain(getattr(suite, name)) for name in RECORDED if hasattr(suite, name)}


def versions(suite: type[Suite]) -> dict[str, str]:
    """Return the versions of Python, the core, ``COMPUTES``, the plugin's distribution and its direct requirements."""
    offers = list(find(suite.kind, suite.offered()))
    names = {
        requirement.name
        for offer in offers
        if offer.distribution.name != CORE  # most of the core's requirements compute nothing
        for requirement in map(Requirement, offer.distribution.requires)
        if requirement.marker is None
    }
    found = {"python": platform.python_version()}
    for name in [CORE, *(offer.distribution.name for offer in offers), *COMPUTES, *sorted(names)]:
        try:
            found.setdefault(name, version(name))
        except PackageNotFoundError:
            continue  # not installed, so not used
    return found


def _outcome(report: pytest.TestReport) -> str | None:
    """Return the outcome of a phase; None if it does not decide the contract's."""
    if report.failed:
        return FAILED
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return str(reason).removeprefix("Skipped: ")
    return PASSED if report.when == "call" else None


def _relative(path: Path, config: pytest.Config) -> str:
    here = config.invocation_params.dir
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()
