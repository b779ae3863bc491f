"""The contracts of a runtime, two ranks, in the cluster of this session."""

import pytest

from engine_core.testing import RuntimeSuite


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestRay(RuntimeSuite):
    backend = "ray"
    world_size = 2
