"""Weights copied by a plan are those that ``load_weights`` would have put there, bit for bit."""

import pytest
import torch
from torch import nn

from engine_plugin_vllm_rollout.copy_plan import CopyPlan


class Fused(nn.Module):
    """Loads as vLLM's models do: q, k, v and gate, up into slices of one parameter; ``scale`` and ``turned`` in other ways."""

    def __init__(self, dtype=torch.float32, padding=0):
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(8 + 4 + 4, 6, dtype=dtype))
        self.gate_up = nn.Parameter(torch.zeros(2 * 10, 6, dtype=dtype))
        self.embed = nn.Parameter(torch.zeros(12 + padding, 6, dtype=dtype))
        self.turned = nn.Parameter(torch.zeros(6, 3, dtype=dtype))
        self.halved = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.register_buffer("scale", torch.zeros(1))
        self.calls = []

    def load_weights(self, weights):
        slices = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}
        for name, tensor in weights:
            self.calls.append(name)
            if name in slices:
                self.qkv.data.narrow(0, *slices[name]).copy_(tensor)
            elif name in ("gate", "up"):
                # the part of this rank
                self.gate_up.data.narrow(0, 10 * (name == "up"), 10).copy_(tensor[-10:])
            elif name == "embed":
                self.embed.data[:12].copy_(tensor)
                self.embed.data[12:].fill_(0)
            elif name == "turned":
                self.turned.data.copy_(tensor.t())
            elif name == "halved":
                self.halved.data.copy_(tensor / 2)
            else:
                self.scale.fill_(tensor.item())


SHAPES = {
    **{"q": (8, 6), "k": (4, 6), "v": (4, 6), "gate": (10, 6), "up": (20, 6)},
    **{"embed": (12, 6), "turned": (3, 6), "halved": (5,), "scale": (1,)},
}


def drawn(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()]


def in_one_memory(weights):
    """As a bucket of a sampler's process: views of one tensor."""
    flat = torch.cat([tensor.flatten() for _, tensor in weights])
    parts = flat.split([tensor.numel() for _, tensor in weights])
    return [(name, part.view(tensor.shape)) for (name, tensor), part in zip(weights, parts, strict=True)]


@pytest.mark.parametrize("arranged", [list, in_one_memory], ids=["apart", "one memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_load_is_that_of_load_weights_without_asking_it(arranged, dtype):
    plain, planned = Fused(dtype), Fused(dtype)
    plan = CopyPlan(planned)
    for seed in (1, 2, 3):
        plain.load_weights(drawn(seed))
        planned.calls.clear()
        weights = arranged(drawn(seed))
        for part in (weights[:4], weights[4:8], weights[8:]):
            plan.load(part)
        assert all(torch.equal(one, planned.state_dict()[n]) for n, one in plain.state_dict().items())
    assert plan.names == {"q", "k", "v", "gate", "up", "embed", "turned"}
    assert planned.calls == ["halved", "scale"]


def test_a_parameter_that_is_written_otherwise_is_loaded_as_ever():
    plain, planned = Fused(padding=4), Fused(padding=4)
    plan = CopyPlan(planned)
    for seed in (1, 2):
        planned.embed.data.fill_(7)  # as memory that was given back
        planned.calls.clear()
        plain.load_weights(drawn(seed))
        plan.load(drawn(seed)[:5])
        plan.load(drawn(seed)[5:])
        assert all(torch.equal(one, planned.state_dict()[n]) for n, one in plain.state_dict().items())
    assert plan.names == {"q", "k", "v", "gate", "up", "turned"}
    assert planned.calls == ["embed", "halved", "scale"]


def test_parameters_that_were_replaced_are_watched_anew():
    plain, planned = Fused(), Fused()
    plan = CopyPlan(planned)
    plan.load(drawn(1)[:8])
    old = planned.qkv
    planned.qkv = nn.Parameter(torch.zeros_like(old))
    plan.load(drawn(2))
    plain.load_weights(drawn(2))
    assert all(torch.equal(one, planned.state_dict()[n]) for n, one in plain.state_dict().items())


def test_a_weight_of_another_shape_or_type_is_loaded_as_ever():
    plain, planned = Fused(), Fused()
    plan = CopyPlan(planned)
    plan.load(drawn(1))
    wide = [
        ("up", torch.randn(10, 6)),
        ("q", torch.randn(6, 8).t()),
        ("k", torch.randn(4, 6, dtype=torch.float64)),
    ]
    planned.load_weights(drawn(1))
    plain.load_weights(drawn(1))
    plain.load_weights(wide)
    plan.load(wide)
    assert all(torch.equal(one, planned.state_dict()[n]) for n, one in plain.state_dict().items())
