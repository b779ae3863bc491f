"""The rewards ``numeric`` and ``gsm8k``: the last number of a text, and the one after ``####``."""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext

# A sign counts if it cannot be a minus between two operands ("10-12" contains 10 and 12) and no space follows it
# ("- 5" may be an item of a list).
_NUMBER = re.compile(
    r"""(?:(?<![\w)}\]])[-+\u2212]\$?)?
        (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)   # 1,234.5  1234.5  .5
        (?:[eE][-+]?\d{1,3}(?!\d))?
        (?:\s*/\s*\d+(?:\.\d+)?)?                              # a ratio
    """,
    re.VERBOSE,
)
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3}(?!\d))")
"""A thousands separator in LaTeX: ``1{,}234``, ``1\\,234`` or ``1,\\!234``."""
_FINAL = re.compile(r"#### (-?[0-9.,]+)")
_FRACTION = re.compile(r"(?<=\w)(?=\\[dt]?frac)|\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


_WIDE = Context(Emax=MAX_EMAX, Emin=MIN_EMIN)  # a million digits are a wrong answer, and no overflow


def numeric(
    last_turn: str, answer: object, *, tolerance: float, relative_tolerance: float, boxed: str
) -> dict[str, float | str | None] | None:
    r"""Return 1 if both texts end in the same number, else 0; None for a row without answer. ``pred`` is the number.

    Numbers may have thousands separators (``1,234.5``, ``1{,}234.5``), an exponent, or be a ratio (``3/4``,
    ``\frac{3}{4}``).

    Args:
        last_turn: the response; in an episode the policy's last turn.
        answer: a number, or a text whose last number is the answer (``... #### 72``).
        tolerance: largest absolute difference.
        relative_tolerance: largest difference as a share of the answer.
        boxed: ``prefer`` the last ``\\boxed{...}`` of the response, look there ``only``, or ``ignore`` it.

    Raises:
        ValueError: the answer contains no number.
    """
    if answer is None:
        return None
    with localcontext(_WIDE):
        expected = last_number(str(answer))
        if expected is None:
            raise ValueError(f"the answer {str(answer)[:60]!r} holds no number")
        inside = last_boxed(last_turn) if boxed != "ignore" else None
        got = last_number(inside) if inside is not None else None
        if got is None and boxed != "only":
            got = last_number(last_turn)
        if got is None:
            return {"score": 0.0, "pred": None}
        allowed = max(Decimal(tolerance), Decimal(relative_tolerance) * abs(expected))
        right = abs(got - expected) <= allowed
        # 72, 72.0 and numbers within the tolerance of the answer have the same pred
        return {"score": float(right), "pred": f"{(expected if right else got).normalize():g}"}


def gsm8k(last_turn: str, answer: object) -> dict[str, float | str | None] | None:
    """Return 1 if the number after the last ``####`` is the answer, else 0; None for a row without answer.

    This is the format of the data set GSM8K, read as published scores read it: numbers are compared as text, without
    thousands separators and a final period. A response without ``####`` scores 0, even if it ends in the answer.
    ``pred`` is the number.

    Args:
        last_turn: the response; in an episode the policy's last turn.
        answer: a number, or a solution that ends in ``#### 72``.
    """
    if answer is None:
        return None
    found = _FINAL.findall(last_turn)
    pred = _bare(found[-1]) if found else None
    return {"score": float(pred == _bare(str(answer).rpartition("####")[2].strip())), "pred": pred}


def _bare(number: str) -> str:
    return number.replace(",", "").removesuffix(".")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None without one. A ratio with denominator 0 is no number."""
    text = _SEPARATOR.sub(",", _FRACTION.sub(_ratio, text))
    for found in reversed(_NUMBER.findall(text)):
        plain = re.sub(r"[\s,$+]", "", found).replace("\u2212", "-")
        upper, _, lower = plain.partition("/")
        if not lower:
            return Decimal(upper)
        if Decimal(lower):
            return Decimal(upper) / Decimal(lower)
    return None


def _ratio(found: re.Match[str]) -> str:
    return f"{found[1]}/{found[2]}" if found[0] else " "


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, with balanced braces; None without one."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None
