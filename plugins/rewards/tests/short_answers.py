"""A function of the user's, for the reward ``python``."""


def score(completions, most):
    return [float(len(text) <= most) for text in completions]
