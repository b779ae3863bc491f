"""The suite of weight transports on those of the core, between four processes."""

import pytest

from engine_plugin_testing import TransportSuite


class TestTCP(TransportSuite):
    backend = "tcp"


class TestBroadcast(TransportSuite):
    backend = "broadcast"


class TestIPC(TransportSuite):
    """On a CPU: memory of the machine."""

    backend = "ipc"


class TestFolder(TransportSuite):
    backend = "folder"
    damage = "damaged_part.py:after_it_was_written"


@pytest.mark.slow
class TestBroadcastToOne(TransportSuite):
    backend = "broadcast"
    world_size = 2
