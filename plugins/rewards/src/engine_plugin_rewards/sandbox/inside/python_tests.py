"""The code that runs in the fork: a program, and the calls that a test makes.

The program shares this process and can change everything in it, so nothing is judged here. A value is sent as data
through descriptor 3 and compared by the engine, which alone knows the expected value.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import math
import os
import sys
import types
from collections.abc import Callable

VALUES = 3  # descriptor
DEEPEST = 100  # lists in lists


class Source(importlib.abc.InspectLoader):
    """A loader of a module from text; the path is shown in tracebacks."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path

    def get_source(self, name: str) -> str:
        """Return the text."""
        return self.text

    def get_code(self, name: str) -> types.CodeType:
        """Return the compiled text."""
        return self.source_to_code(self.text, self.path)


def load(text: str, name: str, path: str) -> types.ModuleType:
    """Run a text as a new module."""
    loader = Source(text, path)
    spec = importlib.util.spec_from_loader(name, loader, origin=path)
    assert spec is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def tell(message: dict) -> None:
    """Send a line to the engine."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(VALUES, data) :]


def run(what: dict) -> None:
    """Run a test: ``kind`` is ``stdin``, ``call``, ``expression`` or ``assert``."""
    sys.argv = ["solution.py"]
    fresh_streams()
    kind = what["kind"]
    if kind == "stdin":
        load(what["source"], "__main__", "solution.py")
        return
    module = load(what["source"], "solution", "solution.py")
    if kind == "call":
        tell({"value": encode(_function(module, what["function"])(*what["arguments"]))})
    elif kind == "expression":
        test = f"{what['setup']}\n__value__ = ({what['expression']}\n)"
        Source(test, "test.py").exec_module(module)
        tell({"value": encode(module.__value__)})
    else:
        nonce = what["nonce"]
        Source(what["test"], "test.py").exec_module(module)
        _run_test_functions(module, what)
        tell({"nonce": nonce})


def fresh_streams() -> None:
    """Open text streams over the descriptors; the parent's streams belong to other files."""
    kept: dict = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin = os.fdopen(0, "r", **kept)
    sys.stdout = os.fdopen(1, "w", **kept)
    sys.stderr = os.fdopen(2, "w", buffering=1, **kept)


def _function(module: types.ModuleType, name: str) -> Callable[..., object]:
    """Return ``f``, ``Class.f`` of a new object, or ``f`` of a class ``Solution``."""
    owner: object = module
    *classes, name = name.split(".")
    if not classes and not hasattr(module, name) and hasattr(module, "Solution"):
        classes = ["Solution"]
    for inner in classes:
        owner = getattr(owner, inner)()
    return getattr(owner, name)


def _run_test_functions(module: types.ModuleType, what: dict) -> None:
    """Call ``check(candidate)`` as HumanEval does, and every ``test_...`` function of the test."""
    if what["entry_point"]:
        module.check(_function(module, what["entry_point"]))
    for name in what["functions"]:
        getattr(module, name)()


def encode(value: object, depth: int = 0) -> object:
    """Convert a value for JSON: a type that JSON lacks becomes a list that begins with the type's name.

    Raises:
        TypeError: the value is not data, or is nested too deeply.
    """
    if depth > DEEPEST:
        raise TypeError(f"nested more than {DEEPEST} deep")
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 2**63 else ["int", hex(number)]
    if isinstance(value, float):
        real = float(value)
        return real if math.isfinite(real) else ["float", repr(real)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item, depth + 1) for item in value]]
    if hasattr(value, "tolist"):  # NumPy
        return encode(value.tolist(), depth + 1)
    raise TypeError(f"a test can compare data, not {type(value).__name__}")
