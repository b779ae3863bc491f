"""The pages of ``docs/reference/api``: for each public module a table of what it offers, and directives of autodoc."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_plugin_testing import HOMES

DOCS = Path(__file__).parent

ON_OTHER_PAGES = ("engine_core.hooks",)
ALONE = {
    "engine_core.config.roles": "CriticConfig, LoRAConfig, ProcessConfig",
    "engine_core.plugins.plugin_set": "Plugin",
}
"""Members to show of a module whose other members `engine_core.config` or `engine_core.plugins` shows."""
INHERITED = ("engine_core.data",)
"""Modules whose classes are shown with the methods of a private base class."""
ON_DEMAND = {"engine_plugin_testing": HOMES}
"""Modules whose classes are imported when they are used, and these classes."""
TRAINER = "algorithms_trainers_and_data.md#engine_coretraintrainer"
BY_CLASS = ("engine_core.types", "engine_core.contracts.engines", "engine_core.contracts.weight_transport")
"""Modules whose classes have a heading each, so that other pages can link to them."""


def public_modules() -> dict[str, list[str]]:
    """Return the public modules of ``api.md`` by the heading that they are listed under."""
    public = (DOCS / "reference" / "api.md").read_text("utf-8").split("## Internal modules")[0]
    sections = re.findall(r"^###? (.+)\n((?:(?!#).*\n)*)", public, re.MULTILINE)
    found = {title: re.findall(r"^\| `(engine_[\w.]+)`", text, re.MULTILINE) for title, text in sections}
    return {title: names for title, names in found.items() if names}


def api_file(title: str) -> str:
    return f"api/{re.sub(r'[^a-z]+', '_', title.lower())}.md"


def sections(title: str) -> list[str]:
    """Return the sections of the page with the modules below one heading of ``api.md``: Sphinx puts docstrings there."""
    return [api_part(name) for name in public_modules()[title] if name not in ON_OTHER_PAGES]


def api_part(name: str) -> str:
    """Return the section of a module; the classes of a module of ``BY_CLASS`` are subsections."""
    if name == "engine_core":
        hint = f"`hookimpl` marks the functions of a plugin that are hooks. `Trainer` is that of [engine_core.train.trainer]({TRAINER})."
        return "\n\n".join((f"## {name}", hint, directive("autofunction", "engine_core.load_config", [])))
    options = [f":members: {ALONE.get(name, '')}".rstrip()]
    options += [":inherited-members:"] * (name in INHERITED)
    classes = own_classes(name) if name in BY_CLASS else []
    options += [f":exclude-members: {', '.join(classes)}"] * bool(classes)
    parts = [f"## {name}", *summary(name, classes), directive("automodule", name, options)]
    for each in classes:
        listed = methods(getattr(importlib.import_module(name), each))
        parts += [f"### {each}", *listed, directive("autoclass", f"{name}.{each}", [":members:"])]
    for each in ON_DEMAND.get(name, ()):
        parts += [f"### {each}", directive("autoclass", f"{name}.{each}", [])]
    return "\n\n".join(parts)


def summary(name: str, with_headings: list[str]) -> list[str]:
    """Return the table of a module's classes and functions; of a single class that of its methods.

    Args:
        name: the module.
        with_headings: the classes that are not listed, because they have headings.
    """
    members = {
        each: thing
        for each, thing in vars(importlib.import_module(name)).items()
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ == name
    }
    members = {each: thing for each, thing in members.items() if each not in with_headings}
    if len(members) == 1 and inspect.isclass(only := next(iter(members.values()))):
        return methods(only)
    return purposes(name, members)


def methods(owner: type) -> list[str]:
    """Return the table of the methods that a class defines."""
    found = {each: thing for each, thing in vars(owner).items() if inspect.isfunction(thing)}
    return purposes(f"{owner.__module__}.{owner.__name__}", found)


def purposes(owner: str, members: Mapping[str, Any]) -> list[str]:
    """Return a table of the public members of a module or class with the first sentences of their docstrings; none of fewer than three."""
    lines = [
        f"| {{py:obj}}`{each} <{owner}.{each}>` | {first_sentence(thing)} |"
        for each, thing in members.items()
        if not each.startswith("_") and inspect.getdoc(thing)
    ]
    return ["\n".join(["| name | purpose |", "|---|---|", *lines])] if len(lines) > 2 else []


def first_sentence(thing: Any) -> str:
    """Return the first sentence of a docstring, as Markdown."""
    text = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    text = re.split(r"(?<=[a-z`)])[.:] (?=[A-Z`])", text)[0].rstrip(".:")
    return re.sub(r"`+([^`]+)`+_?", r"`\1`", text).replace("|", "\\|") + "."


def directive(kind: str, name: str, options: list[str]) -> str:
    """Return a directive of autodoc as a block of Markdown."""
    return "\n".join(["```{eval-rst}", f".. {kind}:: {name}", *(f"   {option}" for option in options), "```"])


def own_classes(name: str) -> list[str]:
    """Return the public classes that a module defines, in their order."""
    found = vars(importlib.import_module(name)).items()
    return [
        each
        for each, thing in found
        if inspect.isclass(thing) and thing.__module__ == name and not each.startswith("_")
    ]
