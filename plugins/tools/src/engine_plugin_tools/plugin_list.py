"""The list of ``engine plugins``: every installed name, with its problem if it has one.

The list is built from metadata. Plugins are imported by ``check`` alone, and those of one kind for their descriptions.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_core.errors import EngineError, did_you_mean
from engine_core.plugins import PluginSet
from engine_core.plugins.metadata import TABLES, Offer, find, installed, nouns, offer_problem
from engine_core.plugins.modules import table_module
from engine_core.specs import NoOptions, resolve


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
    description: str = ""  # what it is, in a sentence; only in the list of one kind

    @property
    def healthy(self) -> bool:
        """Whether no problem was found."""
        return self.problem is None

    @property
    def state(self) -> str:
        """``ok``, the problem of the plugin, or a warning about what this machine lacks for it."""
        if not self.healthy:
            return f"problem: {self.problem}"
        return "ok" if self.fit else f"warning: {self.health}"


def list_plugins(check: bool = False, described: str = "") -> list[PluginInfo]:
    """List every installed name, sorted by kind and name.

    Args:
        described: the kind whose names get a description; its plugins are imported for that.
        check: also import each plugin and the objects of its names, and run their health checks. What plugins print
            goes to stderr.
    """
    offers = sorted(installed(), key=lambda offer: (offer.kind, offer.name, offer.distribution.name))
    with contextlib.redirect_stdout(sys.stderr):
        return [_info(offer, check, offer.kind == described) for offer in offers]


def _info(offer: Offer, check: bool, describe: bool = False) -> PluginInfo:
    problem, health, fit = _problem(offer), "", True
    if check and problem is None:
        try:
            health, fit = _checked(offer)
        except EngineError as error:
            problem = str(error)
    about, text = offer.distribution, _description(offer) if describe and problem is None else ""
    return PluginInfo(
        offer.name, offer.kind, about.name, about.version, offer.module, problem, health, fit, text
    )


def _description(offer: Offer) -> str:
    """Return the first sentence about what a name stands for: of its docstring, else of its options.

    The docstring of a factory is about the factory, so its options come first. What the name loads is read and not imported, so that no torch is.
    """
    if offer.kind in ("plugins", TABLES):
        return _first_sentence(_docstring(offer.module))
    name = f"{offer.distribution.name}:{offer.name}"
    try:
        spec = PluginSet.load({offer.kind: [name]}).spec(offer.kind, name)
    except EngineError:  # --check shows it
        return ""
    text = _docstring(spec.load) if isinstance(spec.load, str) else inspect.getdoc(spec.load)
    options = "" if spec.config is NoOptions else inspect.cleandoc(spec.config.__doc__ or "")
    texts = (options, text) if getattr(spec, "factory", False) else (text, options)
    return _first_sentence(next(filter(None, texts), ""))


def _docstring(address: str) -> str:
    """Return the docstring of ``module`` or of the function or class ``module:name``, from the source file; "" without one."""
    module, _, name = address.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or not (spec.origin or "").endswith(".py"):
            return ""
        tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    except Exception:  # the package does not import, or the module does not parse: --check says so
        return ""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inside = (node for node in tree.body if isinstance(node, documented) and node.name == name)
    found = next(inside, None) if name else tree
    return (ast.get_docstring(found) or "") if found else ""


def _first_sentence(text: str) -> str:
    """Return the first sentence of a docstring in one line, without its markup."""
    sentence = re.split(r"(?<=[a-z)`])\. (?=[A-Z`])", " ".join(text.partition("\n\n")[0].split()))[0]
    sentence = re.sub(r"^\[+[\w.]+\]+[:,]? ", "", sentence.replace("``", "").rstrip("."))
    return sentence[:1].upper() + sentence[1:]


def _checked(offer: Offer) -> tuple[str, bool]:
    """Load a name; return the text of its health check and whether it passed.

    Raises:
        EngineError: the plugin or the object of the name is broken.
    """
    name = f"{offer.distribution.name}:{offer.name}"
    if offer.kind == "plugins":
        PluginSet.load({}, [name])
    elif offer.kind == TABLES:
        table_module(offer.name)
    else:
        plugins = PluginSet.load({offer.kind: [name]})
        spec = plugins.spec(offer.kind, name)
        if spec.load:  # a column that is an output of a role's `infer` has none
            plugins.resolve(offer.kind, name)
        try:
            return resolve(spec.health)() if spec.health is not None else "", True
        except EngineError as error:
            return str(error), False
    return "", True


def _problem(offer: Offer) -> str | None:
    """Return the problem of a name that metadata and the import path show, or None."""
    if offer.kind not in nouns():
        groups = [f"engine.{kind}" for kind in nouns()]
        return f"there is no group 'engine.{offer.kind}'.{did_you_mean(f'engine.{offer.kind}', groups)}"
    if problem := offer_problem(offer):
        return problem
    package = offer.module.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        return f"its module '{offer.module}' is absent; reinstall {offer.distribution.name}"
    others = [str(other.distribution) for other in find(offer.kind, offer.name) if other != offer]
    if others:
        return f"also offered by {' and by '.join(others)}; write '{offer.distribution.name}:{offer.name}' to pick this one"
    return None


def as_json(plugins: Sequence[PluginInfo]) -> str:
    """Return the list as JSON, for ``engine plugins --json``."""
    return json.dumps([dataclasses.asdict(info) | {"healthy": info.healthy} for info in plugins], indent=2)
