"""A GPU for each worker of the kit."""

import contextlib

import torch


@contextlib.contextmanager
def one_each(rank, world_size):
    torch.accelerator.set_device_index(rank)
    yield
