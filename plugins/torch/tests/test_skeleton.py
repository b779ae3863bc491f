"""A model without weights, into which weights are put for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine_plugin_torch.skeleton import Skeleton


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids):
        return self.head(self.embed(ids)) * self.scale


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Tied()


def test_it_computes_what_the_module_does_with_weights_in_it_and_is_empty_again(module):
    skeleton, ids = Skeleton(module, torch.device("cpu")), torch.tensor([1, 4])
    assert {p.device.type for p in skeleton.module.parameters()} == {"meta"}
    with skeleton.filled([("embed.weight", module.embed.weight.detach())]) as filled:
        assert filled.head.weight is filled.embed.weight
        assert torch.equal(filled(ids), module(ids))
    assert {p.device.type for p in skeleton.module.parameters()} == {"meta"}


def test_a_stream_that_breaks_off_leaves_it_empty(module):
    skeleton = Skeleton(module, torch.device("cpu"))

    def broken():
        yield "embed.weight", module.embed.weight.detach()
        raise OSError("the ranks are gone")

    with pytest.raises(OSError, match="gone"), skeleton.filled(broken()):
        pass
    assert {p.device.type for p in skeleton.module.parameters()} == {"meta"}


def test_its_buffers_are_its_own(module):
    skeleton = Skeleton(module, torch.device("cpu"))
    with skeleton.filled([("scale", torch.tensor(5.0))]):
        pass
    assert (float(skeleton.module.scale), float(module.scale)) == (5.0, 2.0)
