"""The names of simulated backends: known to a simulation alone, which lists this file in `plugins`."""

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import RolloutBackend, RuntimeSpec, TrainBackend

HERE = "engine_plugin_tools.bench.simulator"


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """The simulated cluster."""
    return {"simulated": RuntimeSpec(load=f"{HERE}.runtime:SimulatedRuntime")}


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Never loaded: ``SimulatedRuntime`` builds no engine."""
    return {"simulated": TrainBackend(load=f"{HERE}.workers:SimulatedTrainer")}


@hookimpl
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    """As above; what a real sampler can do matters to the controller."""
    able = frozenset({"partial", "pause"})
    return {"simulated": RolloutBackend(load=f"{HERE}.workers:SimulatedSampler", capabilities=able)}
