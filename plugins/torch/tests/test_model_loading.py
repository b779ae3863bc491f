"""Models from folders: what is refused, and how."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.config import ModelConfig
from engine_core.contracts.weight_names import own_weights
from engine_core.errors import ConfigError, DataError
from engine_plugin_torch.model_loading import load_changed_model, load_model

CPU = torch.device("cpu")


@pytest.fixture
def weights_folder(model_folder, tmp_path):
    """A folder with a config and weights."""
    load_model(ModelConfig(path=model_folder()), CPU, torch.float32).save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def load(path, dtype=torch.float32, **model):
    return load_model(ModelConfig(path=str(path), **model), CPU, dtype)


def test_a_config_alone_is_a_random_model_from_its_seed(model_folder):
    state = torch.get_rng_state()
    one = load(model_folder(), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    same, other = load(model_folder(), seed=3), load(model_folder(), seed=4)
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    half = load(model_folder(), dtype=torch.bfloat16, seed=3)
    assert torch.equal(one.lm_head.weight.bfloat16(), half.lm_head.weight)
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_are_loaded_in_the_asked_type(weights_folder):
    found = load(weights_folder, dtype=torch.bfloat16)
    saved = load_file(weights_folder / "model.safetensors")
    assert torch.equal(found.model.norm.weight, saved["model.norm.weight"].bfloat16())
    assert found.config._attn_implementation == "varlen"


def test_overrides_reach_the_config(model_folder):
    found = load(model_folder(), override={"num_hidden_layers": 1, "rope_theta": 5e5})
    assert len(found.model.layers) == 1
    assert found.config.rope_parameters["rope_theta"] == 5e5
    nested = load(model_folder(), override={"rope_parameters": {"rope_theta": 7e5}})
    assert nested.config.rope_parameters == {"rope_type": "default", "rope_theta": 7e5}


def with_scales(module):
    for layer in module.model.layers:
        layer.scale = torch.nn.Parameter(torch.rand(3))


@pytest.mark.parametrize("parts", ["10GB", "20KB"])
def test_a_changed_model_is_built_from_the_ordinary_one_and_from_its_own_export(
    weights_folder, tmp_path, parts
):
    model = ModelConfig(path=str(weights_folder), seed=3)
    state = torch.get_rng_state()
    built = load_changed_model(model, with_scales)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(built.model.norm.weight, load(weights_folder).model.norm.weight)
    assert torch.equal(
        built.model.layers[0].scale, load_changed_model(model, with_scales).model.layers[0].scale
    )
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(torch.rand_like(weight))
    built.save_pretrained(tmp_path / "export", max_shard_size=parts)
    assert len(list((tmp_path / "export").glob("*.safetensors"))) == 1 or parts == "20KB"
    again = load_changed_model(ModelConfig(path=str(tmp_path / "export")), with_scales, dtype=torch.bfloat16)
    assert own_weights(again).keys() == own_weights(built).keys()
    for name, weight in own_weights(again).items():
        assert torch.equal(weight, own_weights(built)[name].bfloat16())


@pytest.mark.parametrize("wider", [False, True])
def test_a_module_that_replaces_another_has_the_weights_of_its_names(weights_folder, tmp_path, wider):
    def with_other_norm(module):
        size = module.config.hidden_size
        module.model.norm = torch.nn.LayerNorm(size, bias=False)
        if wider:
            module.lm_head = torch.nn.Linear(size, 3 * module.config.vocab_size, bias=False)

    with torch.no_grad():
        plain = load(weights_folder)
        plain.model.norm.weight.add_(0.5)
        plain.save_pretrained(weights_folder)
    built = load_changed_model(ModelConfig(path=str(weights_folder)), with_other_norm)
    assert torch.equal(built.model.norm.weight, plain.model.norm.weight)
    with torch.no_grad():
        built.model.norm.weight.add_(1.0)
    save_file(
        {name: w.detach() for name, w in own_weights(built).items()}, weights_folder / "model.safetensors"
    )
    again = load_changed_model(ModelConfig(path=str(weights_folder)), with_other_norm)
    assert torch.equal(again.model.norm.weight, built.model.norm.weight)
    assert torch.equal(again.lm_head.weight, built.lm_head.weight)


class Wrapped(torch.nn.Module):
    """A critic: a new module around a part of the ordinary model, with other names."""

    def __init__(self, model):
        super().__init__()
        self.base, self.head = model.model, torch.nn.Linear(model.config.hidden_size, 1)


def test_a_module_around_the_ordinary_model_is_built_from_its_own_export_too(weights_folder, tmp_path):
    built = load_changed_model(ModelConfig(path=str(weights_folder), seed=3), Wrapped)
    assert torch.equal(built.base.embed_tokens.weight, load(weights_folder).model.embed_tokens.weight)
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(torch.rand_like(weight))
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text((weights_folder / "config.json").read_text())
    save_file(
        {name: w.detach().clone() for name, w in own_weights(built).items()}, folder / "model.safetensors"
    )
    again = load_changed_model(ModelConfig(path=str(folder), seed=4), Wrapped)
    assert type(again) is Wrapped
    for name, weight in own_weights(again).items():
        assert torch.equal(weight, own_weights(built)[name]), name


def test_a_second_change_begins_from_the_ordinary_model_or_from_what_was_exported_of_either(
    weights_folder, tmp_path
):
    def folder_of(built, name):
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text((weights_folder / "config.json").read_text())
        weights = {key: weight.detach().clone() for key, weight in own_weights(built).items()}
        save_file(weights, made / "model.safetensors")
        return ModelConfig(path=str(made), seed=4)

    ordinary = ModelConfig(path=str(weights_folder), seed=3)
    actor = load_changed_model(ordinary, with_scales)
    with torch.no_grad():
        for weight in actor.parameters():
            weight.add_(torch.rand_like(weight))
    critic = load_changed_model(folder_of(actor, "actor"), with_scales, Wrapped)
    assert torch.equal(critic.base.layers[1].scale, actor.model.layers[1].scale)
    assert torch.equal(critic.base.norm.weight, actor.model.norm.weight)
    again = load_changed_model(folder_of(critic, "critic"), with_scales, Wrapped)
    for name, weight in own_weights(again).items():
        assert torch.equal(weight, own_weights(critic)[name]), name
    fresh = load_changed_model(ordinary, with_scales, Wrapped)
    assert torch.equal(fresh.base.norm.weight, load(weights_folder).model.norm.weight)


def test_weights_that_fit_neither_the_ordinary_nor_the_changed_model_are_named(weights_folder, tmp_path):
    built = load_changed_model(ModelConfig(path=str(weights_folder)), with_scales)
    saved = {name: weight.detach().clone() for name, weight in own_weights(built).items()}
    saved["model.layers.1.other"] = saved.pop("model.layers.1.scale")
    save_file(saved, weights_folder / "model.safetensors")
    with pytest.raises(
        DataError, match=r"not in the folder: model.layers.1.scale; not in the model: model.layers.1.other"
    ):
        load_changed_model(ModelConfig(path=str(weights_folder)), with_scales)


def test_an_unknown_override_is_named(model_folder):
    with pytest.raises(
        ConfigError, match=r"Unknown key in model.override: 'hiden_size'. Did you mean 'hidden_size'\?"
    ):
        load(model_folder(), override={"hiden_size": 3})
    with pytest.raises(ConfigError, match=r"Unknown key in model.override.rope_parameters: 'rope_teta'"):
        load(model_folder(), override={"rope_parameters": {"rope_teta": 3}})


def test_an_override_of_the_wrong_type_is_refused(model_folder):
    with pytest.raises(
        ConfigError, match=r"model.override is refused by Qwen3Config: .*hidden_size.*expected int"
    ):
        load(model_folder(), override={"hidden_size": "big"})


def test_weights_that_do_not_fit_are_named(weights_folder):
    file = weights_folder / "model.safetensors"
    weights = load_file(file)
    weights["model.extra.weight"] = weights.pop("model.norm.weight")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        DataError,
        match=r"not in the folder: model.norm.weight; not in the model: model.extra.weight. Is model.override",
    ):
        load(weights_folder)


def test_weights_of_another_shape_are_named(weights_folder):
    with pytest.raises(DataError, match=r"do not fit Qwen3ForCausalLM: of another shape: .*mlp.*and \d more"):
        load(weights_folder, override={"intermediate_size": 40})


@pytest.mark.parametrize("kept", [0.5, 0.01, 0.0])
def test_weights_that_are_cut_are_named(weights_folder, kept):
    file = weights_folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(
        ConfigError, match=rf"model\.path: {file} is no whole safetensors file .* Take another"
    ):
        load(weights_folder)


@pytest.mark.parametrize("text", ["[]", "null", '{"model_type": "qwen3", "hidden_size": "many"}'])
def test_a_config_that_is_none_is_named(model_folder, text):
    folder = Path(model_folder())
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.path '{folder}' has a config that fails: ") as error:
        load(folder)
    assert ("hidden_size" in text) == ("expected int, got str" in str(error.value))


def test_pickled_weights_are_not_opened(model_folder):
    folder = model_folder()
    torch.save({}, f"{folder}/pytest.bin")
    with pytest.raises(
        ConfigError,
        match=r"as a pickle \(pytest.bin\) only, which is not opened. Convert them to safetensors",
    ):
        load(folder)


def test_a_path_that_leads_nowhere_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path is empty. Give a folder"):
        load("")
    with pytest.raises(
        ConfigError, match=r"model.path '.*/nowhere' is not a folder. Expected one with a config.json"
    ):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model.path '.*' (cannot be read|has a config that fails)"):
        load(tmp_path)


@pytest.fixture
def folder_with_code(tmp_path):
    """A model folder that brings its own Python."""
    folder = tmp_path / "with_code"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "mine_own", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"},'
        ' "vocab_size": 97, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,'
        ' "num_attention_heads": 1, "num_key_value_heads": 1}'
    )
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Mine(LlamaConfig):\n    model_type = 'mine_own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Mine\n"
    )
    return folder


def test_code_of_a_folder_runs_only_when_asked_and_is_logged(folder_with_code, caplog):
    with pytest.raises(
        ConfigError,
        match=r"needs custom Python code. Read that code, then set model.trust_remote_code = true",
    ):
        load(folder_with_code)
    with caplog.at_level(logging.WARNING, "engine"):
        found = load(folder_with_code, trust_remote_code=True)
    assert "Python code of" in caplog.text
    assert type(found).__name__ == "Model"


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'nobody/nothing' cannot be read: .*give a local folder in"):
        load("nobody/nothing")
