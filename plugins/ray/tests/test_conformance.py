"""The contracts of a runtime, two ranks, in the cluster of this session."""

import pytest

from engine_plugin_testing import RuntimeSuite


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestRay(RuntimeSuite):
    """The contracts with two actors."""

    backend = "ray"
    world_size = 2
