"""The CUDA calls of megatron-core, answered on a CPU: ``cpu_emulation = true`` tries a run file without a GPU.

megatron-core 0.16 asks CUDA for its device, streams and random states, whatever its config says. ``emulate`` replaces these
calls for the rest of the process. Numbers are those of the CPU; speed and memory say nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}  # by which megatron-core tells the buffers of gradients apart
_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


class CudaIsCpu(TorchFunctionMode):
    """A mode in which ``device="cuda"`` gives the CPU, ``.cuda()`` the tensor itself, ``.type()`` the name of a CUDA type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return TYPES.get(args[0].dtype) or func(*args)
        return func(*args, **kwargs)


class _NoStream:
    """A stream or an event whose methods do nothing and return another one; also the context of a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> type[_NoStream]:
        return _NoStream

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


@functools.cache
def emulate() -> None:
    """Answer megatron-core's CUDA calls on the CPU, in this thread and for the rest of the process."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    streams = ("default_stream", "current_stream", "Stream", "stream", "Event")
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": lambda *args, **kwargs: None,
            "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "manual_seed": torch.manual_seed,
            **dict.fromkeys(streams, _NoStream),
        },
        random: {
            "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        },
        token_dispatcher: {"maybe_move_tensor_to_cpu": _on_host},
        dist: {"all_gather": _uneven_all_gather, "reduce_scatter": _uneven_reduce_scatter},
    }
    for module, functions in replaced.items():
        for name, function in functions.items():
            setattr(module, name, function)
    CudaIsCpu().__enter__()


@contextlib.contextmanager
def emulated(rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Call ``emulate``: the ``worker_context`` of the conformance kit's suites."""
    emulate()
    yield


def _uneven_all_gather(parts: list[Tensor], tensor: Tensor, group: Any = None, **kwargs: Any) -> Any:
    """Gather parts [D_1, ...] of different sizes, such as the tokens of experts: NCCL does, gloo does not."""
    if len({part.shape for part in parts}) == 1:
        return _all_gather(parts, tensor, group=group, **kwargs)
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(tensor)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return None


def _uneven_reduce_scatter(
    output: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any
) -> Any:
    """Sum parts [D_1, ...] of different sizes over ranks, and keep this rank's part in ``output``."""
    if len({part.shape for part in parts}) == 1:
        return _reduce_scatter(output, parts, op, group, **kwargs)
    for rank, part in enumerate(parts):
        summed = part.clone()
        dist.all_reduce(summed, op, group)
        if rank == dist.get_rank(group):
            output.copy_(summed)
    return None


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return numbers of tokens [E] as megatron-core wants them: it makes arrays only of tensors on a device."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
