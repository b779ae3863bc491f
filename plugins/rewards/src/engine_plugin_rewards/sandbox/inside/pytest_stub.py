"""The parts of pytest that tests of programs use; a test can import them as ``pytest``, because a box hides packages.

``raises``, ``approx``, ``fail``, ``param`` and ``mark.parametrize`` work as in pytest. A test of other parts is refused
(``code_cases``).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Complex
from typing import Any, NoReturn

RELATIVE, ABSOLUTE = 1e-6, 1e-12


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of this module as ``pytest``. As the last finder, it leaves precedence to a pytest on ``sys.path``."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Return how to load ``pytest``; None for another module."""
        return importlib.util.spec_from_loader(name, self) if name == "pytest" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return this module."""
        return sys.modules[__name__]

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: this module has been run."""


class Failed(BaseException):
    """An error: a test failed; no ``except Exception`` of a program catches it."""


def fail(reason: str = "", pytrace: bool = True) -> NoReturn:
    """Raise ``Failed``."""
    raise Failed(reason)


class ExceptionInfo:
    """An expected exception: a context manager that raises ``Failed`` if its block does not raise it.

    Args:
        expected: a class, or a tuple of classes.
        pattern: a regular expression that the exception's text must contain; None: any text.
    """

    type: Any = None
    value: Any = None

    def __init__(self, expected: Any, pattern: Any) -> None:
        self.expected, self.pattern = expected, pattern

    def __enter__(self) -> ExceptionInfo:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        if kind is None:
            fail(f"DID NOT RAISE {self.expected!r}")
        if not issubclass(kind, self.expected):
            return False
        self.type, self.value = kind, value
        return self.pattern is None or self.match(self.pattern)

    def match(self, pattern: Any) -> bool:
        """Return True; raise AssertionError if the exception's text does not contain ``pattern``."""
        assert re.search(pattern, str(self.value)), f"{pattern!r} is not in {str(self.value)!r}"
        return True


def raises(expected_exception: Any, *args: Any, match: Any = None, **kwargs: Any) -> ExceptionInfo:
    """Return a context manager that expects an exception; with a function in ``args``, call it and expect it there."""
    info = ExceptionInfo(expected_exception, match)
    if args:
        with info:
            args[0](*args[1:], **kwargs)
    return info


class approx:
    """A value that equals numbers, or lists or dicts of numbers, within a tolerance.

    Args:
        expected: the value; the numbers in it are compared with the tolerance, and everything else exactly.
        rel: relative tolerance. Default: 1e-6, or 0 if only ``abs`` is given.
        abs: absolute tolerance. Default: 1e-12.
        nan_ok: NaN equals NaN.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False) -> None:
        self.expected, self.nan_ok = expected, nan_ok
        self.absolute = ABSOLUTE if abs is None else float(abs)
        self.relative = float(rel) if rel is not None else RELATIVE if abs is None else 0.0

    def __eq__(self, actual: object) -> bool:
        return self._equal(actual, self.expected)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def _equal(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            same_keys = isinstance(actual, Mapping) and actual.keys() == expected.keys()
            return same_keys and all(self._equal(actual[key], value) for key, value in expected.items())
        if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
            same_length = isinstance(actual, Sequence) and len(actual) == len(expected)
            return same_length and all(map(self._equal, actual, expected))
        numbers = isinstance(expected, Complex | Decimal) and isinstance(actual, Complex | Decimal)
        return bool(actual == expected) or (numbers and self._close(_plain(actual), _plain(expected)))

    def _close(self, actual: complex, expected: complex) -> bool:
        if math.isnan(abs(expected)):
            return self.nan_ok and math.isnan(abs(actual))
        tolerance = max(self.absolute, self.relative * abs(expected))
        return not math.isinf(abs(expected)) and abs(actual - expected) <= tolerance


def _plain(number: Any) -> complex:
    """Return a number as a float, or as a complex number if it is one."""
    return complex(number) if isinstance(number, complex) else float(number)


class param:
    """A row of values for ``mark.parametrize``."""

    def __init__(self, *values: Any, marks: Any = (), id: Any = None) -> None:
        self.values = values


class mark:
    """The marks of tests."""

    @staticmethod
    def parametrize(
        argnames: str | Sequence[str], argvalues: Iterable[Any], **_: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., None]]:
        """Return a decorator: the test function then runs once for each row of values."""
        single = isinstance(argnames, str) and "," not in argnames.strip(", ")
        names = re.findall(r"\w+", argnames) if isinstance(argnames, str) else argnames
        rows = [row.values if isinstance(row, param) else (row,) if single else row for row in argvalues]

        def decorate(test: Callable[..., Any]) -> Callable[..., None]:
            """Return a function that runs ``test`` with each row."""

            def run(**others: Any) -> None:
                """Run the test; ``others`` are the values of another ``parametrize``."""
                for row in rows:
                    test(**others, **dict(zip(names, row, strict=True)))

            return run

        return decorate
