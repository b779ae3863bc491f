"""The suite of weight transports on those of the core, between four processes."""

import pytest

from engine_plugin_testing import TransportSuite


class TestTCP(TransportSuite):
    backend = "tcp"
    confirms = True


class TestBroadcast(TransportSuite):
    backend = "broadcast"


class TestIPC(TransportSuite):
    """On a CPU: the sockets of ``tcp``."""

    backend = "ipc"
    confirms = True


@pytest.mark.slow
class TestBroadcastToOne(TransportSuite):
    backend = "broadcast"
    world_size = 2
