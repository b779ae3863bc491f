"""What ``engine plugins`` shows: every installed name, healthy or not and why.

Answers from metadata and ``find_spec``. Only ``check`` imports plugins, in another process, so that one that
crashes the interpreter is a line in the list. They are imported together first, since each would import
torch; what fails there is tried again alone, so that nobody is blamed for a neighbour.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from engine_core.errors import did_you_mean
from engine_core.plugins.metadata import Offer, find, installed, module_exists, nouns, offer_problem

CHECK_SECONDS = 300.0
Found = tuple[str | None, str, bool]  # problem, health, whether that is well
_CHILD = "import sys; from engine_core.plugins.probe import probe; probe(sys.argv[1:])"


@dataclass(frozen=True)
class PluginInfo:
    """One name that an installed distribution offers."""

    name: str
    kind: str  # the table: "rewards", "train_engines", ...; "plugins" for step hooks and observers
    distribution: str
    version: str
    module: str
    problem: str | None = None  # why a run could not use it
    health: str = ""  # what it says of this machine, where it was asked
    fit: bool = True  # whether that is well

    @property
    def healthy(self) -> bool:
        """Whether a run could use it, as far as was looked."""
        return self.problem is None


def list_plugins(check: bool = False) -> list[PluginInfo]:
    """Every installed name, by kind and name.

    Args:
        check: also import each plugin and what stands behind its names, in another process.
    """
    offers = sorted(installed(), key=lambda offer: (offer.kind, offer.name, offer.distribution.name))
    found: dict[Offer, Found] = {offer: (_problem(offer), "", True) for offer in offers}
    if check:
        by_module: dict[tuple[str, str], list[Offer]] = {}
        for offer in offers:
            if found[offer][0] is None:
                by_module.setdefault((offer.distribution.name, offer.module), []).append(offer)
        found |= _import_all(list(by_module.values()))
    return [
        PluginInfo(
            offer.name, offer.kind, offer.distribution.name, offer.distribution.version, offer.module, *said
        )
        for offer, said in found.items()
    ]


def _problem(offer: Offer) -> str | None:
    """What metadata and the file system tell of one name."""
    if offer.kind not in nouns():
        groups = [f"engine.{kind}" for kind in nouns()]
        return f"there is no group 'engine.{offer.kind}'.{did_you_mean(f'engine.{offer.kind}', groups)}"
    if problem := offer_problem(offer):
        return problem
    if not module_exists(offer.module):
        return f"its module '{offer.module}' is absent; reinstall {offer.distribution.name}"
    others = [str(other.distribution) for other in find(offer.kind, offer.name) if other != offer]
    if others:
        return f"also offered by {' and by '.join(others)}; write '{offer.distribution.name}:{offer.name}' to pick this one"
    return None


def _import_all(modules: list[list[Offer]]) -> dict[Offer, Found]:
    """What each name of these modules answers: together as far as that goes, those with a problem alone."""
    found: dict[Offer, Found] = {}
    while modules:
        answers, _ = _import_elsewhere([offer for offers in modules for offer in offers])
        silent = [offers for offers in modules if not all(offer in answers for offer in offers)]
        ill = [offers for offers in modules if any(answers.get(offer, ("",))[0] for offer in offers)]
        found |= answers
        for offers in [*silent[:1], *ill]:  # the first without an answer is the one that ended the process
            alone, end = _import_elsewhere(offers)
            found |= {offer: alone.get(offer, (end, "", True)) for offer in offers}
        modules = [offers for offers in silent[1:] if offers not in ill]
    return found


def _import_elsewhere(offers: Sequence[Offer]) -> tuple[dict[Offer, Found], str]:
    """Load names in a subprocess, in order.

    Returns:
        Of each name that it came to: its problem, and what it says of the machine. And how the process ended,
        for those that it did not come to.
    """
    targets = {f"{offer.kind}={offer.distribution.name}:{offer.name}": offer for offer in offers}
    command = [sys.executable, "-P", "-c", _CHILD, *targets]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.run(command, stdout=out, stderr=err, env=environment, timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            end = f"its import took more than {CHECK_SECONDS:.0f} s"
        else:
            last = (_lines(err) or ["no message"])[-1]
            end = f"its import ended the process with exit code {child.returncode}: {last}"
        told = [json.loads(line) for line in _lines(out)]
    return {targets[target]: (problem, health, fit) for target, problem, health, fit in told}, end


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def as_json(plugins: Sequence[PluginInfo]) -> str:
    """The list for ``engine plugins --json``."""
    return json.dumps([dataclasses.asdict(info) | {"healthy": info.healthy} for info in plugins], indent=2)
