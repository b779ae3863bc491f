"""Types that a device has not are refused by their key."""

import pytest
import torch

from engine_core.errors import ConfigError
from engine_plugin_fsdp import start

KEY = "actor.fsdp.mixed_precision.param_dtype"


def test_bfloat16_is_refused_where_the_device_has_none(monkeypatch):
    monkeypatch.setattr(start, "has_bf16", lambda device: False)
    monkeypatch.setattr(start, "has_fp16", lambda device: True)
    with pytest.raises(ConfigError) as caught:
        start.check_dtype(KEY, torch.bfloat16, torch.device("cuda", 1))
    assert str(caught.value) == f"{KEY}: 'bf16', but cuda:1 has no bfloat16. Set it to 'fp16' or 'fp32'."
    start.check_dtype(KEY, torch.float16, torch.device("cuda"))


def test_what_it_has_is_let_through():
    start.check_dtype(KEY, torch.bfloat16, torch.device("cpu"))
    start.check_dtype(KEY, torch.float32, torch.device("cpu"))
