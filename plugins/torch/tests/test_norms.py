"""RMS norms with a backward pass of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine_plugin_torch.norms import use_fused_rmsnorm_backward

CHANNELS = 48


def norm(dtype: torch.dtype = torch.float32) -> Qwen3RMSNorm:
    made = Qwen3RMSNorm(CHANNELS, eps=1e-6)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(0.5, 2.0, CHANNELS))
    return made.to(dtype)


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_modules_to_the_bit_and_its_gradients_to_rounding(computed, weights):
    plain, own = norm(weights), norm(weights)
    assert use_fused_rmsnorm_backward(nn.Sequential(own)) == 1
    rows = torch.randn(2, 7, CHANNELS, generator=torch.Generator().manual_seed(0)).to(computed)
    pull = torch.randn(2, 7, CHANNELS, generator=torch.Generator().manual_seed(1))
    found = []
    for one in (plain, own):
        hidden = rows.clone().requires_grad_()
        out = one(hidden)
        out.backward(pull.to(out.dtype))
        found.append((out, hidden.grad, one.weight.grad))
    assert type(found[1][0].grad_fn).__name__ == "_RMSNormBackward"
    assert torch.equal(found[0][0], found[1][0])
    within = 1e-5 if torch.bfloat16 not in (computed, weights) else 2e-2
    for expected, result in zip(found[0][1:], found[1][1:], strict=True):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=within, atol=within)


def test_with_and_without_gradient_the_result_is_the_same_to_the_bit():
    one = norm()
    use_fused_rmsnorm_backward(one)
    rows = torch.randn(5, CHANNELS)
    with torch.no_grad():
        sampled = one(rows)
    assert torch.equal(one(rows), sampled)


@pytest.mark.parametrize("learns", ["rows", "weight"])
def test_where_one_of_the_two_learns_it_has_the_plain_modules_gradient_and_the_other_none(learns):
    rows, pull = torch.randn(2, 5, CHANNELS), torch.randn(2, 5, CHANNELS)
    found = []
    for own in (False, True):
        one = norm().requires_grad_(learns == "weight")
        assert use_fused_rmsnorm_backward(one) == 1 if own else True
        hidden = rows.clone().requires_grad_(learns == "rows")
        out = one(hidden)
        assert (type(out.grad_fn).__name__ == "_RMSNormBackward") is own
        out.backward(pull)
        assert (one.weight.grad is None) is (learns == "rows")
        assert (hidden.grad is None) is (learns == "weight")
        found.append(hidden.grad if learns == "rows" else one.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_in_float64_the_gradient_is_autograds():
    one = norm(torch.float64)
    use_fused_rmsnorm_backward(one)
    rows = torch.randn(5, CHANNELS, dtype=torch.float64, requires_grad=True)
    assert type(one(rows).grad_fn).__name__ != "_RMSNormBackward"


def test_a_copy_computes_with_its_own_weights():
    one = norm()
    use_fused_rmsnorm_backward(one)
    copied = copy.deepcopy(one)
    with torch.no_grad():
        copied.weight.zero_()
        assert not copied(torch.randn(5, CHANNELS)).any()
    assert not copied(torch.randn(5, CHANNELS)).any()


def test_norms_of_another_formula_stay_as_they_are():
    class GatedRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states, gate=None):
            return super().forward(hidden_states)

    class ShiftedRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + hidden_states

    class CenteredRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    blank = CenteredRMSNorm(CHANNELS)
    blank.weight.data.zero_()  # as a module whose weights are elsewhere shows them
    others = [
        blank,
        CenteredRMSNorm(CHANNELS),
        ShiftedRMSNorm(CHANNELS),
        Gemma2RMSNorm(CHANNELS),
        GatedRMSNorm(CHANNELS),
        nn.RMSNorm(CHANNELS),
        nn.LayerNorm(CHANNELS),
    ]
    assert use_fused_rmsnorm_backward(nn.Sequential(*others)) == 0


def test_a_norm_whose_weights_are_not_there_yet_is_known_by_its_formula():
    one = norm()
    shown = one.weight.data
    one.weight.data = shown.new_zeros(1).expand(CHANNELS)
    assert use_fused_rmsnorm_backward(one) == 1
    one.weight.data = shown
    rows = torch.randn(5, CHANNELS)
    assert torch.equal(one(rows), norm()(rows))


def test_looking_at_a_norm_runs_no_hook_of_it_and_leaves_its_weight():
    one, seen = norm(), []
    one.register_forward_pre_hook(lambda *told: seen.append(told))
    weight, before = one.weight, one.weight.detach().clone()
    assert use_fused_rmsnorm_backward(one) == 1
    assert not seen
    assert one.weight is weight
    assert torch.equal(weight, before)
