"""The machine of a run: checks at the start, the content of ``env.json``, memory metrics.

Each check returns None or a sentence that names the problem and the fix. No check stops
a run: a small shared memory is fatal to one set-up and irrelevant to another.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from packaging.version import Version

from engine_core.config.inputs import files_of, stored_files
from engine_core.plugins import metadata

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.plugins.plugin_set import PluginSet

PACKAGES = (
    *("engine-core-rl", "torch", "transformers", "tokenizers"),
    *("datasets", "pyarrow", "numpy", "pydantic"),
)
ENVIRONMENT = (
    *("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "LOG_LEVEL", "NCCL_DEBUG", "OMP_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "WORLD_SIZE"),
)
"""The environment variables that ``env.json`` shows; no other is written."""

TESTED = {"torch": "2.13", "transformers": "5.17"}
"""The newest releases that were tested. Newer ones are used with a warning."""

GIB = 1024**3
MIN_SHARED_MEMORY = 1 * GIB  # NCCL and data workers each map hundreds of MiB
MIN_FREE_DISK = 5 * GIB
ENOUGH_FILES = 4096


def check_start(run_path: Path) -> list[str]:
    """Raise the limit of open files; check shared memory, the run folder's disk and libraries. Return a sentence per problem."""
    checks = raise_open_file_limit(), check_shared_memory(), check_disk(run_path)
    libraries = (check_release(name, metadata.version(name), newest) for name, newest in TESTED.items())
    return [problem for problem in (*checks, *libraries) if problem]


def check_release(library: str, version: str, newest: str) -> str | None:
    """Return a sentence if the installed ``version`` of a library is newer than the ``newest`` release that was tested.

    Args:
        library: its name for pip.
        version: such as ``2.14.1+cu130``.
        newest: such as ``2.13``; patches of it count as tested.
    """
    tested = Version(newest).release
    if Version(version).release[: len(tested)] <= tested:
        return None
    return (
        f"{library} {version} is newer than {newest}, the newest release that was tested. "
        f"If the run fails, install a tested one: pip install '{library}=={newest}.*'."
    )


def raise_open_file_limit() -> str | None:
    """Set this process's soft limit of open files to the hard limit; return a sentence if that is low, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports an infinite hard limit, but refuses to set it.
    limit = max(soft, min(hard, 10240)) if sys.platform == "darwin" else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH_FILES:
        return None
    return (
        f"Open files: the limit is {limit} even after raising it to the hard limit; {ENOUGH_FILES} or more are expected. "
        "Raise the hard limit ('nofile' in /etc/security/limits.conf, or --ulimit nofile=65536 of a container)."
    )


def check_shared_memory(path: Path = Path("/dev/shm"), need: int = MIN_SHARED_MEMORY) -> str | None:
    """Return a sentence if ``/dev/shm`` is smaller than ``need`` bytes; macOS does not have or need it."""
    if not path.is_dir():
        return None
    size = shutil.disk_usage(path).total
    if size >= need:
        return None
    return (
        f"Shared memory: {path} has {size / GIB:.2f} GiB; {need / GIB:.0f} GiB or more are expected by data workers and "
        "multi-GPU communication. Enlarge it (docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm)."
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use, limited by its CPU affinity and its control group."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, round(int(quota) / int(period))))


def check_disk(path: Path, need: int = MIN_FREE_DISK) -> str | None:
    """Return a sentence if less than ``need`` bytes are free on the disk of ``path``."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free >= need:
        return None
    return (
        f"Disk: {free / GIB:.1f} GiB are free under the run folder {path}; {need / GIB:.0f} GiB or more are expected. "
        "Free some ('engine prune' deletes old checkpoints), lower checkpoint.keep_last, or set run.dir to another disk."
    )


def describe_environment(config: EngineConfig, plugins: PluginSet | None = None) -> dict[str, Any]:
    """Return the content of ``env.json``: what the run depends on in addition to its config."""
    named = [file for part in config.data.parts for file in files_of(part.path)]
    named += files_of(config.data.validation)
    used = [part.source for part in config.data.parts] + [held_out.source for held_out in config.eval.set]
    sources = {name: plugins.find("data_sources", name) for name in used if name} if plugins else {}
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "plugins": dict(plugins.versions()) if plugins else {},
        "git": _git_state(),
        "seeds": {"run": config.run.seed, "model": config.model.seed},
        "data": {str(file): _fingerprint(file) for name in named for file in stored_files(Path(name))},
        "data_sources": [
            {"name": name, **{key: getattr(source, key, "") for key in ("license", "revision", "url")}}
            for name, source in sources.items()
        ],
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Return the commit of the working directory's project and the number of changed files; None without git."""

    def git(*arguments: str) -> str:
        """Return the output of a git command."""
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=5, check=True
        ).stdout

    try:
        sha, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit, too slow a disk
        return None
    return {"sha": sha.strip(), "changed_files": len(changed.splitlines())}


def _fingerprint(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"sha256": None}
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def memory_metrics() -> dict[str, float]:
    """Return the memory of this process and of its accelerator now, in GiB.

    Returns:
        ``memory/rss_gib``; with an accelerator also ``memory/allocated_gib``, ``memory/reserved_gib``
        and ``memory/peak_gib`` (allocated, since the process began). This function does not import torch.
    """
    metrics = {"memory/rss_gib": psutil.Process().memory_info().rss / GIB}
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        # The allocator of some accelerators (MPS) keeps no statistics.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            metrics["memory/allocated_gib"] = torch.accelerator.memory_allocated() / GIB
            metrics["memory/reserved_gib"] = torch.accelerator.memory_reserved() / GIB
            metrics["memory/peak_gib"] = torch.accelerator.max_memory_allocated() / GIB
    return metrics
