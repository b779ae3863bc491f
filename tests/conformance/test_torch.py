from engine_plugin_testing import TrainEngineSuite


class TestTorch(TrainEngineSuite):
    backend = "torch"
    roles = ("critic",)
    options = {"param_dtype": "fp32", "compute_dtype": "fp32"}
