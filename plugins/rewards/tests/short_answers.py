"""Functions of the user's, for the reward ``python``."""

import asyncio


def score(completions, most):
    failures = {"late": TimeoutError("no answer"), "fail": ValueError("no score")}
    return [failures.get(text, float(len(text) <= most)) for text in completions]


async def score_later(completion, most):
    """Asynchronous, one sample a call."""
    await asyncio.sleep(0)
    return float(len(completion) <= most)


async def shortest(completions, group_ids):
    """Asynchronous, a whole batch a call: 1 for the shortest response of a group."""
    await asyncio.sleep(0)
    least = {}
    for text, group in zip(completions, group_ids, strict=True):
        least[group] = min(len(text), least.get(group, len(text)))
    return [float(len(text) == least[group]) for text, group in zip(completions, group_ids, strict=True)]


class Later:
    """An asynchronous object."""

    async def __call__(self, completion):
        await asyncio.sleep(0)
        return {"score": float("4" in completion), "pred": completion}


later = Later()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Of verl's form."""
    return float(solution_str == ground_truth)
