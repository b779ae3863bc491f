"""A one-file plugin with rewards that behave well, and rewards that do everything wrong."""

import asyncio
import ctypes
import mmap
import os
import re
import subprocess
import sys
import time

from engine_core import hookimpl
from engine_core.specs import Options, Reward


def exact(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def letters(completion):
    return len(completion)


def where(completion):
    """Return the worker's process id."""
    return float(os.getpid())


def imported(completion):
    """Return how many of the heavy libraries this process has imported."""
    return float(sum(name in sys.modules for name in ("torch", "transformers", "datasets", "numpy")))


KEPT = []


def misbehave(completion):
    """Do what the completion says; the value of any other completion is its length."""
    match completion.split():
        case ["sleep"]:
            time.sleep(60)
        case ["power"]:
            return float(len(str(7**7**8)))  # one C call that never releases the interpreter
        case ["regex"]:
            return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))
        case ["raise"]:
            raise ValueError("this one")
        case ["exit"]:
            sys.exit(3)
        case ["_exit"]:
            os._exit(4)
        case ["segfault"]:
            ctypes.string_at(0)
        case ["watchdog"]:  # one that crashes while it prints the stacks
            os.write(2, b"Timeout (0:00:05)!\nThread 0x0 (most recent call first):\n")
            ctypes.string_at(0)
        case ["print"]:
            print('{"done": true}\n' * 10_000)
            os.write(1, b"\x00\xff not json\n")
            print("x" * 200_000, file=sys.stderr)
        case ["input"]:
            input()
        case ["fork"]:
            os.fork()  # both continue
        case ["spawn"]:
            subprocess.Popen(["sleep", "61"])
            time.sleep(60)
        case ["session"]:
            subprocess.Popen(["sleep", "62"], start_new_session=True)
            time.sleep(60)
        case ["allocate"]:
            return float(len(bytearray(8 * 10**9)))
        case ["keep"]:
            KEPT.append(mmap.mmap(-1, 10**9))  # address space, which is limited; no page is touched
        case ["nan"]:
            return float("nan")
        case ["none"]:
            return None
    return float(len(completion))


def misbehave_in_lists(completions):
    return [misbehave(completion) for completion in completions]


async def late(completion):
    if completion == "raise":
        raise ValueError("this one")
    if completion == "hang":
        time.sleep(60)
    await asyncio.sleep(60 if completion == "sleep" else 0.2)
    return float(len(completion))


def mutate(completions, answer, tags):
    completions.clear()
    answer[:] = ["changed"] * len(answer)
    for tag in tags:
        tag["seen"] = True
    return [1.0] * len(tags)


def one_number(completions):
    return [float(len(completions))]


def best_of_group(completions, group_ids):
    best = {}
    for text, group in zip(completions, group_ids, strict=True):
        best[group] = max(best.get(group, 0), len(text))
    return [float(len(t) == best[g]) for t, g in zip(completions, group_ids, strict=True)]


class ScaleOptions(Options):
    factor: float = 2.0


def scaled(completions, factor):
    return [factor * len(completion) for completion in completions]


def make_scaled(factor, root):
    return lambda completion: factor * len(completion) if root.is_dir() else None


def make_from_a_file(factor, root):
    return (root / "absent.json").read_text()


class NoSuchArgument(Options):
    tolerance: float = 0.1


@hookimpl
def engine_rewards():
    plain = (
        exact,
        letters,
        where,
        imported,
        misbehave,
        misbehave_in_lists,
        late,
        mutate,
        one_number,
        best_of_group,
    )
    return {
        **{function.__name__: Reward(load=function) for function in plain},
        "scaled": Reward(load=scaled, config=ScaleOptions),
        "busy": Reward(load=letters, workers="cores"),
        "made": Reward(load=make_scaled, config=ScaleOptions, factory=True),
        "no_file": Reward(load=make_from_a_file, config=ScaleOptions, factory=True),
        "wrong_option": Reward(load=exact, config=NoSuchArgument),
    }
