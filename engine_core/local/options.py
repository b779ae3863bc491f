"""Options of the local runtime."""

from __future__ import annotations

from engine_core.specs import Options


class LocalOptions(Options):
    """``[runtime.local]``: every worker in the controller's process."""

    renamed = {"trade_memory": "offload_idle_roles"}

    offload_idle_roles: bool = False
    """Between phases the trainer gives its gradients and optimizer to host memory while the sampler works, and the sampler its cache while the trainer works."""
