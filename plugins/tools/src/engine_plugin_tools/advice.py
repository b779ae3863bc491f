"""What would make a run quicker: from the seconds of its phases, whether sampling ahead, more samplers or more trainers.

Of a run whose steps sample, then train, with medians over steps (the first is left out):

- ``g`` seconds of sampling, ``w`` of a whole step, ``w - g`` of everything else.
- A sampler on devices of its own beside a trainer that keeps all of its: at best ``max(g, w - g)`` a step.
- The same devices shared out between the two: no work goes away, so ``w`` or more. What can be gained is the time in
  which most responses are done and the last ones still go on: a sampler that is never without requests needs at
  best ``g * mean / max`` of the responses' lengths, so ``w - g + g * mean / max`` is a lower bound.

Of one that samples ahead: ``m`` seconds in which the sampler had work and ``g`` in which the step waited for rollouts,
or an update of weights for the sampler.
The side that the other waits for is the one to strengthen, at best down to the other's time: ``w - g`` with more
samplers, ``m`` with more trainers. One after the other they would take ``w - g + m``, if neither were slowed down by
the other.

Bounds, not promises: everything is taken to scale as the devices do.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WORTH = 1.1  # times as quick: less is not worth a change


def advice(lines: Sequence[Mapping[str, Any]]) -> str:
    """What to change, with the numbers; empty where there are too few steps, or nothing is sampled and trained.

    Args:
        lines: metrics of steps, the first one included.
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
    return _ahead(medians) if "time/sampling" in medians else _in_turn(medians)


def _in_turn(medians: Mapping[str, float]) -> str:
    """Of a run that samples, then trains."""
    step, sampling = medians["time/step"], medians["time/generate"]
    rest = max(step - sampling, 0.0)
    longest = medians.get("response_length/max", 0.0)
    filled = medians.get("response_length/mean", 0.0) / longest if longest else 1.0
    apart, shared = max(sampling, rest), rest + sampling * filled
    head = f"A step takes {step:.3g} s, {sampling:.3g} of them for sampling and {rest:.3g} for the rest."
    if step < WORTH * apart:
        slow = "more samplers" if sampling > rest else "more trainers"
        return (
            f'{head} Rollouts that run ahead (trainer = "async") would gain little: {_times(step, apart)} at best, with devices '
            f"of their own for the sampler; on the same devices they would be no quicker. What would help are {slow}."
        )
    tail = (
        f"at most {_times(step, shared)} by filling the sampler while the longest responses go on"
        if step >= WORTH * shared
        else "no quicker, and slower where the two get in each other's way"
    )
    return (
        f'{head} Rollouts that run ahead (trainer = "async") with a sampler on devices of its own: {apart:.3g} s at best, '
        f"{_times(step, apart)}. On the same devices, shared out: {tail}."
    )


def _ahead(medians: Mapping[str, float]) -> str:
    """Of a run that samples ahead."""
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
