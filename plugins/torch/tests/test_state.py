"""Files of training state that are not engine state: see test_torch_engine_steps.py for save and load."""

import json

import pytest
import torch

from engine_core.errors import DataError
from engine_core.runs.state_files import save_tensors
from engine_plugin_torch.state import check_members, copy_config, named_group


def test_an_exported_model_without_a_config_of_its_own_has_the_one_it_was_built_from(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "width": 8, "depth": 2}')
    copy_config(str(tmp_path / "model"), {"depth": 3}, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"model_type": "llama", "width": 8, "depth": 3}


@pytest.mark.parametrize("source", ["", "nowhere"])
def test_an_export_that_cannot_be_a_model_path_is_told(tmp_path, source, caplog):
    copy_config(source and str(tmp_path / source), {}, tmp_path)
    assert "has weights and no config.json" in caplog.text


def test_a_file_that_cannot_be_written_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(OSError, match=r"weights\.safetensors"):
        save_tensors(tmp_path / "absent" / "weights.safetensors", {"w": torch.zeros(1)})


def test_a_group_is_saved_with_its_settings_and_names():
    group = {"params": [torch.zeros(1)], "lr": 0.1, "betas": (0.9, 0.95)}
    assert named_group(group, ("w",)) == {"params": ["w"], "lr": 0.1, "betas": (0.9, 0.95)}


def test_an_optimizer_over_other_parameters_or_other_groups_is_refused():
    check_members([["a", "b"], []], [("a", "b"), ()])
    with pytest.raises(DataError, match=r"over other parameters than this one's: b, c\."):
        check_members([["a", "b"]], [["a", "c"]])
    with pytest.raises(DataError, match=r"the groups differ\."):
        check_members([["a"], ["b"]], [["a", "b"]])
