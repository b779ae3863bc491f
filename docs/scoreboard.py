"""Writes ``docs/reference/backends.md``: which contract of the conformance kit each train engine kept, in which setting.

    python docs/scoreboard.py                    write the page
    python docs/scoreboard.py --check            change nothing; exit 1 where it is out of date
    python docs/scoreboard.py --record [NAME]    run the suites (of one backend, or of all: half an hour), then write the page

The page shows recorded outcomes: ``engine_plugin_testing.recorder`` writes them into ``docs/reference/contracts.json`` while the
suites run, with day, commit and versions. A suite that is new, or whose settings changed since, is shown as `not run`. Suites that
load a plugin of the same file, such as those of LoRA, are left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))  # page_parts, also where this file is run by its path

from page_parts import ROOT, recorded_page, run_recorded

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.recorder import FAILED, PASSED, read, settings
from engine_plugin_testing.suite import EMPTY, NOWHERE_ELSE, UNDECLARED, UNSUPPORTED

if TYPE_CHECKING:
    from engine_plugin_testing.contracts import Contract

DOCS = Path(__file__).parent
PAGE, RECORD = DOCS / "reference" / "backends.md", DOCS / "reference" / "contracts.json"
SUITES = {
    "torch": "tests/conformance/test_torch.py",
    "fsdp": "plugins/fsdp/tests/test_conformance.py",
    "megatron": "plugins/megatron/tests/test_conformance.py",
    "deepspeed": "plugins/deepspeed/tests/test_conformance.py",
}
NOT_RUN = "not run"
Record = Mapping[str, Mapping[str, Any]]
INTRO = """<!-- Written by docs/scoreboard.py from docs/reference/contracts.json. Run `python docs/scoreboard.py --record`. -->

# Test results by backend

This page shows which contracts of the [conformance kit](../conformance.md) each train engine passed. The suites run on CPUs, with real
ranks over gloo, and compare each engine with an unsharded reference. They were not run on GPUs here:
[what has run where](compatibility.md#what-has-run-where) lists the runs on GPUs.

A setting is one layout of ranks and options. The tables show the last run of each setting. `passes` alone means that the contract passed in every
setting of the backend. Otherwise a cell lists the settings by number:

- `cannot`: a gap that the suite declares, with the reason.
- `not yet`: the backend does not declare this capability, so a run file that needs it is refused.
- `not tested`: the setting has no second number of ranks to resume with.
- `not run`: the contract is newer than the last run of the setting."""

FEATURES_INTRO = """These features have no contract.

- `tested`: the plugin's tests cover the feature, on CPUs.
- `not run`: a run file can select the feature, but this project has not run it.
- `refused`: the engine refuses the feature and names an alternative.
- `no option`: no key of the run file selects it."""
FEATURES = {
    "float16 with a scaled loss": ["tested", "tested", "tested", "tested: stages 1 to 3"],
    "LoRA": ["tested", "tested", "refused: its linear layers are fused and split over ranks", "tested"],
    "matrix products in 8 bits (fp8)": ["no option", "tested: `fp8`, with torchao", "no option", "no option"],
    "kernels of Transformer Engine and apex": [
        "no option",
        "no option",
        "not run: megatron-core uses their fused AdamW if installed, and none of their layers",
        "no option",
    ],
    "tokens of a sequence on several ranks": ["no option", "tested: `sp`", "tested: `cp`", "no option"],
    "AutoTP": [
        "no option",
        "no option",
        "no option",
        "no option: the engine would take a part of a weight for the whole",
    ],
}
"""State by backend, in the order of ``SUITES``."""


def suites_of(backend: str) -> Iterator[type[TrainEngineSuite]]:
    """Yield the suites of a backend, in the order of their file."""
    path = ROOT / SUITES[backend]
    spec = importlib.util.spec_from_file_location(f"scoreboard_{backend}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, found in vars(module).items():
        if not (name.startswith("Test") and isinstance(found, type) and issubclass(found, TrainEngineSuite)):
            continue
        if found.backend == backend and not found.plugins:
            yield found


def run_of(suite: type[TrainEngineSuite], record: Record) -> Mapping[str, Any] | None:
    """Return the recorded run of a suite, or None if there is none or its settings have changed since."""
    found = record.get(f"{SUITES[suite.backend]}::{suite.__name__}")
    if found is None or any(found.get(name) != value for name, value in settings(suite).items()):
        return None
    return found


def setting_row(suite: type[TrainEngineSuite], number: int, record: Record) -> list[str]:
    """Return a row of the table of settings."""
    shown = {**suite.options, **{key: value for key, value in suite.model.items() if key == "model_type"}}
    options = ", ".join(f"`{name} = {value}`".lower() for name, value in shown.items()) or "defaults"
    others = ", ".join(map(str, suite.resumes_on)) or "-"
    slow = any(mark.name == "slow" for mark in getattr(suite, "pytestmark", ()))
    run = run_of(suite, record)
    day = f"{run['date']}, `{run['commit']}`" if run else NOT_RUN
    return [
        suite.backend,
        str(number),
        str(suite.world_size),
        options,
        others,
        f"`make test{'-full' * slow}`",
        day,
    ]


def state(contract: Contract, run: Mapping[str, Any] | None) -> str:
    """Return the text of one outcome of a contract."""
    outcome = run["contracts"].get(contract.name) if run else None
    if outcome is None:
        return NOT_RUN
    if outcome == PASSED:
        return "passes"
    if outcome == FAILED:
        return "**fails**"
    if outcome.startswith(UNSUPPORTED):
        return f"cannot: {outcome.removeprefix(UNSUPPORTED)}"
    if UNDECLARED in outcome:
        return f"not yet: `{contract.capability}`"
    return "not tested" if outcome == NOWHERE_ELSE or EMPTY in outcome else f"skipped: {outcome}"


def cell(contract: Contract, suites: list[type[TrainEngineSuite]], record: Record) -> str:
    """Return the cell of a contract and a backend, which groups its settings by outcome."""
    found: dict[str, list[str]] = {}
    for number, suite in enumerate(suites, 1):
        found.setdefault(state(contract, run_of(suite, record)), []).append(str(number))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(numbers)} {what}" for what, numbers in found.items())


def ran_with(record: Record) -> list[list[str]]:
    """Return the rows of the versions that each backend ran with."""
    found = []
    for backend in SUITES:
        runs = [run for suite in suites_of(backend) if (run := run_of(suite, record))]
        lines = dict.fromkeys(", ".join(f"{n} {v}" for n, v in run["versions"].items()) for run in runs)
        found.append([backend, "; ".join(lines) or NOT_RUN])
    return found


def rows(header: list[str], body: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *body])


def page() -> str:
    suites, record = {backend: list(suites_of(backend)) for backend in SUITES}, read(RECORD)
    layouts = [
        setting_row(suite, number, record)
        for found in suites.values()
        for number, suite in enumerate(found, 1)
    ]
    contracts = [
        [contract.promise.replace("``", "`"), *(cell(contract, found, record) for found in suites.values())]
        for contract in TrainEngineSuite.contracts.values()
    ]
    header = [
        "backend",
        "setting",
        "ranks",
        "options",
        "its checkpoints also load on ranks",
        "run by",
        "last run",
    ]
    parts = [
        INTRO,
        "## Settings",
        rows(header, layouts),
        "## Versions",
        rows(["backend", "ran with"], ran_with(record)),
        "## Contracts",
        rows(["contract", *suites], contracts),
        "## Features without a contract",
        FEATURES_INTRO,
        rows(["feature", *suites], [[what, *states] for what, states in FEATURES.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def run_suites(backends: list[str]) -> int:
    """Run the suites of these backends (of all if none is given); return pytest's exit code."""
    tests = [
        f"{SUITES[backend]}::{suite.__name__}"
        for backend in backends or SUITES
        for suite in suites_of(backend)
    ]
    return run_recorded(RECORD, tests)


if __name__ == "__main__":
    recorded_page(__doc__, {PAGE: page}, SUITES, run_suites)
