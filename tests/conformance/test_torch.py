from engine_plugin_testing import TrainEngineSuite


class TestTorch(TrainEngineSuite):
    backend = "torch"
    options = {"param_dtype": "fp32", "compute_dtype": "fp32"}
