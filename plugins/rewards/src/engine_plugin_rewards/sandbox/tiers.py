"""Which kinds of box this machine can close, found by closing each and attacking it.

========== ======================================================================================
tier       what closes the box; each has what the ones before it have
========== ======================================================================================
limits     limits of memory, time, output, descriptors; a filter of system calls where there is one
landlock   Landlock: no files but those that are shown; seccomp: system calls by a list
namespaces a process tree, a network and a file system of its own, a disk in memory for each program
bubblewrap the same, built by the program ``bwrap``
========== ======================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.errors import EnvironmentProblem
from engine_plugin_rewards.sandbox import probes
from engine_plugin_rewards.sandbox.box import Box, BoxProblem, Limits

TIERS = ("limits", "landlock", "namespaces", "bubblewrap")
"""From the weakest to the strongest."""

HINTS = {
    "landlock": "It needs Linux 5.13 or later with Landlock among its security modules, on x86_64 or aarch64.",
    "namespaces": "User namespaces may be switched off (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns) or forbidden by the container's own filter.",
    "bubblewrap": "Install the package bubblewrap; it needs user namespaces too.",
}


@dataclass(frozen=True)
class TierStatus:
    """What was found of one tier."""

    tier: str
    problem: str = ""  # why it is not in force; empty: it is

    @property
    def holds(self) -> bool:
        return not self.problem


@functools.cache
def look(tier: str) -> TierStatus:
    """Close a box of this tier and attack it by the essential probes; once in a process."""
    promised = [probe for probe in probes.ESSENTIAL if TIERS.index(probe.tier) <= TIERS.index(tier)]
    try:
        with Box(tier, Limits()) as box, probes.bait() as laid:
            for probe in promised:
                got, _ = probes.run(probe, box, laid)
                if got:
                    return TierStatus(tier, f"it does not stop an attempt to {probe.name}: {got}")
    except (BoxProblem, OSError) as exc:
        return TierStatus(tier, str(exc))
    return TierStatus(tier)


def strongest() -> tuple[str, list[TierStatus]]:
    """The strongest tier that holds, and the stronger ones that do not; those below it are not tried.

    Raises:
        EnvironmentProblem: not even limits hold.
    """
    failed = []
    for tier in reversed(TIERS):
        standing = look(tier)
        if standing.holds:
            return tier, failed
        failed.append(standing)
    raise EnvironmentProblem(f"No program can be run in a box on this machine: {_told(failed)}.")


def demand(least: str) -> str:
    """The strongest tier that holds, which is ``least`` or better.

    Raises:
        EnvironmentProblem: it is not; says what each better tier lacks and what to do.
    """
    tier, failed = strongest()
    if TIERS.index(tier) >= TIERS.index(least):
        return tier
    wanted = next(standing for standing in failed if standing.tier == least)
    raise EnvironmentProblem(
        f"[reward.code] min_isolation = '{least}', but this machine has only '{tier}': {wanted.problem}. "
        f"{HINTS[least]} Or lower min_isolation, if you trust what the model writes that far."
    )


def health() -> str:
    """For ``engine doctor``: the tier in force, and what the better ones lack."""
    tier, failed = strongest()
    return f"sandbox: {tier}" + (f" ({_told(failed)})" if failed else "")


def _told(failed: Sequence[TierStatus]) -> str:
    return "; ".join(f"{standing.tier}: {standing.problem}" for standing in failed)
