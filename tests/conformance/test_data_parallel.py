import pytest

from engine_plugin_testing import TrainEngineSuite


@pytest.mark.slow  # the same contracts on two ranks: plugins/fsdp/tests/test_conformance.py
class TestTwoRanks(TrainEngineSuite):
    backend = "data_parallel"
    plugins = ["data_parallel_plugin.py"]
    world_size = 2
    resumes_on = (1,)
