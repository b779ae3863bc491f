from engine_core.testing import TrainEngineSuite


class TestTwoRanks(TrainEngineSuite):
    backend = "data_parallel"
    plugins = ["data_parallel_plugin.py"]
    world_size = 2
    resumes_on = (1,)
