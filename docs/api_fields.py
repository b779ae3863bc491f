"""A Sphinx extension: every field of a dataclass or an option table with its type, its default and its text.

Autodoc alone shows neither inherited fields nor defaults of fields in ``__slots__``, and puts the docs of fields that
are in ``Args`` apart from their types.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import object_description
from sphinx.util.typing import stringify_annotation

from engine_core import tables
from engine_core.specs import Spec

ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.*)*)\n?", re.MULTILINE)  # an entry of ``Args``
BAR = re.compile(r"\|(?=(?:[^`]*`[^`]*`)*[^`]*$)")  # outside of back ticks: a mark of reStructuredText
ALIASES = {
    name: typing.get_args(alias)[0].__name__
    for name, alias in vars(tables).items()
    if typing.get_origin(alias) is typing.Annotated
}
"""The types behind ``PositiveInt`` and the like."""
OF_SPECS = {name for name in vars(Spec) if name in inspect.get_annotations(Spec)}
OF_PYDANTIC = {"model_config", "model_post_init"}
OVERRIDDEN = re.compile(
    r"TrainEngine\._build_model_optimizer"
    r"|TorchEngine\._(build_model_optimizer|prepare|units|distribute|place|shard|make_forward|micro_batches|grad_norm)"
)
"""Private methods that plugins override."""


def fields(thing: Any) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the default, None if required, of each field of a dataclass or a pydantic model."""
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        for name, field in thing.model_fields.items():
            default = field.get_default(call_default_factory=True, validated_data={})
            yield name, None if default is PydanticUndefined else written(default)
    elif isinstance(thing, type) and dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            if field.name.startswith("_"):
                continue
            made, required = field.default_factory, dataclasses.MISSING
            default = field.default if made is required else made()
            yield field.name, None if default is required else written(default)


def written(value: object) -> str:
    """Return a default as code has it; an ellipsis for an object."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    text = object_description(value)
    return "..." if text.startswith("<") else text


def defined(thing: type, name: str) -> tuple[str, list[str]]:
    """Return the type and the text of a field: from its comment, from ``Args`` of the class, or from ``Annotated``."""
    bases = [base for base in thing.__mro__ if name in inspect.get_annotations(base)]
    annotation = inspect.get_annotations(bases[0])[name]
    text = annotation if isinstance(annotation, str) else stringify_annotation(annotation, "smart")
    declared = ast.parse(text, mode="eval").body
    described = ""
    if isinstance(declared, ast.Subscript) and ast.unparse(declared.value) == "Annotated":
        inner, *metadata = declared.slice.elts  # type: ignore[attr-defined]
        text = ast.unparse(inner)
        described = "".join(
            each.args[0].value
            for each in metadata
            if isinstance(each, ast.Call) and ast.unparse(each.func) == "_doc"
        )
    text = re.sub(r"\w+", lambda word: ALIASES.get(word[0], word[0]), text)
    for base in bases:
        comment = ModuleAnalyzer.for_module(base.__module__).find_attr_docs().get((base.__qualname__, name))
        if comment:
            return text, comment
        if argument := dict(ARGUMENT.findall(inspect.getdoc(base) or "")).get(name):
            return text, inspect.cleandoc(argument).splitlines()
    return text, [described]


def entries(thing: type) -> list[str]:
    """Return a directive for each field; those that all specs have are listed for ``Spec`` alone."""
    lines: list[str] = []
    common = []
    for name, default in fields(thing):
        if issubclass(thing, Spec) and thing is not Spec and name not in inspect.get_annotations(thing):
            common.append(f"`{name}`")
            continue
        kind, text = defined(thing, name)
        lines += [f".. py:attribute:: {name}", f"   :type: {kind}"]
        lines += [] if default is None else [f"   :value: {default}"]
        lines += ["", *("   " + BAR.sub(r"\\|", line) for line in text), ""]
    if common:
        lines += [f"In addition, as in every :py:class:`~engine_core.specs.Spec`: {', '.join(common)}.", ""]
    return lines


def without_arguments(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Remove from ``Args`` what is shown as a field."""
    if what == "class" and (named := {field for field, _ in fields(thing)}):
        text = ARGUMENT.sub(lambda entry: "" if entry[1] in named else entry[0], "\n".join(lines) + "\n")
        lines[:] = re.sub(r"^Args:\n(?! )", "", text, flags=re.MULTILINE).splitlines()


def with_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Add the fields of a class below its docstring, unless the name is an attribute that holds the class."""
    if what == "class" and name.endswith(f".{thing.__name__}") and (found := entries(thing)):
        lines += ["", *found]


def skipped(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields, which ``with_fields`` shows, made constructors, and what each spec sets alike."""
    document = app.env.current_document
    if what not in ("class", "exception") or not document.autodoc_class:
        return None
    owner = owner_of(document.autodoc_module, document.autodoc_class)
    if OVERRIDDEN.fullmatch(f"{owner.__name__}.{name}"):
        return False
    made = name == "__init__" and getattr(getattr(thing, "__code__", None), "co_filename", "") == "<string>"
    repeated = name in OF_SPECS and issubclass(owner, Spec) and owner is not Spec
    pydantic = name in OF_PYDANTIC and issubclass(owner, BaseModel)
    return True if made or repeated or pydantic or name in dict(fields(owner)) else None


@functools.cache
def owner_of(module: str, name: str) -> Any:
    """Return the class whose members are listed."""
    return getattr(importlib.import_module(module), name)


def setup(app: Any) -> None:
    """Connect the handlers; napoleon has priority 500."""
    app.connect("autodoc-process-docstring", without_arguments, priority=400)
    app.connect("autodoc-process-docstring", with_fields, priority=600)
    app.connect("autodoc-skip-member", skipped)
