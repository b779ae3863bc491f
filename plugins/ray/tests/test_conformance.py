"""The contracts of a runtime, two ranks, in the cluster of this session."""

from typing import ClassVar

import pytest

from engine_plugin_testing import RuntimeSuite


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestRay(RuntimeSuite):
    """The contracts with messages over sockets: all actors are on one machine."""

    backend = "ray"
    world_size = 2


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestRayWithMessagesByRay(RuntimeSuite):
    """The contracts with messages by Ray, as between machines."""

    backend = "ray"
    options: ClassVar[dict[str, str]] = {"worker_transport": "ray"}
    world_size = 2
