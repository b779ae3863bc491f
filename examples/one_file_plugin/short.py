from engine_core import hookimpl
from engine_core.specs import Options, Reward


class ShortOptions(Options):
    words: int = 10
    """Completions of at most this many words get 1, longer ones 0."""


def short(completions, words):
    return [float(len(text.split()) <= words) for text in completions]


@hookimpl
def engine_rewards():
    return {"short": Reward(load=short, config=ShortOptions)}
