"""What a step reaches of its devices' limits: MFU, and the share of the floor that ``engine plan`` prints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from engine_plugin_tools.devices import CPU, find_devices, installed_devices
from engine_plugin_tools.time_plan import StepPlan, measured_lengths, plan_step, plans_of

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun
    from engine_plugin_tools.devices import Device
    from engine_plugin_tools.memory_plan import MemoryPlan

log = logging.getLogger("engine")


def device_of(run: TrainingRun, accelerated: bool) -> Device | None:
    """Return the devices that a run trains on; None if they are not known, or a plugin builds the model.

    Args:
        run: a trainer whose workers exist.
        accelerated: its steps have used an accelerator.
    """
    if run.builds_model or not run.trained_roles or (accelerated and not installed_devices()):
        return None
    device = find_devices(None if accelerated else CPU.name, None)
    return replace(device, count=run.groups[run.trained_roles[0]].world_size)


class StepFloors:
    """The metrics of a run's steps; {} where they are unknown: on CPUs, and on devices without a data sheet.

    Args:
        run: a trainer, whose workers exist when a step ends.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._device: Device | None = None
        self._plans: list[MemoryPlan] | None = None  # of the first step on; empty: there are none

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return ``throughput/mfu`` and ``throughput/floor_share`` of a step.

        Args:
            metrics: metrics of the step.
        """
        if not any(name.endswith("/peak_gib") and value > 0 for name, value in metrics.items()):
            return {}
        try:
            planned = self._planned(metrics)
        except Exception:  # a step must not fail because of these metrics
            log.exception("MFU and the floor of steps are unknown")
            self._plans, planned = [], None
        if planned is None:
            return {}
        train, pairs = planned.phases["train"].floor, {}
        if train and metrics.get("time/train"):
            pairs["throughput/mfu"] = train / metrics["time/train"]
        if planned.floor:
            pairs["throughput/floor_share"] = planned.floor / metrics["time/step"]
        return pairs

    def _planned(self, metrics: Mapping[str, float]) -> StepPlan | None:
        """Plan a step of the lengths that this one had."""
        if self._plans is None:
            device = self._device = device_of(self.run, True)
            found = plans_of(self.run, device) if device is not None and device.limits is not None else ()
            self._plans = [plan for _, plan in found]
        lengths = measured_lengths(self.run.config, [metrics])
        if not self._plans or lengths is None:
            return None
        assert self._device is not None
        assert self._device.limits is not None
        return plan_step(self.run, self._plans, self._device.limits, lengths, {})
