"""Verdicts: a program's output or value compared with the expected one. All data from the program is untrusted.

A value comes as JSON in which types that JSON lacks are lists that begin with the type's name (``encode`` in
``sandbox/inside/python_tests.py``). It is compared in that form: no object of the program's classes is ever made, so
that its ``__eq__`` is never called.
"""

from __future__ import annotations

import hmac
import json
import math
from typing import TYPE_CHECKING, Any

from engine_plugin_rewards.code_cases import Assertions, Call, Case, Expression, Stdin
from engine_plugin_rewards.sandbox.inside.python_tests import encode

if TYPE_CHECKING:
    from engine_plugin_rewards.sandbox.box import Ended

PASSED = "passed"
MISSING = object()
SEQUENCES, SETS = ("list", "tuple"), ("set", "frozenset")


def verdict(case: Case, ended: Ended, tolerance: float, nonce: str = "") -> str:
    """Return ``passed``, ``wrong``, ``error``, ``timeout``, ``too much output`` or ``crashed``.

    Args:
        case: the test.
        ended: the end of the program.
        tolerance: largest difference of floating-point numbers, absolute, or relative where that is more.
        nonce: text that the test sends when it has run to its end.
    """
    if ended.late:
        return "timeout"
    if ended.flooded:
        return "too much output"
    if isinstance(case, Stdin):
        text = ended.output.decode(errors="replace")
        right = ended.code == 0 and same_text(text, case.stdout, tolerance)
    elif isinstance(case, Assertions):
        said = _message(ended.values).get("nonce")
        right = (
            ended.code == 0 and isinstance(said, str) and hmac.compare_digest(said.encode(), nonce.encode())
        )
    else:
        right = ended.code == 0 and _right_value(
            case, _message(ended.values).get("value", MISSING), tolerance
        )
    if right:
        return PASSED
    return "wrong" if ended.code == 0 else "error" if ended.code > 0 else "crashed"


def _message(line: bytes) -> dict[str, Any]:
    """Parse the message of the program's process; return an empty one if it is no JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _right_value(case: Call | Expression, value: Any, tolerance: float) -> bool:
    if value is MISSING:
        return False
    if isinstance(case, Expression) and case.truth is not None:
        return _truth(value) == case.truth
    try:
        return _as_expected(case, value, tolerance)
    except RecursionError:
        return False


def _as_expected(case: Call | Expression, value: Any, tolerance: float) -> bool:
    expected = case.expected
    if same_value(value, encode(expected), tolerance):
        return True
    wrapped = isinstance(case, Call) and case.wrapped and isinstance(expected, list) and len(expected) == 1
    return wrapped and same_value(value, encode(expected[0]), tolerance)


def _truth(value: Any) -> bool | None:
    """Return whether a value counts as true; None if it is no valid value."""
    if not isinstance(value, list):
        return bool(value)
    kind, rest = _typed(value)
    if kind in ("int", "float"):
        return _number(value) != 0
    return bool(rest) if kind else None


def same_text(printed: str, expected: str, tolerance: float) -> bool:
    """Return whether the lines have the same words, ignoring white space at both ends and between words.

    Numbers with a fraction are compared with the tolerance.
    """
    got, wanted = printed.rstrip().splitlines(), expected.rstrip().splitlines()
    if len(got) != len(wanted):
        return False
    for line, right in zip(got, wanted, strict=True):
        if line.strip() == right.strip():
            continue
        words, others = line.split(), right.split()
        if len(words) != len(others):
            return False
        if not all(_same_word(*pair, tolerance) for pair in zip(words, others, strict=True)):
            return False
    return True


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    if len(word) > 100 or expected.lstrip("+-").isdigit():
        return False
    try:
        return _close(float(word), float(expected), tolerance)
    except ValueError:
        return False


def _close(a: float, b: float, tolerance: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def same_value(got: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two values in the form of ``encode`` are the same.

    A tuple equals a list, because JSON data sets have no tuples. Keys that are numbers equal their text. True equals
    1, as in Python.
    """
    if not isinstance(got, list) or not isinstance(expected, list):
        if isinstance(got, str) or isinstance(expected, str) or got is None or expected is None:
            return type(got) is type(expected) and got == expected
        return _same_number(got, expected, tolerance)
    (kind, items), (wanted, others) = _typed(got), _typed(expected)
    if kind in SEQUENCES and wanted in SEQUENCES:
        return len(items) == len(others) and all(
            same_value(a, b, tolerance) for a, b in zip(items, others, strict=True)
        )
    if kind in SETS and wanted in SETS:
        return {_text(item) for item in items} == {_text(item) for item in others}
    if kind == wanted == "dict":
        left, right = ({_key(key): value for key, value in _pairs(of)} for of in (items, others))
        return left.keys() == right.keys() and all(
            same_value(value, right[key], tolerance) for key, value in left.items()
        )
    if kind in ("int", "float") or wanted in ("int", "float"):
        return _same_number(got, expected, tolerance)
    return bool(kind) and got == expected


def _same_number(got: Any, expected: Any, tolerance: float) -> bool:
    a, b = _number(got), _number(expected)
    if a is None or b is None:
        return False
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return _close(float(a), float(b), tolerance) or (math.isnan(a) and math.isnan(b))
    except OverflowError:
        return False


def _number(value: Any) -> int | float | None:
    if isinstance(value, int | float):
        return value
    kind, rest = _typed(value)
    try:
        if kind == "int":
            return int(rest, 16)
        return float(rest) if kind == "float" else None
    except (TypeError, ValueError):
        return None


def _typed(value: Any) -> tuple[str, Any]:
    """Return the type's name and the content; an empty name if the form is invalid."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        kind, rest = value
        if kind in (*SEQUENCES, *SETS, "dict") and not isinstance(rest, list):
            return "", None
        return kind, rest
    if isinstance(value, list) and len(value) == 3 and value[0] == "complex":
        return "complex", value[1:]
    return "", None


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(item[0], item[1]) for item in items if isinstance(item, list) and len(item) == 2]


def _key(key: Any) -> str:
    """Return a key as text, the only kind of key that JSON objects have."""
    return key if isinstance(key, str) else _text(key)


def _text(value: Any) -> str:
    return json.dumps(value)
