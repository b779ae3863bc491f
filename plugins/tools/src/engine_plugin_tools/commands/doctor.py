"""``engine doctor``: checks whether this machine can run the engine, and says what to do if it cannot."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from engine_core import __version__
from engine_core.cli.options import Json
from engine_core.cli.output import writing_problem
from engine_core.errors import EnvironmentProblem
from engine_core.runs import machine
from engine_core.runs.machine import GIB
from engine_plugin_tools.commands.checks import Check, show_checks
from engine_plugin_tools.plugin_list import list_plugins

MIN_MEMORY = 2 * GIB


def doctor(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where runs are written; its disk is checked.")
    ] = Path("runs"),
    as_json: Json = False,
) -> int:
    """Look at Python, memory, shared memory, open files, disk, plugins and torch.

    Each line is ok, a warning, or a problem with what to do; exit code 5 when there is a problem.

    Example: engine doctor
    """
    return show_checks(all_checks(folder), as_json, EnvironmentProblem.exit_code)


def all_checks(runs: Path) -> Iterator[Check]:
    """Yield all checks; a failed check does not stop the others.

    Args:
        runs: the folder of runs.
    """
    yield Check(
        "ok", "python", f"{platform.python_version()}, engine-core-rl {__version__}, {platform.platform()}"
    )
    yield check_memory()
    path = Path("/dev/shm")
    size = (
        f"{shutil.disk_usage(path).total / GIB:.2f} GiB" if path.is_dir() else "none, and none is needed here"
    )
    yield _judged("shared memory", size, machine.check_shared_memory())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"soft limit {soft}, hard limit {hard}; a run raises the soft one"
    yield _judged("open files", limits, machine.raise_open_file_limit())
    yield from check_runs_folder(runs)
    yield from check_plugins()
    yield check_torch()


def check_memory() -> Check:
    """Check the free memory; also names the CPU cores."""
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free, {os.cpu_count()} CPU cores"
    if memory.available >= MIN_MEMORY:
        return Check("ok", "memory", found)
    advice = f"{MIN_MEMORY / GIB:.0f} GiB or more are expected. End other programs, or use a smaller model."
    return Check("warning", "memory", f"{found}. {advice}")


def check_runs_folder(path: Path) -> Iterator[Check]:
    """Check rights and free disk of the folder of runs."""
    if problem := writing_problem(path):
        yield Check("problem", "run folder", f"{problem}. Set run.dir to a folder that you may write to.")
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = f"{shutil.disk_usage(existing).free / GIB:.1f} GiB free under {path}"
    yield _judged("disk", free, machine.check_disk(path))


def check_plugins() -> Iterator[Check]:
    """Import each installed plugin."""
    plugins = list_plugins(check=True)
    for info in plugins:
        if not info.healthy:
            where = f"{info.name} ({info.distribution} {info.version})"
            yield Check("problem", "plugins", f"{where}: {info.problem}")
        elif info.health:
            yield Check("ok" if info.fit else "warning", f"{info.kind.rstrip('s')} {info.name}", info.health)
    healthy = [info for info in plugins if info.healthy]
    distributions = ", ".join(sorted({f"{info.distribution} {info.version}" for info in healthy}))
    yield Check("ok", "plugins", f"{len(healthy)} names of {distributions}")


def check_torch() -> Check:
    """Check that torch imports; names its version and device."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch does not load
        advice = "Reinstall it: pip install --force-reinstall torch"
        return Check("problem", "torch", f"does not import: {error}. {advice}")
    where = f"no accelerator: {torch.get_num_threads()} CPU threads"
    if torch.accelerator.is_available():
        where = (
            f"{torch.accelerator.device_count()} device(s) of type {torch.accelerator.current_accelerator()}"
        )
    return Check("ok", "torch", f"{torch.__version__}, {where}")


def _judged(name: str, found: str, problem: str | None) -> Check:
    """Return ``ok``, or a warning with the sentence ``problem`` of ``engine_core.runs.machine``."""
    return Check("warning", name, f"{found}. {problem}") if problem else Check("ok", name, found)
