import contextlib

import pytest
from pydantic import ValidationError

from engine_core.config import RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_deepspeed import library as told
from engine_plugin_deepspeed.engine import DeepSpeedEngine
from engine_plugin_deepspeed.library import managed, settings, zero
from engine_plugin_deepspeed.options import DeepSpeedOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param needs stage 3, and stage is 2"),
        ({"stage": 2, "loading": "sharded"}, "loading = 'sharded' needs stage 3"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer needs stage 1 or more"),
        ({"stage": 0, "compute_dtype": "fp16"}, "compute_dtype 'fp16' needs stage 1"),
        ({"compile": True}, "compile cannot be combined with stage 3"),
        ({"stage": 1, "overlap_comm": True}, "overlap_comm needs stage 2 or 3"),
        ({"loss_scale": 2.0}, "loss_scale has no effect"),
        ({"loss_scale": 1000.0, "compute_dtype": "fp16"}, "loss_scale 1000.0 is no power of two"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_when_the_file_is_read(options, words):
    with pytest.raises(ValidationError, match=words.replace("(", r"\(").replace(".", r"\.")):
        DeepSpeedOptions(**options)


def test_deepspeed_is_told_of_one_micro_batch_and_no_division():
    import torch

    made = settings(DeepSpeedOptions(stage=2), torch.bfloat16, torch.device("cpu"), 1.5)
    assert made["gradient_accumulation_steps"] == 1
    assert made["gradient_clipping"] == 1.5
    assert made["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["communication_data_type"] == "fp32"
    assert not made["managed_gradient_accumulation"]


def test_gradients_are_summed_beside_the_backward_pass_where_deepspeed_can():
    import torch

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    offloaded = DeepSpeedOptions(offload_optimizer={"device": "cpu"})
    assert zero(DeepSpeedOptions(), gpu)["overlap_comm"]
    assert not zero(DeepSpeedOptions(), cpu)["overlap_comm"]
    assert not zero(offloaded, gpu)["overlap_comm"]
    assert [managed(DeepSpeedOptions(stage=stage)) for stage in range(4)] == [True, False, False, True]
    assert not managed(offloaded)
    assert zero(offloaded, gpu)["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"compute_dtype": "bf16"}, True),
        ({"compute_dtype": "fp32"}, False),
        ({"compute_dtype": "bf16", "stage": 2}, False),
    ],
    ids=str,
)
def test_shares_of_the_actor_are_not_mixed_into_the_parts_of_16_bits_of_stage_3(options, refused):
    import torch

    plugins, cpu = PluginSet.load({}), torch.device("cpu")
    config = RoleConfig(backend="deepspeed", options=DeepSpeedOptions(**options))
    told = pytest.raises(ConfigError, match=r"below 1, .* Set ref\.deepspeed\.compute_dtype = 'fp32'")
    with told if refused else contextlib.nullcontext():
        DeepSpeedEngine.check(config, WorkerContext(plugins, "ref", cpu, mixed=True), trainable=False)
    DeepSpeedEngine.check(config, WorkerContext(plugins, "ref", cpu), trainable=False)


def test_doctor_says_the_version():
    assert told.health().startswith("deepspeed 0.19")


def test_doctor_says_that_deepspeed_is_missing(monkeypatch):
    def absent(name):
        raise told.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(told.importlib.metadata, "version", absent)
    with pytest.raises(told.EnvironmentProblem, match="pip install engine-plugin-deepspeed"):
        told.health()
