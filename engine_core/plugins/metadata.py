"""Installed plugins, read from package metadata without importing a plugin.

A distribution offers names through entry points, one group per table: ``engine.rewards``,
``engine.train_engines``, ...; ``engine.plugins`` holds plugins with step hooks and observers only.
A broken installation is not an error here; it is reported when a run uses it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from itertools import chain

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import engine_core
from engine_core.errors import did_you_mean, nearest
from engine_core.specs import TABLE_SPECS

CORE = "engine-core-rl"
TABLES = "tables"
"""The entry-point group ``engine.tables``: tables that plugins define, each with the module of its hook and spec."""
MODEL_HINT = " A reward that a model gives has a table [reward.model] with its path; its name is then free."


@dataclass(frozen=True)
class Distribution:
    """An installed distribution with entry points of a group ``engine.*``."""

    name: str  #: as a package index lists it
    version: str  #: the installed version
    requires: tuple[str, ...] = ()  #: its Requires-Dist lines

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Offer:
    """An entry point, such as ``mine = "my_plugin.plugin"`` in the group ``engine.train_engines``."""

    kind: str  #: of the name: the group without ``engine.``
    name: str  #: the name that run files use
    module: str  #: the module with the hooks
    distribution: Distribution  #: what offers the name

    def __str__(self) -> str:
        return f"Plugin '{self.name}' ({self.distribution})"


def installed() -> tuple[Offer, ...]:
    """Return every entry point of a group ``engine.*``; a distribution found twice on the path counts once.

    What is installed later is not seen until ``sys.path`` changes.
    """
    return _read(tuple(sys.path))


@functools.lru_cache(maxsize=64)
def version(distribution: str) -> str:
    """Return the version of an installed distribution, read once: its metadata take some milliseconds to parse.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(distribution)


def _builtin() -> Iterator[Offer]:
    """Yield the names of the core, which are registered only in ``engine_core.builtin``."""
    from engine_core import builtin  # imported lazily: a program that uses no name does not load it

    core = Distribution(CORE, engine_core.__version__)
    for hook, function in vars(builtin).items():
        if hook.startswith("engine_"):
            kind = hook.removeprefix("engine_")
            yield from (Offer(kind, name, builtin.__name__, core) for name in function())


@functools.lru_cache(maxsize=4)
def _read(_path: tuple[str, ...]) -> tuple[Offer, ...]:
    offers = {CORE: list(_builtin())}
    for found in importlib.metadata.distributions():
        if "[engine." not in (found.read_text("entry_points.txt") or ""):
            continue
        # Parsed only for plugins: the metadata of every distribution would cost tens of milliseconds.
        headers = HeaderParser().parsestr(found.read_text("METADATA") or found.read_text("PKG-INFO") or "")
        distribution = Distribution(
            name=canonicalize_name(headers["Name"] or "unknown"),
            version=headers["Version"] or "unknown",
            requires=tuple(headers.get_all("Requires-Dist") or ()),
        )
        offers.setdefault(  # the first on the path is imported
            distribution.name,
            [
                Offer(entry.group.removeprefix("engine."), entry.name, entry.value, distribution)
                for entry in found.entry_points
                if entry.group.startswith("engine.")
            ],
        )
    return tuple(chain.from_iterable(offers[name] for name in sorted(offers)))


def nouns() -> Mapping[str, str]:
    """Return the noun of each kind, for messages: the core's tables and those that installed plugins define."""
    core = {kind: spec.noun for kind, spec in TABLE_SPECS.items()} | {"plugins": "plugin", TABLES: "table"}
    return core | {kind: noun_of(kind) for kind in known_names(TABLES)}


def noun_of(kind: str) -> str:
    """Return the noun of a table by its name alone: ``tool format`` for ``tool_formats``."""
    return re.sub(r"(?<=ss)es$|s$", "", kind).replace("_", " ")


def split(name: str) -> tuple[str | None, str]:
    """Split ``"dist:name"`` into (distribution, name); a plain name has distribution None."""
    distribution, _, short = name.rpartition(":")
    return (distribution or None), short


def known_names(kind: str) -> dict[str, list[str]]:
    """Return the names of one kind, each with the distributions that offer it."""
    names: dict[str, list[str]] = {}
    for offer in installed():
        if offer.kind == kind:
            names.setdefault(offer.name, []).append(offer.distribution.name)
    return names


@functools.cache
def our_plugins() -> dict[tuple[str, str], str]:
    """Return ``(kind, name) -> distribution`` of the plugins that this project publishes, for install hints.

    Hints name only these distributions: an attacker could register a name that is guessed from a misspelling.
    """
    text = (importlib.resources.files("engine_core.plugins") / "known_plugins.json").read_text("utf-8")
    return {
        (kind, name): distribution
        for distribution, kinds in json.loads(text).items()
        for kind, names in kinds.items()
        for name in names
    }


def offer_problem(offer: Offer) -> str | None:
    """Return why an entry point must not be imported, from its metadata alone, or None."""
    if not all(part.isidentifier() for part in offer.module.split(".")):
        return f"has the entry point value '{offer.module}'; expected a module, such as 'my_plugin.plugin'"
    return _version_problem(offer.distribution)


@functools.lru_cache(maxsize=256)
def _version_problem(distribution: Distribution) -> str | None:
    """Return why a distribution does not fit this core, by its ``Requires-Dist``; None if it fits."""
    ours = Version(engine_core.__version__)
    for line in distribution.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return f"has the malformed requirement {line!r} in its metadata; reinstall it"
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        fits = requirement.specifier.contains(ours, prereleases=True)
        if canonicalize_name(requirement.name) == CORE and applies and not fits:
            return (
                f"needs {CORE}{requirement.specifier}, but this is {CORE} {ours}. "
                f"Upgrade the older one: pip install --upgrade {CORE} {distribution.name}"
            )
    return None


def unknown_name(kind: str, name: str, also: Iterable[str] = ()) -> str:
    """Return why a name that no plugin offers cannot be used, and what to do.

    Args:
        kind: the table of the lookup.
        name: the name as the user wrote it.
        also: names that plugins without metadata offer (one-file plugins).
    """
    distribution, short = split(name)
    noun = nouns().get(kind, noun_of(kind))  # its table may not be installed
    offered, ours = known_names(kind), our_plugins()
    known = {*offered, *also}
    if distribution and short in offered:
        choices = " or ".join(f"'{dist}:{short}'" for dist in offered[short])
        return f"Distribution '{distribution}' offers no {noun} '{short}'. Write {choices}."
    if (kind, short) in ours:
        return f"{noun.capitalize()} '{short}' is not installed. Try: pip install {ours[kind, short]}"
    chosen = [spec for spec in TABLE_SPECS.values() if spec.kind != kind and not spec.internal]
    others = [s.noun for s in chosen if short in known_names(s.kind) or (s.kind, short) in ours]
    if others:
        hint = MODEL_HINT if kind == "rewards" else ""
        return (
            f"'{short}' is known as {' and '.join(others)}, not as {noun}.{did_you_mean(short, known)}{hint}"
        )
    to_install = {our_name for our_kind, our_name in ours if our_kind == kind}
    match = nearest(short, known | to_install)
    hint = MODEL_HINT if kind == "rewards" and match is None else ""
    if match in to_install - known:
        known.add(match)
        hint = f" It is not installed: pip install {ours[kind, match]}"
    return f"Unknown {noun} '{short}'.{did_you_mean(short, known)}{hint}"


def find(kind: str, name: str) -> Iterator[Offer]:
    """Yield the offers of a name in one group; with several, the run must choose one."""
    distribution, short = split(name)
    for offer in installed():
        fits = distribution is None or canonicalize_name(distribution) == offer.distribution.name
        if offer.kind == kind and offer.name == short and fits:
            yield offer
