"""Weight transports between pools of processes. Weights never pass the controller.

The contract is ``engine_core.contracts.weight_transport``. To add a transport, write a module with its class, a row in ``table`` and
an entry point in ``pyproject.toml``. ``bucketing`` has what transports share; ``choice`` decides what ``rollout.transport = "auto"``
means, by the ``devices`` of the processes.
"""
