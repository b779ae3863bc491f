"""What the engine learns of this plugin before Ray is needed."""

import subprocess
import sys

import pytest
from engine_plugin_ray.plugin import RayOptions
from pydantic import ValidationError

from engine_core.plugins import PluginSet


def test_the_runtime_is_found_by_its_name():
    runtime = PluginSet.load({"runtimes": {"ray"}}).resolve("runtimes", "ray")
    assert runtime.__name__ == "RayRuntime"


@pytest.mark.parametrize(
    ("key", "value"),
    [("cpus_per_process", 0), ("strategy", {"train": "near"}), ("object_store_mib", 1), ("adress", "x:1")],
)
def test_options_are_checked(key, value):
    with pytest.raises(ValidationError, match=key):
        RayOptions(**{key: value})


def test_importing_the_plugin_loads_neither_torch_nor_ray():
    code = "import engine_plugin_ray.plugin, sys; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
