"""``engine plan``: the device memory, seconds and disk of a run before it is started."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import load_trainer, placing, read_run
from engine_core.cli.options import AllowCode, File, Json, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.errors import ConfigError
from engine_plugin_tools.commands.bench import Shape, read_shape
from engine_plugin_tools.devices import CPU, DEVICES, GIB, find_devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.train.run import TrainingRun
    from engine_plugin_tools.devices import Device
    from engine_plugin_tools.memory_plan import MemoryPlan
    from engine_plugin_tools.time_plan import StepPlan

DAY = 86400  # seconds


def plan(
    file: File,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="NAMExN",
            help=f"Devices of the run: {', '.join(DEVICES)}, cpu; h200x2.",
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.1, metavar="GIB", help="Memory of each device in GiB.")
    ] = None,
    response: Annotated[
        float | None,
        typer.Option(
            "--response", min=1, metavar="N", help="Mean tokens of a response; default: the maximum."
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="RUN",
            help="Before that, keep how a run on such devices differs from its plan.",
        ),
    ] = None,
    shape: Shape = None,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> int:
    """Print the memory of each role and phase of a device, whether it fits, and the nearest change that does; seconds; disk.

    No model is built and no device is used. Default: the devices of this machine. Exit code 2 when it does not fit.
    Raises an error if a plugin builds the model, whose memory is unknown then.

    Example: engine plan run.toml --devices h200x2
    """
    from engine_plugin_tools.dry_run import check_engines

    device = find_devices(devices, memory)
    if calibrate is not None:
        calibrate_with(calibrate, device, as_json)
    with (
        read_shape(file, shape, sets, allow_code) as config,
        closing(load_trainer(config)) as trainer,
        placing(config),
    ):
        trainer.load_inputs()
        if trainer.builds_model:
            raise ConfigError("A plugin builds the model of this run, so its memory is unknown.")
        check_engines(trainer)
        found = plan_run(trainer, device, response)
    used = sum(made.ranks for _, made, _ in found.pools)
    too_few = devices is not None and used > device.count
    if as_json:
        print_json(found.as_json())
    else:
        found.show()
        if too_few:
            print(f"too few devices: the run uses {used}, --devices names {device.count}.")
        elif devices and 0 < used < device.count:
            print(
                f"{used} of {device.count} devices used: [runtime] of the run file names the processes, and a backend such as "
                "fsdp divides the model."
            )
    fits = not too_few and all(made.fits for _, made, _ in found.pools)
    return 0 if fits else ConfigError.exit_code


@dataclass
class RunPlan:
    """The plan of a run.

    Attributes:
        pools: label, memory plan and nearest change of each group of devices; empty on a CPU.
        step: the seconds of a step; None: unknown.
        why: why they are unknown, or what they are for.
        steps: number of steps.
        disk: bytes of a checkpoint, and of those of a day; None: unknown.
        tokens: the most tokens of a step and of the run; None: unknown.
    """

    pools: list[tuple[str, MemoryPlan, str]]
    step: StepPlan | None
    why: str
    steps: int
    disk: dict[str, Any]
    tokens: dict[str, int] | None

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values: bytes and seconds."""
        pools = [{"pool": label, **made.as_json(), "change": change} for label, made, change in self.pools]
        seconds = (
            {"phases": {}, "step": None, "run": None} if self.step is None else self.step.as_json(self.steps)
        )
        return {
            "pools": pools,
            "seconds": seconds | {"for": self.why},
            "disk": self.disk,
            "tokens": self.tokens,
        }

    def show(self) -> None:
        """Print the plan."""
        from engine_plugin_tools.memory_plan import too_small

        for label, made, change in self.pools:
            print(
                f"{label}: " + ("one device" if made.ranks == 1 else f"{made.ranks} devices, numbers of each")
            )
            print_table(made.table())
            print("fits" if made.fits else too_small(made, change))
        print(f"seconds of a step: {self.why}")
        if self.step is not None:
            print_table(self.step.table(), ("phase", "floor", "planned", "assumed"))
        if self.step is not None and self.step.seconds is not None:
            whole = timedelta(seconds=round(self.steps * self.step.seconds))
            print(f"time: {whole} for {self.steps} steps, without what is unknown")
        size, daily, kept = (self.disk[key] for key in ("checkpoint_bytes", "bytes_a_day", "kept"))
        stored = "unknown" if size is None else f"{size / GIB:.2f} GiB"
        written = "" if daily is None else f"; {daily / GIB:.1f} GiB a day are written"
        print(f"disk: a checkpoint is {stored}; {kept} are kept, and one more while it is written{written}")
        if self.tokens:
            most = self.tokens
            print(f"tokens: at most {most['step']:,} a step, {most['run']:,} in {most['steps']} steps")


def plan_run(trainer: TrainingRun, device: Device, response: float | None) -> RunPlan:
    """Plan memory, seconds, disk and tokens of a run.

    Args:
        trainer: whose inputs are loaded.
        device: of the run.
        response: mean tokens of a response; None: the maximum.
    """
    from engine_plugin_tools.calibration import read_ratios
    from engine_plugin_tools.memory_plan import nearest_change
    from engine_plugin_tools.time_plan import lengths_of, plan_step, plans_of

    plans, config, limits = list(plans_of(trainer, device)), trainer.config, device.limits
    pools = [
        (
            label,
            p,
            "" if p.fits else nearest_change(config, trainer.plugins, p.roles, p.ranks, p.device_bytes),
        )
        for label, p in plans
        if limits is not CPU
    ]
    step, why = None, "unknown, because the device has no known rates: name it (--devices)"
    if limits is not None:
        lengths, why = lengths_of(trainer, response), "unknown for this model or trainer"
        made = [p for _, p in plans]
        step = plan_step(trainer, made, limits, lengths, read_ratios(limits.name)) if lengths else None
        why = f"{lengths}, {limits}" if lengths and step else why
    stored, saving = checkpoint_bytes(trainer, [p for _, p in plans]), config.checkpoint
    daily = 1440 * stored / saving.every_minutes if stored and saving.every_minutes else None
    if stored and saving.every_steps and step and step.seconds:
        daily = max(daily or 0.0, DAY / step.seconds / saving.every_steps * stored)
    disk = {
        "checkpoint_bytes": stored,
        "kept": saving.keep_last + saving.keep_best * bool(saving.best_metric),
        "bytes_a_day": daily,
    }
    return RunPlan(pools, step, why, trainer.total_steps, disk, most_tokens(trainer))


def calibrate_with(name: str, device: Device, quiet: bool) -> None:
    """Keep the ratios of measured and planned seconds of a run.

    Args:
        name: of the run, or its folder.
        device: the device of the run; the run's timeline has their number.
        quiet: print nothing.

    Raises:
        ConfigError: the run has no plan on such a device, or no steps.
        DataError: the run has no timeline.
    """
    from engine_core.runs.tracking import RunFolder
    from engine_plugin_tools.calibration import calibration_file, keep_ratios, ratios_of
    from engine_plugin_tools.timeline import ranks_of, read_spans

    folder = RunFolder.open(name)
    device = replace(device, count=ranks_of(read_spans(folder.path)))
    with closing(load_trainer(read_run(folder, None))) as trainer:
        trainer.load_inputs()
        ratios = ratios_of(trainer, device, folder.read_metrics())
    if not ratios or device.limits is None:
        raise ConfigError(
            f"--calibrate {name}: nothing can be compared, because the run has no finished step, or its seconds have no plan "
            "on this device."
        )
    keep_ratios(device.limits.name, ratios)
    if not quiet:
        said = ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in ratios.items())
        print(f"calibrated: {said} times the plan on {device.limits.name}; kept in {calibration_file()}")


def checkpoint_bytes(trainer: TrainingRun, plans: Sequence[MemoryPlan]) -> int | None:
    """Return the bytes of a checkpoint: weights and optimizer of the roles that are saved; None if a part is unknown."""
    needs = [plan.needs[name] for plan in plans for name, role in plan.roles.items() if role.saved]
    sizes = [need.saved if need else None for need in needs]
    return None if None in sizes else sum(filter(None, sizes))


def most_tokens(trainer: TrainingRun) -> dict[str, int] | None:
    """Return the tokens of a step and of the run, if every sequence has the maximum length; None if that is unknown."""
    from engine_plugin_tools.memory_plan import longest

    config = trainer.config
    length = (
        config.options.max_tokens if config.trainer == "sft" else longest(config) if trainer.samples else None
    )
    if length is None:
        return None
    rows = config.data.prompts_per_step * (config.rollout.group_size if trainer.samples else 1)
    return {"step": rows * length, "run": trainer.total_steps * rows * length, "steps": trainer.total_steps}
