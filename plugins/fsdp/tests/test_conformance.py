import pytest

from engine_core.testing import TrainEngineSuite


class TestTwoRanks(TrainEngineSuite):
    backend = "fsdp"
    world_size = 2


@pytest.mark.slow
class TestOneRank(TrainEngineSuite):
    backend = "fsdp"
