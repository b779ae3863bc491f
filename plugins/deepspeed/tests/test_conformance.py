import pytest

from engine_core.testing import TrainEngineSuite


@pytest.mark.slow
class TestStage3(TrainEngineSuite):
    backend = "deepspeed"
    world_size = 2
    resumes_on = (1,)
    options = {"param_persistence_threshold": 0}


@pytest.mark.slow
class TestStage2(TrainEngineSuite):
    backend = "deepspeed"
    world_size = 2
    resumes_on = (1,)
    options = {"stage": 2}


@pytest.mark.slow
class TestStage1(TrainEngineSuite):
    backend = "deepspeed"
    world_size = 2
    resumes_on = (4,)
    options = {"stage": 1}


@pytest.mark.slow
class TestStage0(TrainEngineSuite):
    backend = "deepspeed"
    world_size = 2
    resumes_on = (1,)
    options = {"stage": 0}


@pytest.mark.slow
class TestStage3InHostMemory(TrainEngineSuite):
    backend = "deepspeed"
    world_size = 2
    resumes_on = (4,)
    options = {
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "param_persistence_threshold": 0,
    }


@pytest.mark.slow
class TestStage2OptimizerInHostMemory(TrainEngineSuite):
    backend = "deepspeed"
    world_size = 2
    options = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.slow
class TestStage1OptimizerInHostMemory(TrainEngineSuite):
    backend = "deepspeed"
    world_size = 2
    options = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
