from engine_core.testing import TrainEngineSuite


class TestTorch(TrainEngineSuite):
    backend = "torch"
