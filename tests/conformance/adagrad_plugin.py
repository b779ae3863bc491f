"""An optimizer that is neither AdamW nor SGD, and the function by which the kit reads its gradients."""

import torch

from engine_core import hookimpl


@hookimpl
def engine_build_optimizer(module, optim_config):
    optimizer = torch.optim.Adagrad(module.parameters(), lr=optim_config.lr)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)


def gradients(engine):
    return [(name, p.grad) for name, p in engine.module.named_parameters()]


def doubled(engine):
    return [(name, 2 * value) for name, value in gradients(engine)]
