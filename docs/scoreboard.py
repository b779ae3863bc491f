"""Writes ``docs/reference/backends.md``: which contract of the conformance kit each train engine keeps, in which settings.

    python docs/scoreboard.py            write the page
    python docs/scoreboard.py --check    change nothing; exit 1 where it is out of date

It reads what the suites of this repository declare (``unsupported``, capabilities, ranks, options); that what they do not
declare holds is what their tests are for. A suite over a plugin of its own file, as those with LoRA, is left out.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.plugins import PluginSet
from engine_core.testing import TrainEngineSuite

if TYPE_CHECKING:
    from engine_core.testing.contracts import Contract

DOCS = Path(__file__).parent
ROOT, PAGE = DOCS.parent, DOCS / "reference" / "backends.md"
SUITES = {
    "torch": "tests/conformance/test_torch.py",
    "fsdp": "plugins/fsdp/tests/test_conformance.py",
    "megatron": "plugins/megatron/tests/test_conformance.py",
    "deepspeed": "plugins/deepspeed/tests/test_conformance.py",
}
INTRO = """<!-- Written by docs/scoreboard.py from the suites. Change those, then run `python docs/scoreboard.py`. -->

# Contracts of the train engines

Which promises of the [conformance kit](../conformance.md) each backend keeps, on real ranks on a CPU over gloo, against an unsharded
reference. Nothing here was run on GPUs. A setting is one layout of ranks and options; `yes` means that in every setting of the backend a test holds the contract
(the slow ones in `make test-full`). `not yet` is a capability that the backend does not declare: the run file that needs it is refused."""


def settings(backend: str) -> Iterator[type[TrainEngineSuite]]:
    """The suites of a backend, in the order of their file."""
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


def told(suite: type[TrainEngineSuite]) -> list[str]:
    """A row of the table of settings."""
    options = ", ".join(f"`{name} = {value}`".lower() for name, value in suite.options.items()) or "defaults"
    others = ", ".join(map(str, suite.resumes_on)) or "-"
    slow = any(mark.name == "slow" for mark in getattr(suite, "pytestmark", ()))
    run = "make test-full" if slow else "make test"
    return [suite.backend, str(suite.world_size), options, others, f"`{run}`"]


def cell(contract: Contract, backend: str, suites: list[type[TrainEngineSuite]]) -> str:
    """What a backend makes of a contract."""
    declared = PluginSet.load({"train_engines": {backend}}).spec("train_engines", backend)
    capability = contract.capability
    if capability is not None and capability not in getattr(declared, "capabilities", frozenset()):
        return f"not yet: `{capability}`"
    held = [suite for suite in suites if contract.name not in suite.unsupported]
    reasons = [suite.unsupported[contract.name] for suite in suites if suite not in held]
    if contract.follow is not None:
        reasons += ["elsewhere not tested" for suite in held if not suite.resumes_on]
        held = [suite for suite in held if suite.resumes_on]
    if not reasons:
        return "yes"
    why = "; ".join(sorted(set(reasons)))
    return (
        f"{len(held)} of {len(suites)} settings: {why}" if held else f"no: {why.removeprefix('elsewhere ')}"
    )


def rows(header: list[str], body: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *body])


def page() -> str:
    suites = {backend: list(settings(backend)) for backend in SUITES}
    layouts = [told(suite) for found in suites.values() for suite in found]
    contracts = [
        [
            contract.promise.replace("``", "`"),
            *(cell(contract, backend, found) for backend, found in suites.items()),
        ]
        for contract in TrainEngineSuite.contracts.values()
    ]
    parts = [
        INTRO,
        "## Settings",
        rows(["backend", "ranks", "options", "its checkpoints also load on ranks", "run by"], layouts),
        "## Contracts",
        rows(["contract", *suites], contracts),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    made = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, "utf-8")
    elif not PAGE.is_file() or PAGE.read_text("utf-8") != made:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run python docs/scoreboard.py.")


if __name__ == "__main__":
    main()
