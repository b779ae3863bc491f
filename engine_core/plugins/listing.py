"""The list of ``engine plugins``: every installed name, with its problem if it has one.

The list is built from metadata and ``find_spec``. Only ``check`` imports plugins. It does so in a subprocess, so that
a plugin that crashes the interpreter is a line in the list. All plugins are first imported in one process, because
each may import torch. A plugin that fails there is tried again alone, so that it is not blamed for another's fault.
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
Found = tuple[str | None, str, bool]  # problem, health, whether the health is good
_CHILD = "import sys; from engine_core.plugins.probe import probe; probe(sys.argv[1:])"


@dataclass(frozen=True)
class PluginInfo:
    """A name that an installed distribution offers."""

    name: str
    kind: str  # the table: "rewards", "train_engines", ...; "plugins" for step hooks and observers
    distribution: str
    version: str
    module: str
    problem: str | None = None  # why a run cannot use it
    health: str = ""  # what its health check reports about this machine, if it was run
    fit: bool = True  # whether the health check passed

    @property
    def healthy(self) -> bool:
        """Whether no problem was found."""
        return self.problem is None


def list_plugins(check: bool = False) -> list[PluginInfo]:
    """List every installed name, sorted by kind and name.

    Args:
        check: also import each plugin and the objects of its names, in a subprocess.
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
    """Return the problem of a name that metadata and the file system show, or None."""
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
    """Check the names of all modules in one subprocess; check the modules with a problem again, each alone."""
    found: dict[Offer, Found] = {}
    while modules:
        answers, _ = _import_elsewhere([offer for offers in modules for offer in offers])
        silent = [offers for offers in modules if not all(offer in answers for offer in offers)]
        ill = [offers for offers in modules if any(answers.get(offer, ("",))[0] for offer in offers)]
        found |= answers
        for offers in [*silent[:1], *ill]:  # the first module without a result ended the process
            alone, end = _import_elsewhere(offers)
            found |= {offer: alone.get(offer, (end, "", True)) for offer in offers}
        modules = [offers for offers in silent[1:] if offers not in ill]
    return found


def _import_elsewhere(offers: Sequence[Offer]) -> tuple[dict[Offer, Found], str]:
    """Load names in a subprocess, in order.

    Returns:
        The problem and health of each name that the process reached, and how the process ended, as the problem
        of the names that it did not reach.
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
        results = [json.loads(line) for line in _lines(out)]
    return {targets[target]: (problem, health, fit) for target, problem, health, fit in results}, end


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def as_json(plugins: Sequence[PluginInfo]) -> str:
    """Return the list as JSON, for ``engine plugins --json``."""
    return json.dumps([dataclasses.asdict(info) | {"healthy": info.healthy} for info in plugins], indent=2)
