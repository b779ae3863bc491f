"""What the engine learns of this plugin before torch is needed."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_hf_rollout.plugin import HFOptions


def test_the_backend_is_found_by_its_name_and_keeps_what_it_claims():
    engine = PluginSet.load({"rollout_engines": {"hf"}}).resolve("rollout_engines", "hf")
    assert engine.__name__ == "HFRolloutEngine"


@pytest.mark.parametrize(("key", "value"), [("batch_size", 0), ("dtype", "fp16"), ("batchsize", 3)])
def test_options_are_checked(key, value):
    with pytest.raises(ValidationError, match=key):
        HFOptions(**{key: value})


def test_importing_the_plugin_loads_no_torch():
    code = (
        "import engine_plugin_hf_rollout.plugin, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
