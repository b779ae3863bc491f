"""The suite of runtimes on those of the core."""

import pytest

from engine_plugin_testing import RuntimeSuite


class TestLocal(RuntimeSuite):
    backend = "local"
    processes = False


@pytest.mark.slow
class TestTorchrun(RuntimeSuite):
    backend = "torchrun"
    options = {"device": "cpu"}  # else each process needs an accelerator, where there is one
    world_size = 2
