"""The environment ``calculator``: the policy may ask ``<calc>47*83</calc>`` and is told ``3901``.

It is right when its last message is the answer and nothing else; a tool's answer alone earns nothing. What a
model writes is never run as code: a parser of its own reads

    sum     := product (("+" | "-") product)*
    product := factor (("*" | "/") factor)*
    factor  := "-" factor | "(" sum ")" | digits
"""

from __future__ import annotations

import re
from fractions import Fraction

from engine_core import hookimpl
from engine_core.specs import Environment
from engine_plugin_agents import find_tag

LONGEST = 60  # characters of a task: deep nesting and huge numbers are no arithmetic of ours


def calculate(task: str) -> str:
    """The value of ``12 * (3 + 4)``, exact: ``84``, or ``7/2``.

    Raises:
        ValueError: it is no such task, or divides by zero.
    """
    if len(task) > LONGEST:
        raise ValueError(f"at most {LONGEST} characters")
    tokens = re.findall(r"\d+|\S", task)
    value = _sum(tokens)
    if tokens:
        raise ValueError(f"'{tokens[0]}' is too much")
    return str(value)


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens.pop(0) == "+" else -1
        value += sign * _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _factor(tokens)
    while tokens and tokens[0] in "*/":
        if tokens.pop(0) == "*":
            value *= _factor(tokens)
        elif divisor := _factor(tokens):
            value /= divisor
        else:
            raise ValueError("division by zero")
    return value


def _factor(tokens: list[str]) -> Fraction:
    token = tokens.pop(0) if tokens else "the end"
    if token == "-":
        return -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("')' is missing")
        return value
    if not token.isascii() or not token.isdigit():
        raise ValueError(f"expected a number, got '{token}'")
    return Fraction(int(token))


async def calculator(episode):
    calls = 0
    turn = await episode.sample()
    while (task := find_tag(turn.text, "calc")) is not None and episode.goes_on:
        calls += 1
        episode.append_messages({"role": "tool", "content": await episode.call(calculate, task)})
        turn = await episode.sample()
    correct = turn.text.strip() == episode.prompt.columns["answer"]
    return episode.rollout({"correct": float(correct), "called": float(calls > 0)})


@hookimpl
def engine_environments():
    return {
        "calculator": Environment(
            load=calculator, rewards=frozenset({"correct", "called"}), needs=frozenset({"answer"})
        )
    }
