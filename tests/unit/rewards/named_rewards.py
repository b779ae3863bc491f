"""A one-file plugin with rewards that a run file could name."""

from engine_core import hookimpl
from engine_core.specs import Reward


def exact(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def letters(completion):
    return len(completion)


def fragile(completion):
    """Fails on two words; the value of others is their length."""
    if completion == "raise":
        raise ValueError("this one")
    return float("nan") if completion == "nan" else len(completion)


@hookimpl
def engine_rewards():
    return {function.__name__: Reward(load=function) for function in (exact, letters, fragile)}
