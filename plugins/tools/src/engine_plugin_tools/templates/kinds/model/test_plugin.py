"""The contracts that every train engine keeps, with this model: the page 'Contracts of the conformance kit'."""

import json

import torch
from safetensors.torch import save_file

from engine_plugin_template.model import SIZES, TemplateName, build
from engine_plugin_testing import TrainEngineSuite


def write(folder, model, seed, tied):
    """Write the folder of a small model; ``write_model`` of the suite."""
    torch.manual_seed(seed)
    folder.mkdir()
    sizes = {key: model[key] for key in SIZES}
    save_file(TemplateName(**sizes).state_dict(), folder / "model.safetensors")
    limit = {"max_position_embeddings": model["max_position_embeddings"]}  # read by a sampler
    (folder / "config.json").write_text(json.dumps(sizes | limit))


def load(folder):
    """Return the model of a folder in float64, to compare with; ``reference`` of the suite."""
    return build(folder, {}, 0).double()


def load_critic(folder):
    """Return the critic of a folder in float64; ``value_reference`` of the suite."""
    return build(folder, {}, 0, values=True).double()


class TestTemplateName(TrainEngineSuite):
    backend = "torch"
    plugins = ["template_name"]
    write_model = "test_plugin.py:write"
    reference = "test_plugin.py:load"
    value_reference = "test_plugin.py:load_critic"
    roles = ("critic",)
    unsupported = {"test_export_is_loaded_by_from_pretrained": "transformers does not have this model"}
