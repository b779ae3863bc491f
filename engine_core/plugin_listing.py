"""What ``engine plugins`` shows: every installed name, healthy or not and why.

Answers from metadata and ``find_spec``. Only ``check`` imports plugins, each module in a process of
its own, so that one that crashes the interpreter is a line in the list.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine_core.errors import did_you_mean
from engine_core.plugin_metadata import NOUNS, Offer, find, installed, module_exists, offer_problem

CHECK_SECONDS = 300.0
_CHILD = "import sys; from engine_core.plugins import probe; probe(sys.argv[1:])"


@dataclass(frozen=True)
class PluginInfo:
    """One name that an installed distribution offers."""

    name: str
    kind: str  # the table: "rewards", "train_engines", ...; "plugins" for step hooks and observers
    distribution: str
    version: str
    module: str
    problem: str | None = None  # why a run could not use it

    @property
    def healthy(self) -> bool:
        """Whether a run could use it, as far as was looked."""
        return self.problem is None


def list_plugins(check: bool = False) -> list[PluginInfo]:
    """Every installed name, by kind and name.

    Args:
        check: also import each plugin and what stands behind its names, in subprocesses.
    """
    offers = sorted(installed(), key=lambda offer: (offer.kind, offer.name, offer.distribution.name))
    found = {offer: _problem(offer) for offer in offers}
    if check:
        sound = [offer for offer in offers if found[offer] is None]
        by_module: dict[tuple[str, str], list[Offer]] = {}
        for offer in sound:
            by_module.setdefault((offer.distribution.name, offer.module), []).append(offer)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for problems in pool.map(_import_elsewhere, by_module.values()):
                found |= problems
    return [
        PluginInfo(
            offer.name, offer.kind, offer.distribution.name, offer.distribution.version, offer.module, problem
        )
        for offer, problem in found.items()
    ]


def _problem(offer: Offer) -> str | None:
    """What metadata and the file system tell of one name."""
    if offer.kind not in NOUNS:
        groups = [f"engine.{kind}" for kind in NOUNS]
        return f"there is no group 'engine.{offer.kind}'.{did_you_mean(f'engine.{offer.kind}', groups)}"
    if problem := offer_problem(offer):
        return problem
    if not module_exists(offer.module):
        return f"its module '{offer.module}' is absent; reinstall {offer.distribution.name}"
    others = [str(other.distribution) for other in find(offer.kind, offer.name) if other != offer]
    if others:
        return f"also offered by {' and by '.join(others)}; write '{offer.distribution.name}:{offer.name}' to pick this one"
    return None


def _import_elsewhere(offers: Sequence[Offer]) -> dict[Offer, str | None]:
    """Load the names of one module in a subprocess; the problem of each."""
    targets = [f"{offer.kind}={offer.distribution.name}:{offer.name}" for offer in offers]
    command = [sys.executable, "-P", "-c", _CHILD, *targets]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=CHECK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(offers, f"its import took more than {CHECK_SECONDS:.0f} s")
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return dict.fromkeys(
            offers, f"its import ended the process with exit code {child.returncode}: {last}"
        )
    problems = json.loads(child.stdout.splitlines()[-1])
    return {offer: problems[target] for offer, target in zip(offers, targets, strict=True)}


def as_json(plugins: Sequence[PluginInfo]) -> str:
    """The list for ``engine plugins --json``."""
    return json.dumps([dataclasses.asdict(info) | {"healthy": info.healthy} for info in plugins], indent=2)
