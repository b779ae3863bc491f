"""Checks of the Python that a pool's processes run on, before any process is started."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError
from engine_plugin_ray.joining import minor

if TYPE_CHECKING:
    from engine_plugin_processes.placement import Pool

SECONDS = 120.0  # with the import of Ray
PROBE = """
import importlib.util, json, platform
missing = [name for name in ("ray", "engine_plugin_ray", "torch") if importlib.util.find_spec(name) is None]
found = {"python": platform.python_version(), "missing": missing}
if not missing:
    import ray
    found["ray"] = ray.__version__
print(json.dumps(found))
"""


def check_here(pythons: Mapping[str, str]) -> None:
    """Raise for a Python on which no worker of a private cluster would start.

    Args:
        pythons: `runtime.ray.python`.

    Raises:
        ConfigError: with the pool and the reason.
    """
    for pool, python in pythons.items():
        refuse(pool, python, "this machine", look(python))


def check_there(
    pools: Sequence[Pool], pythons: Mapping[str, str], groups: Sequence[Any], seconds: float
) -> None:
    """Raise for a Python on which no worker of a joined cluster would start; each is checked on its workers' nodes.

    Args:
        pools: the run's pools.
        pythons: `runtime.ray.python`.
        groups: the placement group of each pool.
        seconds: time limit for all answers.

    Raises:
        ConfigError: with the pool, the node and the reason.
        RayError: a node does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    task, asked = ray.remote(sent_whole(look)), {}
    for pool, group in zip(pools, groups, strict=True):
        for place in range(len(pool.ranks)) if pool.name in pythons else ():
            where = task.options(
                num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, place)
            )
            asked[pool.name, place] = where.remote(pythons[pool.name], nodes=True)
    for (name, _), found in zip(asked, ray.get(list(asked.values()), timeout=seconds), strict=True):
        refuse(name, pythons[name], found["node"], found)


def sent_whole(function: FunctionType) -> FunctionType:
    """Return a copy of a function that Ray sends with its code.

    Ray sends a module's function by name, but the cluster's own Python, which runs it, may lack this plugin.

    Args:
        function: a module's function, which uses only values of this plugin.
    """
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


def look(python: str, nodes: bool = False) -> dict[str, Any]:
    """Return the versions of a Python of this machine: ``python``, ``ray``, ``missing``; ``error`` if it does not run.

    Args:
        python: the path of the Python.
        nodes: also return which ``node`` of the cluster this is.
    """
    where: dict[str, Any] = {}
    if nodes:
        import ray

        where = {"node": ray.util.get_node_ip_address()}
    try:
        done = subprocess.run(
            [python, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return where | {"error": f"{type(error).__name__}: {error}"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return where | {"error": f"it ended with {done.returncode}: {last:.200}"}
    return where | json.loads(lines[-1])


def refuse(pool: str, python: str, node: str, found: Mapping[str, Any]) -> None:
    """Raise if this run's workers cannot start on a Python that ``look`` has described.

    Raises:
        ConfigError: with the reason.
    """
    import ray

    at = f"runtime.ray.python.{pool} = '{python}' (on {node})"
    ours = f"Ray {ray.__version__} and Python {platform.python_version()}"
    if "error" in found:
        raise ConfigError(
            f"{at}: no Python runs there ({found['error']}). Expected the path of one, such as /opt/env/bin/python, that "
            "every node of the pool has. Correct it, or leave it out for the Python of the cluster."
        )
    if found["missing"]:
        raise ConfigError(
            f"{at}: it has no {', '.join(found['missing'])}. Install engine-plugin-ray and the run's other plugins into "
            "it, or leave it out for the Python of the cluster."
        )
    if found["ray"] != ray.__version__ or minor(found["python"]) != minor(platform.python_version()):
        raise ConfigError(
            f"{at}: it is of Ray {found['ray']} and Python {found['python']}, and this is {ours}. Make an environment with "
            "the versions of this one, or leave it out for the Python of the cluster."
        )
