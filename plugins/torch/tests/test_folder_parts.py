"""Folders that each rank reads a part of: what they must be, and that all ranks read one model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core.config import ModelConfig
from engine_core.contracts.weight_names import own_weights
from engine_core.errors import ConfigError, DataError
from engine_plugin_torch.folder_parts import FolderParts, check_folder, read_together, weight_files
from engine_plugin_torch.skeleton import blank_model

KEY, INSTEAD = "actor.some.loading", "Read it whole."


@pytest.fixture
def written(model_folder, tmp_path):
    """A folder with a model, and its weights by name."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("llama")))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", {name: tensor.detach() for name, tensor in own_weights(model).items()}


def opened(folder, role="actor"):
    model = ModelConfig(path=str(folder), attention="eager")
    blank = blank_model(model, role, torch.float32)
    shapes = {name: list(tensor.shape) for name, tensor in own_weights(blank).items()}
    return FolderParts.of(blank, model, shapes, role, KEY, INSTEAD)


def test_what_cannot_be_read_by_parts_is_refused_before_a_model_is_built(written, tmp_path):
    check_folder(str(written[0]), "actor", False, KEY, INSTEAD)
    with pytest.raises(
        ConfigError, match=r"actor\.some\.loading = 'sharded' cannot be combined with .*Read it whole"
    ):
        check_folder(str(written[0]), "actor", True, KEY, INSTEAD)
    with pytest.raises(ConfigError, match=r"is no folder with safetensors on this machine. Read it whole"):
        check_folder(str(tmp_path), "actor", False, KEY, INSTEAD)


def test_a_part_is_that_of_the_whole_and_its_bytes_are_counted(written):
    folder, weights = written
    parts, name = opened(folder), "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(parts.read(name, (slice(3, 7), slice(0, 32))), weights[name][3:7])
    assert parts.bytes == 4 * 32 * 4


def test_a_fresh_value_head_is_one_on_all_ranks(written):
    first, second = opened(written[0], "critic"), opened(written[0], "critic")
    whole = first.read("score.weight", (slice(0, 1), slice(0, 32)))
    torch.manual_seed(123)
    assert torch.equal(second.read("score.weight", (slice(0, 1), slice(8, 16))), whole[:, 8:16])
    assert first.bytes == 0


def test_a_folder_of_another_model_is_refused(written):
    folder, weights = written
    name = "model.norm.weight"
    save_file({n: t for n, t in weights.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"has no weight 'model\.norm\.weight' of LlamaForCausalLM"):
        opened(folder)
    save_file({**weights, "other.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"Unknown weight 'other\.weight' for LlamaForCausalLM"):
        opened(folder)
    save_file({**weights, name: torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"'model\.norm\.weight' has shape \[3\] in .*; expected \[32\]"):
        opened(folder)


def test_a_fingerprint_tells_two_models_of_one_config_apart(written):
    folder, weights = written
    before = opened(folder).fingerprint()
    assert opened(folder).fingerprint() == before
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors")
    assert opened(folder).fingerprint() != before


def test_files_are_those_of_the_index_and_of_this_folder(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for name in ("a.safetensors", "unused.safetensors"):
        (tmp_path / name).touch()
    index.write_text(json.dumps({"weight_map": {"w": "../elsewhere/a.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors"]
    index.write_text(json.dumps({"weight_map": {"w": "b.safetensors"}}))
    with pytest.raises(DataError, match=r"lacks b\.safetensors, which its index names"):
        weight_files(tmp_path)
    index.write_text("[]")
    with pytest.raises(DataError, match="is no index of weights"):
        weight_files(tmp_path)


class Ranks:
    """Two ranks, of which the other says what a test gives it."""

    def __init__(self, error=None, text=None):
        self.error, self.text = error, text

    def share(self, error, what, kind):
        if error is not None:
            raise error
        if self.error is not None:
            raise kind(f"{what} failed on rank 1: {self.error}")

    def texts(self, mine):
        return [mine, mine if self.text is None else self.text]


def test_ranks_that_read_one_model_go_on(written):
    parts = opened(written[0])
    read_together(lambda: parts, "model", "actor", Ranks())


def test_ranks_that_read_two_models_are_told_which(written):
    parts = opened(written[0])
    with pytest.raises(
        DataError, match=r"holds other weights on the machine of rank 1 .* would be a mixture"
    ):
        read_together(lambda: parts, "model", "actor", Ranks(text="another"))


def test_a_rank_that_cannot_read_is_told_to_the_others(written):
    parts = opened(written[0])
    with pytest.raises(DataError, match="Reading parts of 'model' failed on rank 1: no file"):
        read_together(lambda: parts, "model", "actor", Ranks(error="no file"))

    def fails():
        raise DataError("mine")

    with pytest.raises(DataError, match=r"^mine$"):
        read_together(fails, "model", "actor", Ranks())
