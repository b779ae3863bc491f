"""How far apart two series of times are, and how well that is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def ratio(rounds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, object]:
    """Geometric mean over rounds of (median of the second / median of the first), with a 95% interval.

    The interval is that of Student's t over the logarithms of the rounds' ratios: rounds are independent, steps of
    one round share the state of the machine.

    Args:
        rounds: seconds of the steps of both, by round.

    Returns:
        ``ratio``, ``low`` and ``high`` (None with fewer than two rounds), ``rounds`` (each ratio).
    """
    each = [statistics.median(second) / statistics.median(first) for first, second in rounds]
    logs = [math.log(value) for value in each]
    middle, low, high = statistics.fmean(logs), None, None
    if len(logs) > 1:
        free = len(logs) - 1
        factor = T95[free - 1] if free <= len(T95) else 1.96 + 2.4 / free
        half = factor * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(middle - half), math.exp(middle + half)
    return {"ratio": math.exp(middle), "low": low, "high": high, "rounds": each}
