"""Advice on a run's speed, from the seconds of its phases: sampling ahead, more samplers or more trainers.

For a run whose steps sample, then train, with medians over steps (without the first):

- ``g`` seconds of sampling, ``w`` of a whole step, ``w - g`` of everything else.
- A sampler on further, dedicated devices, while the trainer keeps all its devices: at best ``max(g, w - g)`` a step.
- The same devices divided between the two: the work stays the same, so at least ``w``. The possible gain is the time
  in which most responses are done and the last ones still run: a sampler that always has requests needs at best
  ``g * mean / max`` of the responses' lengths, so ``w - g + g * mean / max`` is a lower bound.

For a run that samples ahead: ``m`` seconds in which the sampler had work, and ``g`` in which the step waited for
rollouts, or for an update of the sampler's weights. More devices help the side that the other waits for, at best down
to the other's time: ``w - g`` with more samplers, ``m`` with more trainers. In turn the two would take ``w - g + m``,
if neither slowed the other down.

These are bounds, not promises: everything is assumed to scale with the devices. The seconds of episodes that call tools
are those of tools too, which do not: of these nothing is computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WORTH = 1.1  # speed-up below which a change is not worth it


def advice(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return what to change, with numbers; empty for too few steps, or if the run does not both sample and train.

    Args:
        lines: metrics of steps, including the first.
    """
    usable = [line for line in lines if line.get("step", 1) and line.get("time/train")][1:]
    if len(usable) < 2 or not all("time/generate" in line for line in usable):
        return ""
    names = {name for line in usable for name in line}
    medians = {
        name: statistics.median(line.get(name) or 0.0 for line in usable)
        for name in names
        if name.startswith(("time/", "response_length/"))
    }
    if (reward := medians.get("time/reward", 0.0)) > medians["time/step"] / 2:
        return (
            f"A step takes {medians['time/step']:.3g} s, {reward:.3g} of them for rewards. What would help is a quicker reward: of a "
            "function with more processes (workers in [[reward]]), of a model with a smaller one or fewer tokens."
        )
    if any(line.get("environment/tool_calls") for line in usable):
        return "" if "time/sampling" in medians else _with_tools(medians)
    return _ahead(medians) if "time/sampling" in medians else _in_turn(medians)


def _with_tools(medians: Mapping[str, float]) -> str:
    """Return the advice for a run in turn whose episodes call tools."""
    step, episodes = medians["time/step"], medians["time/generate"]
    return (
        f"A step takes {step:.3g} s, {episodes:.3g} of them for episodes, their tools included. Where tools are slow, episodes "
        'that run ahead (trainer = "async") take up to async.max_staleness + 1 times less.'
    )


def _in_turn(medians: Mapping[str, float]) -> str:
    """Return the advice for a run that samples, then trains."""
    step, sampling = medians["time/step"], medians["time/generate"]
    rest = max(step - sampling, 0.0)
    longest = medians.get("response_length/max", 0.0)
    filled = medians.get("response_length/mean", 0.0) / longest if longest else 1.0
    apart, shared = max(sampling, rest), rest + sampling * filled
    head = f"A step takes {step:.3g} s, {sampling:.3g} of them for sampling and {rest:.3g} for the rest."
    if step < WORTH * apart:
        slow = "more samplers" if sampling > rest else "more trainers"
        return (
            f'{head} Rollouts that run ahead (trainer = "async") would gain little: {_times(step, apart)} at best, with '
            f"separate devices for the sampler; on the same devices they would be no quicker. What would help are {slow}."
        )
    tail = (
        f"at most {_times(step, shared)} by filling the sampler while the longest responses finish"
        if step >= WORTH * shared
        else "no quicker, and slower where the two get in each other's way"
    )
    return (
        f'{head} Rollouts that run ahead (trainer = "async") with a sampler on separate devices: {apart:.3g} s at best, '
        f"{_times(step, apart)}. On the same devices, shared out: {tail}."
    )


def _ahead(medians: Mapping[str, float]) -> str:
    """Return the advice for a run that samples ahead."""
    step, stood, busy = medians["time/step"], medians.get("time/sync_wait", 0.0), medians["time/sampling"]
    waited = medians["time/generate"] + stood
    rest = max(step - waited, 0.0)
    why = (
        ""
        if step < WORTH * (step - stood)
        else f" ({stood:.3g} of them before an update of weights, see async.weight_updates)"
    )
    head = (
        f"A step takes {step:.3g} s: the trainer works for {rest:.3g} and waits {waited:.3g} for rollouts{why}, the sampler has work "
        f"for {busy:.3g}. One after the other would take {rest + busy:.3g} s or less: running ahead is at best "
        f"{_times(rest + busy, step)}"
    )
    if rest + busy < WORTH * step:
        head += ', so trainer = "rl" would do as well'
    if step >= WORTH * rest and rest > 0:
        return f"{head}. The sampler is the slower side: more samplers, at best {_times(step, rest)} with {busy / rest:.2g} times as many."
    if step >= WORTH * busy > 0:
        return f"{head}. The trainer is the slower side: more trainers, at best {_times(step, busy)}."
    return f"{head}. The two sides are even: more of one alone would not help."


def _times(before: float, after: float) -> str:
    return f"{before / after:.2f}x" if after > 0 else "1.00x"
