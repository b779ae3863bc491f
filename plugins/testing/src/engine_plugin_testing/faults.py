"""Named points at which a test may make the running engine fail: ``ENGINE_FAULT=point:action``.

Unset, a point costs one look-up of a module's variable. Set, ``ENGINE_FAULT`` is a comma-separated list of
``POINT[@N]:ACTION``; the action happens at the N-th time that this process passes the point (default the first)::

    ENGINE_FAULT=checkpoint.before_manifest:kill           SIGKILL to this process
    ENGINE_FAULT=checkpoint.after_state@2:nospace          OSError "No space left on device", the second time
    ENGINE_FAULT=step.generate:term,step.train:sleep=3     SIGTERM to this process; later a sleep

Left out on purpose: any fault that production code would have to know of.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from dataclasses import dataclass

from engine_core.errors import ConfigError, did_you_mean

log = logging.getLogger("engine")

POINTS = (
    "checkpoint.begin",  # the partial folder exists
    "checkpoint.after_role",  # a role's files are written
    "checkpoint.before_state",
    "checkpoint.after_state",  # state.json is written, not synced
    "checkpoint.before_manifest",  # all other files are synced
    "checkpoint.in_manifest",  # half of the manifest is written
    "checkpoint.before_publish",  # the partial folder is whole
    "checkpoint.after_publish",  # renamed, the parent folder not synced
    "checkpoint.before_prune",  # synced
    "checkpoint.in_prune",  # an old one is half deleted
    "resume.before_rewind",  # the checkpoint is loaded; metrics still hold later steps
    "resume.in_rewind",  # metrics are cut, rollout files are not
    "step.begin",
    "step.generate",
    "step.reward",
    "step.log_probs",
    "step.train",
    "step.after_backward",  # gradients exist, weights are the old ones
    "step.after_update",  # one optimizer step is done
    "step.sync",
    "step.eval",
    "step.before_metrics",  # trained, the line of metrics.jsonl not written
    "metrics.half_written",  # half of a line of metrics.jsonl is written
    "rollouts.half_written",  # the rollouts of a step are in a file with a temporary name
    "step.after_metrics",
    "run.setup",  # before any model is built
)
"""Every point, in the order in which a run passes them."""
ACTIONS = ("kill", "term", "int", "nospace", "ioerror", "raise", "sleep")


@dataclass(slots=True)
class _Fault:
    point: str
    countdown: int
    action: str
    value: float


def parse(text: str) -> list[_Fault]:
    """Parse a value of ``ENGINE_FAULT``.

    Raises:
        ConfigError: an unknown point or action, or a malformed fault.
    """
    return [_parse_one(part.strip()) for part in text.split(",") if part.strip()]


def _parse_one(text: str) -> _Fault:
    where, colon, what = text.partition(":")
    name, _, nth = where.partition("@")
    action, _, value = what.partition("=")
    if not colon:
        raise ConfigError(f"ENGINE_FAULT: '{text}' is no fault. Expected POINT[@N]:ACTION.")
    if name not in POINTS:
        raise ConfigError(f"ENGINE_FAULT: unknown point '{name}'.{did_you_mean(name, POINTS)}")
    if action not in ACTIONS:
        raise ConfigError(f"ENGINE_FAULT: unknown action '{action}'.{did_you_mean(action, ACTIONS)}")
    try:
        return _Fault(name, int(nth or 1), action, float(value or 1))
    except ValueError:
        raise ConfigError(f"ENGINE_FAULT: '{text}': N and seconds must be numbers.") from None


class Faults:
    """The part ``faults``, called with the name of each point that is passed; it acts as ``ENGINE_FAULT`` says.

    Args:
        text: the value of ``ENGINE_FAULT``.

    Raises:
        ConfigError: the value is malformed.
    """

    def __init__(self, text: str) -> None:
        self.armed = parse(text)

    def __call__(self, name: str) -> None:
        passed = [fault for fault in self.armed if fault.point == name]
        for fault in passed:  # all are counted before one acts, since it may raise
            fault.countdown -= 1
        for fault in passed:
            if fault.countdown == 0:
                _act(fault)


def _act(fault: _Fault) -> None:
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
    if fault.action in signals:
        os.kill(os.getpid(), signals[fault.action])
    elif fault.action == "nospace":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (ENGINE_FAULT at {fault.point})")
    elif fault.action == "ioerror":
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (ENGINE_FAULT at {fault.point})")
    elif fault.action == "raise":
        raise RuntimeError(f"ENGINE_FAULT at {fault.point}")
    else:
        log.warning("ENGINE_FAULT: sleeps at %s", fault.point)  # for a test that waits for it
        time.sleep(fault.value)
