"""The suite of weight transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_plugin_testing import (
    imports,
    transport_failures,
    transport_random,
    transport_updates,
    transport_values,
)
from engine_plugin_testing.suite import Suite
from engine_plugin_testing.transport_bench import DAMAGE

LEAST_RANKS = 2


class TransportSuite(
    Suite, modules=(imports, transport_updates, transport_values, transport_random, transport_failures)
):
    """A suite: the contracts of ``engine_core.contracts.weight_transport.WeightTransport``.

    Each rank is a process with one endpoint of the link, as in a run: rank 0 sends, the other ranks receive.

    Attributes:
        backend: name of the transport.
        options: its table, as in ``[rollout.NAME]``.
        soon: further options, with which timeouts expire within a few seconds; for contracts of late peers.
        damage: ``module:function`` or ``file.py:function``, a context manager within which the second bucket of an
            update is damaged between its checksum and its receiver; entered by the sender. Default: for transports on
            ``flat_buckets``.
        confirms: whether ``send`` returns only after every receiver has verified the whole update.
        device: as in ``torch.device``; empty: what ``ENGINE_TEST_DEVICE`` says, else the CPU. Without an index each
            rank uses the device of its number.
    """

    kind = "weight_transports"
    section = "rollout"
    bench = "engine_plugin_testing.transport_bench:TransportBench"
    fields = ("backend", "options", "plugins", "soon", "damage", "device")

    backend: str = "tcp"
    options: Mapping[str, Any] = {}
    soon: Mapping[str, Any] = {"timeout_seconds": 3.0}
    damage: str = DAMAGE
    confirms: bool = False
    device: str = ""
    world_size: int = 4

    @classmethod
    def setup_class(cls) -> None:
        """Prepare the suite, whose ``confirms`` is a capability; refuse a transport without links, and fewer than two ranks."""
        super().setup_class()
        cls._capabilities = cls._capabilities | ({"confirms"} if cls.confirms else set())
        if cls._problem:
            return
        from engine_core.plugins.plugin_set import PluginSet

        spec: Any = PluginSet.load({cls.kind: {cls.offered()}}, cls.plugins, cls.root()).spec(
            cls.kind, cls.offered()
        )
        if "disaggregated" not in spec.serves:
            cls._problem = (
                f"'{cls.offered()}' serves samplers in the actor's own processes alone: nothing crosses, and there is no link "
                "to test. `RolloutEngineSuite` holds what it promises."
            )
        elif cls.world_size < LEAST_RANKS:
            cls._problem = (
                f"world_size is {cls.world_size}; a link has a sender and at least one receiver: 2 or more."
            )
