"""What `engine plugins` and `engine doctor` say, without megatron-core being imported."""

import subprocess
import sys

import pytest
import torch

TELLS = """
import sys
from engine_core.errors import EnvironmentProblem
from engine_core.plugins.plugin_set import PluginSet
from engine_core.specs import resolve
plugins = PluginSet.load({"train_engines": ["megatron"]})
plugins.resolve("train_engines", "megatron")
try:
    print(resolve(plugins.spec("train_engines", "megatron").health)())
except EnvironmentProblem as problem:
    print(problem)
assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_health_tells_what_is_missing_and_imports_nothing_of_megatron():
    done = subprocess.run(
        [sys.executable, "-c", TELLS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("megatron-core 0.16.")
    assert "without Transformer Engine and apex" in done.stdout
    assert "there is no CUDA device" in done.stdout
