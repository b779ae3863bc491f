"""Types that a device has not are refused by their key."""

import pytest
import torch

from engine_core.errors import ConfigError
from engine_plugin_fsdp import dtypes

KEY = "actor.fsdp.mixed_precision.param_dtype"


def test_bfloat16_is_refused_where_the_device_has_none(monkeypatch):
    monkeypatch.setattr(dtypes, "has_bf16", lambda device: False)
    monkeypatch.setattr(dtypes, "has_fp16", lambda device: True)
    with pytest.raises(ConfigError) as caught:
        dtypes.check_dtype(KEY, torch.bfloat16, torch.device("cuda", 1))
    assert str(caught.value) == f"{KEY}: 'bf16', but cuda:1 has no bfloat16. Set it to 'fp16' or 'fp32'."
    dtypes.check_dtype(KEY, torch.float16, torch.device("cuda"))


def test_what_it_has_is_let_through():
    dtypes.check_dtype(KEY, torch.bfloat16, torch.device("cpu"))
    dtypes.check_dtype(KEY, torch.float32, torch.device("cpu"))
