"""Weight transports between pools of processes. Weights never pass the controller.

The contract is ``engine_core.contracts.weight_transport``. To add a transport, write a module with its class, and add a
row in ``table`` and an entry point in ``pyproject.toml``. The transports share ``bucketing``. ``choice`` selects the
transport for ``rollout.transport = "auto"`` by the devices of the processes.
"""
