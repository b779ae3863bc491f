"""Model folders written from a stream."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from engine_core.config import ModelConfig
from engine_plugin_torch import export
from engine_plugin_torch.export import write_model
from engine_plugin_torch.skeleton import blank_model, fresh_model
from engine_plugin_torch.weights import published_weights


@pytest.fixture
def model(model_folder):
    torch.manual_seed(0)
    return fresh_model(ModelConfig(path=model_folder("llama"), attention="eager"), "actor", torch.bfloat16)


@pytest.mark.parametrize("limit", [5 * 10**9, 2**13])
def test_transformers_loads_what_was_written_in_one_file_or_several(
    model, model_folder, tmp_path, monkeypatch, limit
):
    monkeypatch.setattr(export, "FILE_BYTES", limit)
    blank = blank_model(ModelConfig(path=model_folder("llama"), attention="eager"), "actor", torch.float32)
    write_model(tmp_path / "out", blank, published_weights(model))
    names = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert (names == ["model.safetensors"]) == (limit > 2**13)
    assert names[0] in ("model.safetensors", f"model-00001-of-{len(names):05d}.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_the_index_names_the_file_of_each_weight_and_the_bytes_of_all(model, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 2**13)
    write_model(tmp_path, model, published_weights(model))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 2 for p in model.parameters())
    assert index["weight_map"].keys() == dict(model.named_parameters()).keys()


def test_the_config_says_the_class_and_the_type_of_what_was_written(model, tmp_path):
    write_model(tmp_path, model, published_weights(model))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")


def test_a_module_without_a_config_has_its_weights_written(tmp_path):
    module = torch.nn.Linear(2, 2)
    write_model(tmp_path, module, ((name, p.detach()) for name, p in module.named_parameters()))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_exported_base_model_stops_at_the_end_token_of_the_runs_tokenizer(
    make_engine, tokenizer, tmp_path
):
    engine = make_engine("llama", live={"tokenizer": tokenizer})
    engine.module.generation_config.eos_token_id = 96

    def generated(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model.generate(torch.tensor([[5, 9, 2]]), do_sample=False, max_new_tokens=20)[0, 3:].tolist()

    engine.export(tmp_path / "endless")  # the tokenizer has no end token yet
    tokens = generated(tmp_path / "endless")
    assert (len(tokens), 96 in tokens) == (20, False)
    tokenizer.eos_token = str(tokens[3])
    for _ in range(2):
        engine.export(tmp_path / "out")
        config = GenerationConfig.from_pretrained(tmp_path / "out")
        assert config.eos_token_id == [96, tokens[3]]
    assert generated(tmp_path / "out") == tokens[: tokens.index(tokens[3]) + 1]


def test_a_model_with_its_own_code_is_loaded_from_what_was_written(tmp_path):
    folder = tmp_path / "coded"
    LlamaConfig(vocab_size=97, hidden_size=8, num_attention_heads=1, num_hidden_layers=1).save_pretrained(
        folder
    )
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "coded"}
    config["auto_map"] = {"AutoConfig": "configuration.Coded", "AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration.py").write_text(
        "from transformers import LlamaConfig\nclass Coded(LlamaConfig):\n    model_type = 'coded'\n"
    )
    (folder / "modeling.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration import Coded\n"
        "class Model(LlamaForCausalLM):\n    config_class = Coded\n"
    )
    model = fresh_model(
        ModelConfig(path=str(folder), attention="eager", trust_remote_code=True), "actor", torch.float32
    )
    write_model(tmp_path / "out", model, published_weights(model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(loaded).__name__ == "Model"
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_settings_that_transformers_refuses_to_write_are_kept(make_engine, tmp_path):
    """``temperature`` without ``do_sample``, as some older chat models have it."""
    settings = {"eos_token_id": [1, 3], "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    engine = make_engine("llama")
    module = engine.module
    module.generation_config = GenerationConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do_sample"):
        module.save_pretrained(tmp_path / "refused")
    engine.export(tmp_path / "saved")
    write_model(tmp_path / "written", module, published_weights(module))
    assert module.generation_config.temperature == 0.9
    for folder in ("saved", "written"):
        found = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert {key: found[key] for key in settings} == settings
        assert not found.get("do_sample")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).generation_config.eos_token_id == [
            1,
            3,
        ]
