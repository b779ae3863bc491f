"""The reference engine below torch's DistributedDataParallel: what engines that shard are compared with."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine_core.contracts.engines import Layout
from engine_plugin_torch.engine import TorchEngine


class Holder(nn.Module):
    """Runs a function of the module inside of the forward pass that DistributedDataParallel watches."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, run):
        return run()


class CopiedEngine(TorchEngine):
    """Every rank has the whole model; gradients are summed in the backward pass, so of one micro-batch a step alone."""

    @property
    def layout(self):
        return Layout(dist.get_rank(), dist.get_world_size(), True)

    def _make_forward(self):
        made = super()._make_forward()
        self.copies = DistributedDataParallel(Holder(self.module), gradient_as_bucket_view=True)
        self.copies.register_comm_hook(None, _sum_gradients)
        return made

    def _outputs(self, micro, grad, watched=()):
        return self.copies(functools.partial(self.forward, micro, grad, watched))


def _sum_gradients(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])
