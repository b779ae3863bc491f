"""The conformance kit on the critic of the example."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine_plugin_testing import TrainEngineSuite


class Values(nn.Module):
    """The values of tokens one sequence at a time, with the parameters that the critic has."""

    def __init__(self, path):
        super().__init__()
        self.base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).model
        self.head = nn.Linear(self.base.config.hidden_size, 1, bias=False, dtype=torch.float64)

    def forward(self, input_ids, position_ids):
        hidden = self.base(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        return hidden @ self.head.weight[0]


class TestCritic(TrainEngineSuite):
    backend = "torch"
    plugins = ["critic"]
    roles = ("critic",)
    value_reference = "test_critic.py:Values"
    unsupported = {"test_hooks_load_without_heavy_imports": "the model and its hook are in one file"}
