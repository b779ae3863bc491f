"""What ``auto`` means on each kind of device. The accelerators here are names: only the choice is tested."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys

import pytest
import torch

from engine_core.config import RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError
from engine_plugin_torch import engine as torch_engine
from engine_plugin_torch import precision
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.precision import Precision, choose

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def with_bf16(monkeypatch):
    """Accelerators that have bfloat16, or have not."""

    def set_to(there):
        monkeypatch.setattr(precision, "has_bf16", lambda device: there or device.type == "cpu")

    return set_to


@pytest.mark.parametrize("frozen", [True, False])
def test_on_the_cpu_auto_is_float32(frozen):
    assert choose(TorchOptions(), CPU, "actor.torch", frozen) == Precision(FP32, FP32)


def test_on_an_accelerator_with_bfloat16_trained_weights_stay_float32_and_others_do_not(with_bf16):
    with_bf16(True)
    assert choose(TorchOptions(), CUDA, "actor.torch", frozen=False) == Precision(FP32, BF16)
    assert choose(TorchOptions(), CUDA, "ref.torch", frozen=True) == Precision(BF16, BF16)


@pytest.mark.parametrize("frozen", [True, False])
def test_on_an_accelerator_without_bfloat16_auto_is_float32(with_bf16, frozen):
    with_bf16(False)
    assert choose(TorchOptions(), CUDA, "actor.torch", frozen) == Precision(FP32, FP32)


@pytest.mark.parametrize(
    ("options", "frozen", "expected"),
    [
        ({"param_dtype": "fp32"}, True, (FP32, BF16)),
        ({"param_dtype": "bf16"}, False, (BF16, BF16)),
        ({"compute_dtype": "fp32"}, False, (FP32, FP32)),
        ({"compute_dtype": "fp32"}, True, (FP32, FP32)),
        ({"compute_dtype": "bf16"}, False, (FP32, BF16)),
        ({"param_dtype": "fp32", "compute_dtype": "fp32"}, True, (FP32, FP32)),
    ],
)
def test_what_the_run_file_says_holds_and_the_rest_follows(with_bf16, options, frozen, expected):
    with_bf16(True)
    assert choose(TorchOptions(**options), CUDA, "actor.torch", frozen) == Precision(*expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"param_dtype": "bf16"}, (BF16, BF16)), ({"compute_dtype": "bf16"}, (FP32, BF16)), ({"param_dtype": "fp32"}, (FP32, FP32))],
)  # fmt: skip
def test_on_the_cpu_bfloat16_is_there_for_whoever_asks(options, expected):
    assert choose(TorchOptions(**options), CPU, "actor.torch", frozen=False) == Precision(*expected)


@pytest.mark.parametrize("there", [True, False])
def test_with_fp16_an_accelerator_keeps_frozen_weights_in_it_and_trained_ones_in_float32(
    with_bf16, monkeypatch, there
):
    with_bf16(there)
    monkeypatch.setattr(precision, "has_fp16", lambda device: True)
    options = TorchOptions(compute_dtype="fp16")
    assert choose(options, CUDA, "ref.torch", frozen=True) == Precision(FP16, FP16)
    assert choose(options, CUDA, "actor.torch", frozen=False) == Precision(FP32, FP16)
    assert choose(options, CPU, "ref.torch", frozen=True) == Precision(FP32, FP16)


def test_fp16_on_a_device_without_it_is_refused_by_key(monkeypatch):
    assert precision.has_fp16(CPU)
    monkeypatch.setattr(precision, "has_fp16", lambda device: False)
    with pytest.raises(ConfigError) as error:
        choose(TorchOptions(compute_dtype="fp16"), torch.device("mps"), "actor.torch")
    assert str(error.value).startswith("actor.torch.compute_dtype: 'fp16', but mps has no float16. Set it")


@pytest.mark.parametrize("key", ["param_dtype", "compute_dtype"])
def test_a_type_that_the_device_lacks_is_refused_by_key(with_bf16, key):
    with_bf16(False)
    with pytest.raises(ConfigError) as error:
        choose(TorchOptions(**{key: "bf16"}), CUDA, "actor.torch", frozen=False)
    assert str(error.value) == (
        f"actor.torch.{key}: 'bf16', but cuda has no bfloat16. Set it to 'fp32', or leave it out ('auto')."
    )


def test_a_device_without_the_type_has_no_bfloat16():
    assert precision.has_bf16(CPU)
    if not torch.cuda.is_available():
        assert not precision.has_bf16(torch.device("mps"))


@pytest.mark.parametrize("name", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there_is_refused_by_key(name):
    with pytest.raises(
        ConfigError, match=rf"^actor\.torch\.device: '{name}' cannot be used here: .*engine doctor"
    ):
        precision.find_device(name, CPU, "actor.torch")


def test_the_check_of_an_engine_looks_at_the_device_of_its_table(make_engine):
    config = make_engine("llama").config.model_copy()
    config.options = config.options.model_copy(update={"device": "toaster"})
    with pytest.raises(ConfigError, match=r"^actor\.torch\.device: 'toaster' cannot be used here"):
        TorchEngine.check(config, WorkerContext(plugins=None, role="actor", device=CPU))


def test_shares_of_the_actor_are_mixed_into_float32_only(make_engine):
    config, context = RoleConfig(options=TorchOptions(param_dtype="bf16")), make_engine().context
    TorchEngine.check(config, context)
    mixed = dataclasses.replace(context, role="ref", mixed=True)
    TorchEngine.check(RoleConfig(options=TorchOptions(compute_dtype="bf16")), mixed, trainable=False)
    with pytest.raises(
        ConfigError,
        match=r"ref_refresh_mix is below 1, and the weights of the role 'ref' are bf16, .*Set ref\.torch\.param_dtype = 'fp32'",
    ):
        TorchEngine.check(config, mixed, trainable=False)


def test_a_precision_says_what_it_is():
    assert [str(Precision(FP32, FP32)), str(Precision(BF16, BF16)), str(Precision(FP32, BF16))] == [
        "fp32",
        "bf16",
        "fp32 weights, computed in bf16",
    ]


def test_an_engine_refuses_the_type_before_it_builds_anything(make_engine, with_bf16, monkeypatch):
    with_bf16(False)
    built = []
    monkeypatch.setattr(TorchEngine, "_build_model_optimizer", lambda self, **_: built.append(self))
    monkeypatch.setattr(torch_engine, "find_device", lambda *_: CUDA)
    with pytest.raises(ConfigError, match=r"^actor\.torch\.param_dtype: 'bf16', but cuda has no bfloat16"):
        make_engine(param_dtype="bf16")
    assert not built


def test_the_choice_is_logged_and_kept(make_engine, caplog):
    caplog.set_level("INFO", "engine")
    engine = make_engine(compute_dtype="bf16", param_dtype="fp32")
    assert f"actor: fp32 weights, computed in bf16 on {engine.device}." in caplog.messages
    assert engine.precision == Precision(FP32, BF16)


def test_the_base_below_an_adapter_counts_as_frozen_and_what_is_exported_does_not(make_engine, with_bf16):
    with_bf16(True)
    engine = make_engine("llama", lora={"rank": 2})

    def chosen(**changes):
        other = copy.copy(engine)
        vars(other).pop("precision", None)
        other.device, other.options = CUDA, TorchOptions()
        other.context = dataclasses.replace(engine.context, frozen=changes.get("frozen", False))
        other.config = engine.config.model_copy(update={"lora": changes.get("lora")})
        other.trainable = changes.get("trainable", True)
        return other.precision

    assert chosen(lora=engine.config.lora) == Precision(BF16, BF16)
    assert chosen() == Precision(FP32, BF16)
    assert chosen(trainable=False) == Precision(FP32, BF16)  # what was trained is exported as it was trained
    assert chosen(trainable=False, frozen=True) == Precision(BF16, BF16)


def test_doctor_is_told_the_types_of_trained_and_of_frozen_weights(with_bf16, monkeypatch):
    with_bf16(True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert precision.health() == "precision auto: fp32; of weights that are not trained fp32"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CUDA)
    assert precision.health() == (
        "precision auto: fp32 weights, computed in bf16; of weights that are not trained bf16"
    )


def test_what_doctor_asks_is_imported_without_transformers():
    code = "import sys, engine_plugin_torch.precision; print('torch' in sys.modules, 'transformers' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["True", "False"]
