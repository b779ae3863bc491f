"""The conformance kit on a model of hooks, in one process and sharded over two; and with two rates of learning."""

import pytest

from engine_plugin_testing import TrainEngineSuite

NOT_OF_TRANSFORMERS = {"test_export_is_loaded_by_from_pretrained": "transformers does not have this model"}


class ConvLMSuite(TrainEngineSuite):
    plugins = ["conv_lm"]
    write_model = "conv_lm_files.py:write"
    reference = "conv_lm_files.py:load"
    unsupported = NOT_OF_TRANSFORMERS


class TestTorch(ConvLMSuite):
    backend = "torch"


@pytest.mark.slow
class TestFSDP(ConvLMSuite):
    backend = "fsdp"
    world_size = 2
    resumes_on = (1,)


@pytest.mark.slow
class TestTwoRatesTorch(ConvLMSuite):
    backend = "two_rates"
    options = {"vector_rate": 1.0}  # gradients are read off a step of the weights, which must have one rate


@pytest.mark.slow
class TestTwoRatesFSDP(ConvLMSuite):
    backend = "two_rates_fsdp"
    world_size = 2
    options = {"vector_rate": 1.0}
