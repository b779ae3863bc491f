"""The plugin's hooks: the runtime ``torchrun``, weight transports, samplers in other processes."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Part, RuntimeSpec, TransportSpec
from engine_plugin_processes.options import TorchrunOptions
from engine_plugin_processes.transports.table import TRANSPORTS


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """Return the runtime ``torchrun``."""
    return {
        "torchrun": RuntimeSpec(
            load="engine_plugin_processes.torchrun:TorchrunRuntime",
            config=TorchrunOptions,
            check="engine_plugin_processes.placement:problems",
        )
    }


@hookimpl
def engine_weight_transports() -> Mapping[str, TransportSpec]:
    """Return the weight transports."""
    return TRANSPORTS


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Return the parts ``launcher``, ``row_workers`` and ``sampler_process``."""
    return {
        "launcher": Part(load="engine_plugin_processes.elastic_launch:ElasticLauncher"),
        "row_workers": Part(load="engine_plugin_processes.row_workers:WorkerPool"),
        "sampler_process": Part(load="engine_plugin_processes.sampler_process:SamplerProcesses"),
    }
