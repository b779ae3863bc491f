"""Lets megatron-core 0.16 run on a CPU over gloo, in tests alone: its code asks CUDA for a device, whatever its config says."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}  # by which megatron-core tells the buffers of gradients apart
CPU = torch.device("cpu")


def _is_cuda(device):
    return str(device).startswith("cuda")


class CudaIsCpu(TorchFunctionMode):
    """``device="cuda"`` gives the CPU, ``.cuda()`` the tensor itself, ``.type()`` the name of a CUDA type."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return TYPES.get(args[0].dtype) or func(*args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_on_cpu(rank=0, world_size=1):
    """For the whole of a worker: also the context of ``engine_plugin_testing.launcher.Workers``."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    cuda = {
        "current_device": lambda: CPU,
        "synchronize": lambda *args, **kwargs: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        "default_stream": mock.MagicMock(),
        "current_stream": mock.MagicMock(),
        "Stream": mock.MagicMock(),  # of tokens on their way to experts
        "stream": mock.MagicMock(),
        "Event": mock.MagicMock(),
    }
    states = {
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    counts = mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host)
    uneven = mock.patch.multiple(dist, all_gather=_uneven_all_gather, reduce_scatter=_uneven_reduce_scatter)
    device, random_states = mock.patch.multiple(torch.cuda, **cuda), mock.patch.multiple(random, **states)
    with device, random_states, counts, uneven, CudaIsCpu():
        yield


_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def _uneven_all_gather(parts, tensor, group=None, **kwargs):
    """NCCL gathers parts of different sizes, as of tokens of experts; gloo does not."""
    if len({part.shape for part in parts}) == 1:
        return _all_gather(parts, tensor, group=group, **kwargs)
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(tensor)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return None


def _uneven_reduce_scatter(output, parts, *args, group=None, **kwargs):
    """The same the other way."""
    if len({part.shape for part in parts}) == 1:
        return _reduce_scatter(output, parts, *args, group=group, **kwargs)
    for rank, part in enumerate(parts):
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        if rank == dist.get_rank(group):
            output.copy_(summed)
    return None


def _on_host(tensor, as_numpy=False, record_stream=False):
    """Numbers of tokens: Megatron makes them arrays only where they come from a device."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
