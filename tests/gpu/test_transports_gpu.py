"""The suite of weight transports between GPUs: each end is a process with a GPU of its own, and both on one.

ENGINE_TEST_DEVICE=cuda pytest -m gpu tests/gpu/test_transports_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from engine_plugin_testing import TransportSuite

pytestmark = pytest.mark.gpu
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
one = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")


class OnGPUs(TransportSuite):
    world_size = 2
    device = "cuda"  # of the number of the rank
    soon = {"timeout_seconds": 10.0}  # NCCL's first word comes within half of it


@two
class TestBroadcast(OnGPUs):
    backend = "broadcast"


@two
class TestTCP(OnGPUs):
    backend = "tcp"


@two
class TestIPC(OnGPUs):
    backend = "ipc"


@one
class TestIPCOnOne(OnGPUs):
    backend = "ipc"
    device = "cuda:0"


@one
class TestBroadcastOnOne(OnGPUs):
    """NCCL takes no two ranks of one GPU: bytes go through host memory."""

    backend = "broadcast"
    device = "cuda:0"
