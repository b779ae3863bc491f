"""``engine plan``: the device memory of a run before it is started."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import placing, read, trainer_of
from engine_core.cli.options import AllowCode, File, Json, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine_core.config import EngineConfig
    from engine_core.contracts.runtime import Role
    from engine_core.train.run import TrainingRun
    from engine_plugin_tools.memory_plan import MemoryPlan

GIB = 2**30
DEVICES = {
    "a100-40": 39.4, "a100": 79.2, "h100": 79.2, "h200": 139.8, "b200": 178.4, "l40s": 44.4, "rtx4090": 23.5,
}  # fmt: skip
"""GiB that the driver reports, by device."""


def plan(
    file: File,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="NAMExN", help=f"Devices of the run: {', '.join(DEVICES)}; h200x2."
        ),
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.1, metavar="GIB", help="Memory of each device in GiB.")
    ] = None,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> int:
    """Print the memory of each role and phase of a device, whether it fits, and the nearest change that does; disk; tokens.

    No model is built and no device is used. Default: the devices of this machine. Exit code 2 when it does not fit.
    Raises an error if a plugin builds the model, whose memory is unknown then.

    Example: engine plan run.toml --devices h200x2
    """
    from engine_plugin_tools.dry_run import check_engines
    from engine_plugin_tools.memory_plan import nearest_change, plan_device, too_small

    config = read([file], sets=sets, allow_code=allow_code)
    device_bytes, count = find_devices(devices, memory)
    found, fits, plans = [], True, []
    with closing(trainer_of(config)) as trainer, placing(config):
        trainer.load_inputs()
        if trainer.builds_model:
            raise ConfigError("A plugin builds the model of this run, so its memory is unknown.")
        check_engines(trainer)
        roles = trainer.roles(training=True)
        if config.ref_is_base:
            roles.pop("ref", None)
        for label, ranks, inside in pools(config, roles, count, trainer.plugins):
            made = plan_device(config, trainer.plugins, inside, ranks, device_bytes)
            fits, plans = fits and made.fits, [*plans, made]
            change = "" if made.fits else nearest_change(config, trainer.plugins, inside, ranks, device_bytes)
            found.append({"pool": label, **made.as_json(), "change": change})
            if not as_json:
                print(f"{label}: " + ("one device" if ranks == 1 else f"{ranks} devices, numbers of each"))
                print_table(made.table())
                print("fits" if made.fits else too_small(made, change))
        stored, tokens = checkpoint_bytes(trainer, plans), most_tokens(trainer)
    disk = {"checkpoint_bytes": stored, "kept": config.checkpoint.keep_last}
    if as_json:
        print_json({"pools": found, "disk": disk, "tokens": tokens})
    else:
        size = "unknown" if stored is None else f"{stored / GIB:.2f} GiB"
        print(f"disk: a checkpoint is {size}; {disk['kept']} are kept, and one more while it is written")
        if tokens:
            print(f"tokens: at most {tokens['step']:,} a step, {tokens['run']:,} in {tokens['steps']} steps")
    return 0 if fits else ConfigError.exit_code


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


def find_devices(devices: str | None, memory: float | None) -> tuple[int, int]:
    """Return the bytes of one device and the number of devices.

    Raises:
        ConfigError: a name is unknown, or this machine has no device and none is named.
    """
    name, count = (devices or "").lower(), 1
    first, _, last = name.rpartition("x")
    if name not in DEVICES and last.isdigit():
        name, count = first, max(1, int(last))
    if name and name not in DEVICES:
        raise ConfigError(
            f"--devices '{devices}' is not known.{did_you_mean(name, DEVICES)} N devices: h200xN; any other "
            "device: --memory GIB."
        )
    if memory is not None:
        return int(memory * GIB), count
    if name:
        return int(DEVICES[name] * GIB), count
    if not (sizes := installed_bytes()):
        raise ConfigError(
            "This machine reports no GPU. Name the devices (--devices h200x2) or their --memory GIB."
        )
    return min(sizes), count if devices else len(sizes)


def installed_bytes() -> list[int]:
    """Return the bytes of each GPU of this machine; asked of the driver's tool, which starts no CUDA context."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    words = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return [int(line) * 2**20 for line in done.stdout.split() if line.isdigit()]


def pools(
    config: EngineConfig, roles: Mapping[str, Role], count: int, plugins: Any
) -> Iterator[tuple[str, int, dict[str, Role]]]:
    """Yield (label, ranks, roles) of each group of devices that are used in the same way."""
    if plugins.spec("runtimes", config.runtime.backend).in_process:
        yield "this process", 1, dict(roles)
        return
    if config.placement.pools:
        for pool, size in config.placement.pools.items():
            inside = {name: role for name, role in roles.items() if config.placement.pool_of(name) == pool}
            if inside:
                yield f"pool {pool}", size, inside
        return
    processes = getattr(config.runtime.options, "processes", "auto")
    yield "all processes", count if processes == "auto" else processes, dict(roles)
