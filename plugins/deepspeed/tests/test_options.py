import pytest
from pydantic import ValidationError

from engine_core.errors import ConfigError
from engine_plugin_deepspeed import checks
from engine_plugin_deepspeed import health as told
from engine_plugin_deepspeed.options import BARRED, OURS, DeepSpeedOptions
from engine_plugin_deepspeed.settings import managed, settings, zero


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param needs stage 3, and stage is 2"),
        ({"stage": 2, "loading": "sharded"}, "loading = 'sharded' needs stage 3"),
        ({"stage": 1, "quantized_gradients": True}, "quantized_gradients needs stage 3"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer needs stage 1 or more"),
        ({"stage": 0, "compute_dtype": "fp16"}, "compute_dtype 'fp16' needs stage 1"),
        ({"compile": True}, "compile cannot be combined with stage 3"),
        ({"stage": 1, "overlap_comm": True}, "overlap_comm needs stage 2 or 3"),
        ({"loss_scale": 2.0}, "loss_scale has no effect"),
        ({"loss_scale": 1000.0, "compute_dtype": "fp16"}, "loss_scale 1000.0 is no power of two"),
        ({"loading": "sharded", "hpz_partition_size": 2}, "cannot be combined with hpz_partition_size"),
        ({"offload_param": {"device": "nvme"}}, "device 'nvme' needs nvme_path"),
        ({"offload_param": {"nvme_path": "x"}}, "device 'none' has no nvme_path"),
        (
            {"zero": {"stage3_prefetch_bucket_size": 1}},
            "zero.stage3_prefetch_bucket_size: set prefetch_bucket_size",
        ),
        ({"zero": {"zenflow": {}}}, "zero.zenflow cannot be set: its steps"),
        (
            {"zero": {"round_robin_gradients": True}},
            "zero.round_robin_gradients cannot be set: DeepSpeed then reads",
        ),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_when_the_file_is_read(options, words):
    with pytest.raises(ValidationError, match=words.replace("(", r"\(").replace(".", r"\.")):
        DeepSpeedOptions(**options)


def test_the_keys_that_are_told_apart_are_those_of_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values())}
    assert set(OURS) | set(BARRED) <= known
    assert not set(OURS) & set(BARRED)


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


def test_doctor_says_what_cannot_be_built_and_what_it_costs(monkeypatch):
    monkeypatch.setattr(told.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    line = told.health()
    assert line.startswith("deepspeed 0.19")
    assert "nvcc (no fused operators for GPUs)" in line
    assert "c++ (no operators for the CPU" in line


def test_doctor_finds_libaio_by_its_header(monkeypatch, tmp_path):
    monkeypatch.setattr(told, "_header_folders", lambda: [str(tmp_path)])
    assert "libaio (no offload to NVMe)" in told.health()
    (tmp_path / "libaio.h").touch()
    assert "libaio" not in told.health()


def test_doctor_says_that_deepspeed_is_missing(monkeypatch):
    def absent(name):
        raise told.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(told.importlib.metadata, "version", absent)
    with pytest.raises(told.EnvironmentProblem, match="pip install engine-plugin-deepspeed"):
        told.health()


@pytest.mark.parametrize(
    ("tools", "compatible", "words"),
    [(False, True, "needs a C\\+\\+ compiler and ninja"), (True, False, "needs the headers of libaio")],
)
def test_a_disk_is_refused_where_its_operator_cannot_be_built(monkeypatch, tools, compatible, words):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: compatible)
    monkeypatch.setattr(checks, "found", lambda tool: tools)
    with pytest.raises(ConfigError, match=f"actor.deepspeed: offload to 'nvme' {words}.*offload to 'cpu'"):
        checks._check_disk_operator("actor.deepspeed")
