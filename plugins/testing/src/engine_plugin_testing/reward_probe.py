"""Rewards of every form for the suite of the reward runner: a value shows every argument that the function got.

A plugin file: workers load it by its path. The column ``do`` of a sample says what happens to it, and the file that it
names gets a line for each call. No function is pure: each one empties what it gets.
"""

import asyncio
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from fractions import Fraction
from typing import Any

from engine_core import hookimpl
from engine_core.specs import Options, Reward

MARKS = ["a", "b"]
FOREVER = 600.0  # seconds
SLOW = 0.4  # seconds
ALLOCATED = 3 * 10**9  # bytes, which are not touched


class ProbeOptions(Options):
    """The options of every probe."""

    marks: list[str] = MARKS
    """Marks that each call must get, although each call removes them."""


def shown(given):
    """Return a number in [0, 1) that depends on every value in ``given``, by name."""
    text = json.dumps(given, sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 16**6


class Scalar:
    """A number as NumPy and torch have it."""

    shape = ()

    def __init__(self, value):
        self.value = value

    def item(self):
        """Return the number."""
        return self.value


RESULTS = {
    "scalar": Scalar,
    "number": lambda value: value,
    "integer": lambda value: round(value * 100),
    "truth": lambda value: value > 0.5,
    "fraction": lambda value: Fraction(round(value * 100), 7),
    "score": lambda value: {"score": value, "pred": f" Is\n{value} "},
    "answer": lambda value: {"score": value, "pred": 4, "other": None},
    "long answer": lambda value: {"score": value, "pred": "\u00e9" * 5000},
    "no answer": lambda value: {"score": value, "pred": None},
    "nothing": lambda value: None,
    "no score": lambda value: {"score": None},
    "nan": lambda value: math.nan,
    "infinite": lambda value: {"score": -math.inf},
    "huge": lambda value: 10**400,
    "text": lambda value: "0.5",
    "list": lambda value: [value],
    "empty": lambda value: {},
}


def happens(do, value):
    """Note the call, do what ``do`` says (raise, exit, hang and others), and return a result."""
    with open(do["file"], "a", encoding="utf-8") as file:
        file.write(f"{do['id']}\n")
    kind = do["kind"]
    if kind == "raise":
        raise ValueError(f"no value for {do['id']}")
    if kind == "memory":
        raise MemoryError
    if kind == "allocate":
        value += len(bytes(ALLOCATED)) * 0.0
    if kind == "exit":
        sys.exit(3)
    if kind == "crash":
        os._exit(0)
    if kind == "stuck":
        time.sleep(FOREVER)
    if kind == "slow":
        time.sleep(SLOW)
    if kind == "print":
        print('{"done": true}', flush=True)
        print(sys.stdin.read(), file=sys.stderr, flush=True)
    if kind == "child":
        child = subprocess.Popen(["/bin/sleep", str(FOREVER)], start_new_session=True)
        with open(do["children"], "a", encoding="utf-8") as file:
            file.write(f"{child.pid}\n")
    return RESULTS.get(kind, RESULTS["number"])(value)


def one(given):
    """Return the result of one sample, whose arguments these are."""
    found = happens(given["do"], shown(given))
    emptied(given)
    return found


def several(given, *more):
    """Return the results of some samples; ``given`` has a list of each argument, or the default of a column that no row has."""
    found: list[Any] = []
    listed = {name: values for name, values in given.items() if isinstance(values, list) and name != "marks"}
    same = {name: value for name, value in given.items() if name not in listed}
    for values in zip(*listed.values(), strict=True):
        row = {**same, **dict(zip(listed, values, strict=True))}
        value = shown([row, *more])
        if row["do"]["kind"] == "given error":
            found.append(ValueError("given"))
        elif row["do"]["kind"] == "given timeout":
            found.append(TimeoutError("given"))
        else:
            found.append(happens(row["do"], value))
    emptied(given)
    return found


def emptied(given):
    """Remove what lists and tables hold."""
    for value in given.values():
        if isinstance(value, list | dict):
            value.clear()


def each(completion, prompt, response_length, finish_reason, dialogue, last_turn, prompt_ids, completion_ids,
         token_ids, row, do, marks, label="no label"):  # fmt: skip
    """One sample a call, with everything that the engine offers."""
    return one(locals())


async def each_later(completion, row, do, marks, label="no label"):
    """One sample a call, asynchronous."""
    given = locals()
    if do["kind"] == "late":
        await asyncio.sleep(FOREVER)
    await asyncio.sleep(0.001 * (len(completion) % 50))
    return one(given)


def lists(completions, prompts, response_lengths, finish_reasons, dialogues, last_turns, row, do, marks,
          label="no label"):  # fmt: skip
    """Some samples a call."""
    return several(locals())


async def lists_later(completions, prompt_ids, do, marks):
    """Some samples a call, asynchronous, with a tuple as its result."""
    given = locals()
    await asyncio.sleep(0)
    return tuple(several(given))


def groups(completions, group_ids, do, marks):
    """All samples in one call; a value shows all groups."""
    return several(locals(), list(group_ids))


def verl(data_source, solution_str, ground_truth, do, marks, extra_info=None):
    """A function as verl calls it."""
    return one(locals())


def trl(prompts, completions, completion_ids, marks, **columns):
    """A function as TRL calls it."""
    given = {name: value for name, value in locals().items() if name != "columns"}
    return several({**given, **columns})


class Object:
    """A function that is an object."""

    def __call__(self, completion, do, marks, *, row=None):
        """One sample a call."""
        return one({"completion": completion, "do": do, "marks": marks, "row": row})


FORMS: dict[str, Any] = {
    "each": each,
    "each_later": each_later,
    "lists": lists,
    "lists_later": lists_later,
    "groups": groups,
    "verl": verl,
    "trl": trl,
    "object": Object(),
}


@hookimpl
def engine_rewards():
    """Offer the probes."""
    return {f"kit_{name}": Reward(load=form, config=ProbeOptions) for name, form in FORMS.items()}
