"""Frozen models over host memory and disk: what they compute, what they hold in bytes, what they leave, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError, DataError
from engine_plugin_torch.device_map import check_device_map
from engine_plugin_torch.memory import Held
from engine_plugin_torch.options import TorchOptions, bytes_of

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
OUTPUTS = {"ref": ("log_probs", "entropy"), "reward_model": ("scores",)}


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.fixture
def folder(tmp_path):
    """Folder of a model with weights, and their bytes."""

    def write(kind=LlamaForSequenceClassification, **changes):
        config = LlamaConfig(**SHAPE | {"num_labels": 1} | changes)
        make = kind if kind is LlamaForSequenceClassification else kind.from_config
        module = make(config)
        module.save_pretrained(tmp_path / "saved")
        return str(tmp_path / "saved"), size(module.parameters())

    return write


@pytest.fixture
def offloaded(tmp_path):
    """Folder below which weights are offloaded."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def most_resident(monkeypatch):
    """Bytes of weights that were in memory at one time in the passes of a module, seen whenever a layer got its own."""
    held = {"module": None, "bytes": 0}
    fetch = AlignDevicesHook.pre_forward

    def watched(self, module, *arguments, **named):
        given = fetch(self, module, *arguments, **named)
        resident = size(p for p in held["module"].parameters() if not p.is_meta)
        held["bytes"] = max(held["bytes"], resident)
        return given

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", watched)
    return held


@pytest.mark.parametrize(("role", "share"), [("ref", 0.0), ("ref", 0.7), ("reward_model", 0.7)])
def test_a_model_over_memory_and_disk_computes_what_the_whole_one_does_within_its_bytes(
    make_engine, batch, folder, offloaded, most_resident, role, share
):
    path, total = folder(
        **({} if role == "reward_model" else {"kind": AutoModelForCausalLM, "tie_word_embeddings": True})
    )
    frozen = {"model": {"path": path}, "role": role, "trainable": False}
    limit = int(total * share)
    engine = make_engine(
        **frozen,
        total_steps=0,
        device_map="auto",
        max_memory={"cpu": f"{limit}B"},
        offload_folder=str(offloaded),
    )
    placed = engine.spread.bytes_by_device(engine.module)
    assert sum(placed.values()) == total
    assert placed.get("cpu", 0) <= limit
    assert placed["disk"] > 0
    most_resident["module"] = engine.module
    found = engine.infer(batch, OUTPUTS[role])
    expected = make_engine(**frozen).infer(batch, OUTPUTS[role])
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    largest = max(size(layer.parameters()) for layer in make_engine(**frozen).module.model.layers)
    assert 0 < most_resident["bytes"] <= max(limit, largest)
    assert size(p for p in engine.module.parameters() if not p.is_meta) <= limit
    assert [f.name.startswith("engine-tmp-offload-") for f in offloaded.iterdir()] == [True]
    engine.close()
    assert list(offloaded.iterdir()) == []


def test_weights_that_are_changed_while_they_are_read_lie_in_the_folder_until_the_end(
    make_engine, batch, model_folder, offloaded, tmp_path
):
    from transformers import AutoConfig

    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("qwen3_moe")))
    module.save_pretrained(tmp_path / "experts")
    frozen = {"model": {"path": str(tmp_path / "experts")}, "role": "ref", "trainable": False}
    engine = make_engine(
        **frozen,
        total_steps=0,
        device_map="auto",
        max_memory={"cpu": "1B"},
        offload_folder=str(offloaded),
    )
    assert any("experts" in file.name for file in offloaded.rglob("*.safetensors"))
    found, expected = (e.infer(batch, ("log_probs",))["log_probs"] for e in (engine, make_engine(**frozen)))
    assert torch.equal(found, expected)
    engine.close()
    assert list(offloaded.iterdir()) == []


def test_a_model_that_fits_one_device_lies_there(make_engine, batch, folder):
    path, total = folder(kind=AutoModelForCausalLM)
    frozen = {"model": {"path": path}, "role": "ref", "trainable": False}
    limit = {"cpu": f"{4 * total}B"}
    engine = make_engine(**frozen, total_steps=0, device_map="auto", max_memory=limit)
    assert engine.spread.bytes_by_device(engine.module) == {"cpu": total}
    found, expected = (e.infer(batch, ("log_probs",))["log_probs"] for e in (engine, make_engine(**frozen)))
    assert torch.equal(found, expected)
    engine.close()


def test_a_spread_model_sleeps_and_wakes_where_it_lies(make_engine, batch, folder):
    path, total = folder(kind=AutoModelForCausalLM)
    engine = make_engine(
        model={"path": path},
        role="teacher",
        trainable=False,
        total_steps=0,
        device_map="auto",
        max_memory={"cpu": f"{total // 2}B"},
    )
    before, found = [p.device for p in engine.module.parameters()], engine.infer(batch, ("log_probs",))
    engine.sleep()
    engine.wake()
    assert [p.device for p in engine.module.parameters()] == before
    assert torch.equal(engine.infer(batch, ("log_probs",))["log_probs"], found["log_probs"])
    layer = engine.module.model.layers[-1]
    mine = size(p for p in engine.module.parameters() if not p.is_meta)
    assert engine.budget.held() == Held(mine, gathered=size(layer.parameters()))
    engine.close()


CONTEXT = WorkerContext(plugins=None, role="ref", device=torch.device("cpu"), total_steps=4, frozen=True)
SPREAD = TorchOptions(device_map="auto")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"trainable": True},
            "ref.torch.device_map: it is for weights that never change, and those of 'ref' do.*ref.backend",
        ),
        ({"context": {"frozen": False}}, "weights that never change"),
        ({"lora": True}, r"the role has an adapter \(\[ref.lora\]\).*engine export"),
        ({"context": {"live": {"model": 1}}}, "given from Python.*ref.path"),
        (
            {"options": {"max_memory": {"7": "1GiB"}}},
            "max_memory: '7' is no device of this machine, which has cpu",
        ),
        ({"options": {"offload_folder": "/nowhere"}}, "offload_folder: '/nowhere' is no folder"),
    ],
    ids=str,
)
def test_what_cannot_be_spread_is_refused_before_a_model_is_read(changes, words):
    options = SPREAD.model_copy(update=changes.get("options", {}))
    context = dataclasses.replace(CONTEXT, **changes.get("context", {}))
    check_device_map(SPREAD, CONTEXT, "ref.torch", False, False)
    with pytest.raises(ConfigError, match=words):
        check_device_map(
            options, context, "ref.torch", changes.get("trainable", False), changes.get("lora", False)
        )


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package accelerate.*engine-plugin-torch\[device-map\]"):
        check_device_map(SPREAD, CONTEXT, "ref.torch", False, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_memory": {"cpu": "1GiB"}}, "max_memory has no effect without device_map"),
        ({"offload_folder": "x"}, "offload_folder has no effect without device_map"),
        ({"device_map": "auto", "max_memory": {"gpu": "1GiB"}}, "'gpu' is no device: expected 'cpu'"),
        ({"device_map": "auto", "max_memory": {"cpu": "lots"}}, "'lots' is no size"),
        ({"device_map": "auto", "quantize": "int8"}, "quantize cannot be combined with device_map"),
        ({"device_map": "auto", "compile": True}, "compile cannot be combined with device_map"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused_when_the_file_is_read(options, words):
    with pytest.raises(ValidationError, match=words):
        TorchOptions(**options)


def test_sizes_are_read_in_units_of_1000_and_1024():
    sizes = {"70GiB": 70 * 1024**3, "1.5 MB": 1_500_000, "12B": 12, "3kib": 3072}
    assert {text: bytes_of(text) for text in sizes} == sizes
    with pytest.raises(ValueError, match="'12' is no size"):
        bytes_of("12")


def test_a_folder_without_weights_or_without_a_head_has_nothing_to_place(make_engine, model_folder, folder):
    spread = {"trainable": False, "total_steps": 0, "device_map": "auto"}
    with pytest.raises(ConfigError, match="holds a config and no weights, so there is nothing to place"):
        make_engine("llama", role="ref", **spread)
    path, _ = folder(kind=AutoModelForCausalLM)
    with pytest.raises(DataError, match=r"not in the folder: score\.weight"):
        make_engine(model={"path": path}, role="reward_model", **spread)


def test_a_model_that_a_plugin_builds_whole_is_refused(make_engine, folder):
    path, _ = folder(kind=AutoModelForCausalLM)
    hooks = {"engine_build_model": lambda role: AutoModelForCausalLM.from_pretrained(path)}
    with pytest.raises(ConfigError, match=r"ref\.torch\.device_map: a plugin builds the whole model"):
        make_engine(role="ref", trainable=False, total_steps=0, device_map="auto", hooks=hooks)
