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
    try:
        right = ended.code == 0 and _right(case, ended, tolerance, nonce)
    except Exception:  # whatever the program sent is no message of that form
        right = False
    if right:
        return PASSED
    return "wrong" if ended.code == 0 else "error" if ended.code > 0 else "crashed"


def _right(case: Case, ended: Ended, tolerance: float, nonce: str) -> bool:
    """Return whether the output or the message of a program is right; raise for a message of another form."""
    if isinstance(case, Stdin):
        return same_text(ended.output.decode(errors="replace"), case.stdout, tolerance)
    message = json.loads(ended.values)
    if isinstance(case, Assertions):
        return hmac.compare_digest(message["nonce"].encode(), nonce.encode())
    value = message["value"]
    if isinstance(case, Expression) and case.truth is not None:
        return _truth(value) == case.truth
    accepted = [case.expected, *(case.also if isinstance(case, Call) else ())]
    return any(same_value(value, encode(expected), tolerance) for expected in accepted)


def _truth(value: Any) -> bool:
    """Return whether a value counts as true."""
    number = _number(value)
    if number is not None:
        return number != 0
    return any(value[1:]) if isinstance(value, list) else bool(value)


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
    match got, expected:
        case ["list" | "tuple", list(items)], ["list" | "tuple", list(others)]:
            return _same_items(items, others, tolerance)
        case ["set" | "frozenset", list(items)], ["set" | "frozenset", list(others)]:
            numbers, wanted = ([_number(item) for item in kept] for kept in (items, others))
            if None not in numbers and None not in wanted:
                return _same_items(sorted(numbers), sorted(wanted), tolerance)
            return {json.dumps(item) for item in items} == {json.dumps(item) for item in others}
        case ["dict", list(items)], ["dict", list(others)]:
            left, right = ({_key(key): value for key, value in kept} for kept in (items, others))
            return left.keys() == right.keys() and all(
                same_value(value, right[key], tolerance) for key, value in left.items()
            )
    a, b = _number(got), _number(expected)
    if a is None or b is None:
        return type(got) is type(expected) and bool(got == expected)
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return _close(float(a), float(b), tolerance) or (math.isnan(a) and math.isnan(b))
    except OverflowError:
        return False


def _same_items(items: list[Any], others: list[Any], tolerance: float) -> bool:
    return len(items) == len(others) and all(
        same_value(a, b, tolerance) for a, b in zip(items, others, strict=True)
    )


def _number(value: Any) -> Any:
    """Return the int or float that a value stands for; None if it is no number."""
    match value:
        case int() | float():
            return value
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["float", str(text)]:
            return float(text)
    return None


def _key(key: Any) -> str:
    """Return a key as text, the only kind of key that JSON objects have."""
    return key if isinstance(key, str) else json.dumps(key)
