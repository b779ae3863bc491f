import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.devices import asked_accelerator

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


class Megatron(TrainEngineSuite):
    """megatron-core asks CUDA for a device: in these workers a CPU answers, but with ``ENGINE_TEST_DEVICE=cuda``."""

    backend = "megatron"
    roles = ("critic", "reward_model")
    worker_context = "" if asked_accelerator() else "engine_plugin_megatron.cpu_emulation:emulated"
    options = {"log_prob_chunk_tokens": 64}
    second_model = {
        "model_type": "qwen2",
        "attention_dropout": 0.25,
    }  # without a sliding window, which is refused
    on_accelerator = {"compute_dtype": "fp32"}


@pytest.mark.slow
class TestTensorParallel(Megatron):
    world_size = 2
    options = {"tp": 2}


@pytest.mark.slow
class TestOneRank(Megatron):
    resumes_on = (2,)


@pytest.mark.slow
class TestDataParallel(Megatron):
    world_size = 2
    resumes_on = (1,)


@pytest.mark.slow
class TestPipeline(Megatron):
    world_size = 2
    options = {"pp": 2}


@pytest.mark.slow
class TestTensorParallelAndPipeline(Megatron):
    world_size = 4
    options = {"tp": 2, "pp": 2}


@pytest.mark.slow
class TestContextParallel(Megatron):
    world_size = 2
    resumes_on = (4,)
    options = {"cp": 2}


@pytest.mark.slow
class TestExperts(Megatron):
    world_size = 2
    resumes_on = (4,)
    options = {"ep": 2}
    model = EXPERTS


@pytest.mark.slow
class TestExpertsAndTensorParallel(Megatron):
    world_size = 4
    options = {"ep": 2, "tp": 2, "sequence_parallel": True}
    model = EXPERTS
