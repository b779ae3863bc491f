"""vLLM's changes of a transformers class stay with vLLM's module."""

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, set_current_vllm_config

from engine_plugin_vllm_rollout.transformers_classes import restore_classes


@pytest.fixture
def family():
    """A class as of transformers, changed by vLLM, and a module of it that vLLM has made."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    Model.__module__ = "transformers.models.some.modeling_some"
    plain = Model.__init__
    support_torch_compile(dynamic_arg_dims={"x": 0})(Model)
    with set_current_vllm_config(VllmConfig()):
        made = Model()
    return Model, plain, made


def test_a_module_of_the_trainer_can_be_built_and_called_after_vllm_has_started(family):
    model, plain, made = family
    with pytest.raises(AssertionError, match="vLLM config is not set"):
        model()
    restore_classes(nn.ModuleList([made]))
    assert model.__init__ is plain
    assert model.__bases__ == (nn.Module,)
    called = []
    own = model()
    own.register_forward_hook(lambda *_: called.append(True))
    assert own(torch.ones(1)) == 2
    assert called


def test_the_module_of_vllm_keeps_the_changes_and_is_still_of_the_family(family):
    model, _, made = family
    changed = type(made).__call__
    restore_classes(nn.ModuleList([made]))
    assert type(made).__call__ is changed
    assert isinstance(made, model)
    assert type(made) is not model


def test_a_second_engine_finds_the_class_as_the_first_one_did(family):
    model, plain, made = family
    restore_classes(nn.ModuleList([made]))
    support_torch_compile(dynamic_arg_dims={"x": 0})(model)
    with set_current_vllm_config(VllmConfig()):
        second = model()
    restore_classes(nn.ModuleList([made, second]))
    assert model.__init__ is plain
    assert isinstance(second, model)
