"""Planned against measured: the comparison at the end of a run, and the ratios that later plans apply.

The ratios of a user's devices are in one JSON file: ``{"H200": {"generate.vllm": 1.04, "train.torch": 0.97}}``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat, TypeAdapter, ValidationError

from engine_core.errors import DataError, EnvironmentProblem
from engine_core.runs.folders import replace_text
from engine_plugin_tools.devices import CPU, GIB
from engine_plugin_tools.floors import device_of
from engine_plugin_tools.time_plan import StepPlan, measured_lengths, median, plan_step, plans_of

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun
    from engine_plugin_tools.devices import Device
    from engine_plugin_tools.memory_plan import MemoryPlan

log = logging.getLogger("engine")


def calibration_file() -> Path:
    """Return the file with the ratios of this user's devices."""
    root = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(root).expanduser() / "engine" / "plan.json"


def read_ratios(device: str) -> dict[str, float]:
    """Return the measured by the planned seconds on a kind of device, by ``PHASE.BACKEND``; empty if there are none.

    Raises:
        DataError: the file is damaged.
    """
    return _read(calibration_file()).get(device, {})


def _read(file: Path) -> dict[str, dict[str, float]]:
    """Return the content of the file of ratios."""
    if not file.is_file():
        return {}
    try:
        return TypeAdapter(dict[str, dict[str, PositiveFloat]]).validate_json(file.read_bytes())
    except ValidationError as error:
        raise DataError(
            f"{file} holds no ratios by device and phase: {error.errors()[0]['msg']}. Delete it and calibrate again."
        ) from error


def keep_ratios(device: str, ratios: Mapping[str, float]) -> None:
    """Add ratios of a device to the file; a ratio of the same name is replaced.

    Raises:
        EnvironmentProblem: the file cannot be written.
        DataError: the file is damaged.
    """
    file = calibration_file()
    known = _read(file)
    known[device] = known.get(device, {}) | {name: round(ratio, 4) for name, ratio in ratios.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(known, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise EnvironmentProblem(
            f"{file} cannot be written: {error}. XDG_CONFIG_HOME sets another folder."
        ) from error


def measured_seconds(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase and of the step; where sampling runs ahead, those in which it had work."""
    names = {name for line in lines for name in line if name.startswith("time/")}
    found = {name.removeprefix("time/"): median(lines, name) or 0.0 for name in names}
    return found | ({"generate": found["sampling"]} if "sampling" in found else {})


def compare(planned: StepPlan, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the measured by the planned seconds of each phase that has both, by ``PHASE.BACKEND``."""
    return {
        f"{name}.{phase.backend}": measured[name] / phase.seconds
        for name, phase in planned.phases.items()
        if phase.seconds and measured.get(name)
    }


def counted(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the steps of a run that count: not the first, which compiles, if there are others."""
    steps = [line for line in lines if line.get("step") and "time/step" in line]
    return steps[1:] or steps


def plan_check(run: TrainingRun, lines: Sequence[Mapping[str, Any]]) -> None:
    """Log planned and measured seconds and memory of a run that is over, if its backends and device have a plan.

    A CPU has no data sheet, so there a plan needs calibration.

    Args:
        run: a trainer whose workers still exist.
        lines: its metrics.
    """
    try:
        if said := _compared(run, counted(lines)):
            log.info("%s 'engine plan FILE --calibrate RUN' keeps the ratios.", said)
    except Exception:  # the run is complete, and must not fail because of its plan
        log.exception("The plan of this run could not be compared with what was measured")


def _compared(run: TrainingRun, steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparison as text; empty without a plan."""
    peaks = [value for line in steps for name, value in line.items() if name.endswith("/peak_gib") and value]
    device = device_of(run, bool(peaks))
    if device is None:
        return ""
    ratios = read_ratios(device.limits.name) if device.limits else {}
    if device.limits is CPU and not ratios:
        return ""
    plans, planned = planned_as_measured(run, device, steps, ratios)
    if planned is None or planned.seconds is None:
        return ""
    measured = measured_seconds(steps)
    pairs = {name: (phase.seconds, measured.get(name)) for name, phase in planned.phases.items()}
    pairs["step"] = planned.seconds, measured["step"]
    said = [f"{name} {a:.3g}, {b:.3g}" for name, (a, b) in pairs.items() if a is not None and b is not None]
    text = f"Planned and measured seconds of a step, medians of {len(steps)}: {'; '.join(said)}."
    if planned.floor:
        text += f" The floor of a step is {planned.floor:.3g} s, {planned.floor / measured['step']:.0%} of the measured seconds."
    if peaks:
        most = max(plan.peak for plan in plans) / GIB
        text += f" Peak memory of a device: planned {most:.1f} GiB, measured {max(peaks):.1f} GiB by torch."
    return text


def planned_as_measured(
    run: TrainingRun, device: Device, steps: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]
) -> tuple[list[MemoryPlan], StepPlan | None]:
    """Plan a run for the lengths that it had; return the memory plans of its devices, and the seconds if they are known.

    Args:
        run: a trainer whose inputs are loaded.
        device: of the run.
        steps: metrics of the steps that count.
        ratios: see ``plan_step``.
    """
    plans, lengths = [plan for _, plan in plans_of(run, device)], measured_lengths(run.config, steps)
    if lengths is None or device.limits is None:
        return plans, None
    return plans, plan_step(run, plans, device.limits, lengths, ratios)


def ratios_of(run: TrainingRun, device: Device, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the measured by the planned seconds of the phases of a run, by ``PHASE.BACKEND``; empty if none has both.

    Args:
        run: a trainer whose inputs are loaded.
        device: of the run.
        lines: metrics of the run.
    """
    steps = counted(lines)
    _, planned = planned_as_measured(run, device, steps, {})
    return {} if planned is None else compare(planned, measured_seconds(steps))
