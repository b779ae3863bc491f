"""The reward ``math``: checks that the response is the same mathematics as the answer (math-verify).

math-verify's own timeouts are off: they need signals in a main thread and do not interrupt C. The reward's process is
killed instead, so never run this reward with ``workers = 0`` on a model's responses.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from math_verify import parse, verify

DOLLAR = re.compile(r"(?<!\\)\$")  # begins or ends a formula; ``\$`` is a currency

logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warnings about the missing timeouts


def same_mathematics(
    last_turn: str, answer: object, *, precision: int, strict: bool
) -> dict[str, float | str | None] | None:
    r"""Return 1 if the response's final expression equals the answer, else 0; None for a row without answer.

    ``pred`` is the expression as text: that of the answer if the two are equal, so that all correct responses have the
    same ``pred``.

    Args:
        last_turn: the response, in an episode the policy's last turn; the last ``\boxed{}``, formula or number is taken.
        answer: LaTeX with or without dollars, a plain number, or a solution that ends in ``#### answer``.
        precision: decimals to which floating-point results are compared.
        strict: compare names of variables and kinds of brackets, too.

    Raises:
        ValueError: the answer is no mathematics.
    """
    if answer is None:
        return None
    expected = _expected(str(answer))
    if not expected:
        raise ValueError(f"the answer {str(answer)[:60]!r} is no mathematics")
    got = parse(last_turn, parsing_timeout=None)
    same = bool(got) and verify(expected, got, float_rounding=precision, strict=strict, timeout_seconds=None)
    pred = (expected if same else got)[:1]
    return {"score": float(same), "pred": str(pred[0]) if pred else None}


@functools.lru_cache(maxsize=1024)
def _expected(answer: str) -> list[Any]:
    answer = answer.rpartition("####")[2].strip()
    if not DOLLAR.search(answer) and r"\boxed" not in answer:
        answer = f"${answer}$"
    return parse(answer, parsing_timeout=None)
