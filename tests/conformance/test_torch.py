import pytest

from engine_plugin_testing import TrainEngineSuite


class TestTorch(TrainEngineSuite):
    backend = "torch"
    roles = ("critic", "reward_model")
    options = {"param_dtype": "fp32", "compute_dtype": "fp32", "log_prob_chunk_tokens": 64}
    in_bf16 = {"compute_dtype": "bf16"}
    in_fp16 = {"compute_dtype": "fp16", "loss_scale": 2.0**21}


@pytest.mark.slow
class TestBf16Weights(TrainEngineSuite):
    backend = "torch"
    roles = ("critic", "reward_model")
    options = {"param_dtype": "bf16", "compute_dtype": "bf16"}
    tolerance = 0.2  # nats: a logit of 16 is known to 0.06 in 8 bits
    gradient_tolerance = 0.1
    norm_tolerance = 0.02


@pytest.mark.slow
class TestFp16(TrainEngineSuite):
    backend = "torch"
    roles = ("critic", "reward_model")
    options = {"param_dtype": "fp32", "compute_dtype": "fp16", "loss_scale": 1024.0}  # norms of up to 60 fit
    tolerance = 0.05  # nats: a logit of 16 is known to 0.008 in 11 bits
    gradient_tolerance = 0.02
    norm_tolerance = 0.005
    unsupported = {
        "test_clipping_begins_at_the_limit_and_survives_any_norm": "a gradient of norm 1e8 overflows in float16"
    }
