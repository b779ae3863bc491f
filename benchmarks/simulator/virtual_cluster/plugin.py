"""The simulated backends: only a simulation knows them, since it lists this file in `plugins`."""

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import RolloutBackend, RuntimeSpec, TrainBackend

HERE = "virtual_cluster"


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """Offer the simulated cluster."""
    return {"simulated": RuntimeSpec(load=f"{HERE}.runtime:SimulatedRuntime")}


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Offer a name that is never loaded: ``SimulatedRuntime`` builds no engine."""
    return {"simulated": TrainBackend(load=f"{HERE}.workers:SimulatedTrainer")}


@hookimpl
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    """Offer a name that is never loaded, with the capabilities of a real sampler, which the controller checks."""
    able = frozenset({"partial", "pause"})
    return {"simulated": RolloutBackend(load=f"{HERE}.workers:SimulatedSampler", capabilities=able)}
