"""The kit over NCCL, one GPU a rank."""

import pytest
import torch

from engine_plugin_testing import TrainEngineSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators"),
]


class TestNCCL(TrainEngineSuite):
    backend = "fsdp"
    world_size = 2
    process_group = "cpu:gloo,cuda:nccl"
    worker_context = "devices.py:one_each"
    device = "cuda"
    options = {"mixed_precision": {"param_dtype": "fp32"}}


class TestOffload(TestNCCL):
    options = {"cpu_offload": "params", "mixed_precision": {"param_dtype": "fp32"}}


class TestOptimizerOffload(TestNCCL):
    options = {"cpu_offload": "optimizer", "mixed_precision": {"param_dtype": "fp32"}}


class TestCompiled(TestNCCL):
    options = {"compile": True, "mixed_precision": {"param_dtype": "fp32"}}


class TestTensorParallel(TestNCCL):
    options = {"tp": 2, "mixed_precision": {"param_dtype": "fp32"}}


class TestSequenceParallel(TestNCCL):
    options = {"sp": 2, "mixed_precision": {"param_dtype": "fp32"}}


class TestBf16(TestNCCL):
    options = {"mixed_precision": {"param_dtype": "bf16"}}
    tolerance = 0.1  # nats, of logits with a standard deviation of about 5 in 8 bits
    gradient_tolerance = 0.1
    norm_tolerance = 0.02


class TestTensorParallelBf16(TestBf16):
    options = {"tp": 2, "mixed_precision": {"param_dtype": "bf16"}}
