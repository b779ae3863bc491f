"""The kinds of sandbox that hold on this machine, found by starting each and attacking it.

========== ======================================================================================
tier       what closes the box, in addition to the means of the tiers above it
========== ======================================================================================
limits     limits of memory, time, output, descriptors; a filter of system calls if available
landlock   Landlock: only listed files are visible; seccomp: only listed system calls are allowed
namespaces a separate process tree, network and file system, a disk in memory for each program
========== ======================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from engine_core.errors import EnvironmentProblem
from engine_plugin_rewards.sandbox import probes
from engine_plugin_rewards.sandbox.box import Box, BoxProblem

TIERS = ("limits", "landlock", "namespaces")
"""All tiers, from the weakest to the strongest."""

HINTS = {
    "landlock": "It needs Linux 5.13 or later with Landlock among its security modules, on x86_64 or aarch64.",
    "namespaces": "User namespaces may be switched off (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns) or forbidden by the container's own filter.",
}


@functools.cache
def problem(tier: str) -> str:
    """Start a box of this tier and attack it by the probes; return why it is not in force, empty if it is."""
    promised = [probe for probe in probes.PROBES if TIERS.index(probe.tier) <= TIERS.index(tier)]
    try:
        with Box(tier) as box, probes.bait() as laid:
            for probe in promised:
                got, _ = probes.run(probe, box, laid)
                if got:
                    return f"it does not stop an attempt to {probe.name}: {got}"
    except (BoxProblem, OSError) as exc:
        return str(exc)
    return ""


def strongest() -> tuple[str, dict[str, str]]:
    """Return the strongest tier that holds, and the problems of the stronger ones; weaker tiers are not tried.

    Raises:
        EnvironmentProblem: not even ``limits`` holds.
    """
    failed: dict[str, str] = {}
    for tier in reversed(TIERS):
        if not problem(tier):
            return tier, failed
        failed[tier] = problem(tier)
    raise EnvironmentProblem(f"No program can be run in a box on this machine: {_listed(failed)}.")


def demand(least: str, key: str = "[reward.code] min_isolation") -> str:
    """Return the strongest tier that holds; it must be ``least`` or better.

    Args:
        least: the weakest tier to accept.
        key: the key that sets it, for messages.

    Raises:
        EnvironmentProblem: it is weaker; the message says what ``least`` lacks and what to do.
    """
    tier, failed = strongest()
    if TIERS.index(tier) >= TIERS.index(least):
        return tier
    raise EnvironmentProblem(
        f"{key} = '{least}', but this machine has only '{tier}': {failed[least]}. "
        f"{HINTS[least]} Or lower min_isolation, if you trust what the model writes that far."
    )


def health() -> str:
    """Return the tier in force and what the better ones lack, for ``engine doctor``.

    Raises:
        EnvironmentProblem: not even ``limits`` holds.
    """
    tier, failed = strongest()
    return f"sandbox: {tier}" + (f" ({_listed(failed)})" if failed else "")


def _listed(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{tier}: {why}" for tier, why in failed.items())
