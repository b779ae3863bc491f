"""The check of ``engine doctor`` for DeepSpeed. DeepSpeed is not imported: that takes seconds and runs compilers."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil

from engine_core.errors import EnvironmentProblem


def health() -> str:
    """Return the version of DeepSpeed and the build tools that this machine lacks.

    Raises:
        EnvironmentProblem: DeepSpeed is not installed.
    """
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentProblem(
            "deepspeed is not installed. Try: pip install engine-plugin-deepspeed"
        ) from error
    lacking = [f"{tool} ({cost})" for tool, cost in COSTS.items() if not found(tool)]
    text = f"deepspeed {version}, ZeRO 0 to 3"
    return text + (f"; not here: {', '.join(lacking)}" if lacking else "; its own operators can be built")


COSTS = {
    "nvcc": "no fused operators for GPUs",
    "c++": "no operators for the CPU, and no offload to NVMe",
    "ninja": "no operators at all are built",
    "libaio": "no offload to NVMe",
}
"""What DeepSpeed builds its operators with, and what it costs to lack it. ZeRO itself needs none of them."""


def found(tool: str) -> bool:
    """Return whether a tool is installed: in PATH or where ``CXX`` or ``CUDA_HOME`` points; libaio by its header."""
    if tool == "libaio":
        return any(os.path.isfile(os.path.join(folder, "libaio.h")) for folder in _header_folders())
    names = {"c++": (os.environ.get("CXX", ""), "c++", "g++", "clang++")}.get(tool, (tool,))
    home = os.environ.get("CUDA_HOME", "")
    inside = tool == "nvcc" and bool(home) and os.access(os.path.join(home, "bin", "nvcc"), os.X_OK)
    return inside or any(name and shutil.which(name) for name in names)


def _header_folders() -> list[str]:
    """Return the header folders of a C++ compiler that are known without running it."""
    named = [word[2:] for word in shlex.split(os.environ.get("CFLAGS", "")) if word.startswith("-I")]
    listed = [
        folder for key in ("CPATH", "CPLUS_INCLUDE_PATH") for folder in os.environ.get(key, "").split(":")
    ]
    return ["/usr/include", "/usr/local/include", *named, *filter(None, listed)]
