import pytest

from engine_plugin_testing import TrainEngineSuite


class DeepSpeed(TrainEngineSuite):
    backend = "deepspeed"
    roles = ("critic", "reward_model")
    world_size = 2
    on_accelerator = {"compute_dtype": "fp32"}
    unsupported = {
        "test_a_closed_engine_holds_no_memory": "DeepSpeed keeps the parameters that it partitions"
    }


@pytest.mark.slow
class TestStage3(DeepSpeed):
    resumes_on = (1,)
    options = {"param_persistence_threshold": 0}


@pytest.mark.slow
class TestStage2(DeepSpeed):
    resumes_on = (1,)
    options = {"stage": 2}


@pytest.mark.slow
class TestStage1(DeepSpeed):
    resumes_on = (4,)
    options = {"stage": 1}


@pytest.mark.slow
class TestStage0(DeepSpeed):
    resumes_on = (1,)
    options = {"stage": 0}


@pytest.mark.slow
class TestStage3InHostMemory(DeepSpeed):
    resumes_on = (4,)
    options = {
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "param_persistence_threshold": 0,
    }


@pytest.mark.slow
class TestStage2OptimizerInHostMemory(DeepSpeed):
    options = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.slow
class TestStage1OptimizerInHostMemory(DeepSpeed):
    options = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
