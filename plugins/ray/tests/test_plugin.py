"""The parts of this plugin that the engine reads before Ray is needed."""

import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine_core.cli.main import main
from engine_core.config.assemble import load_config
from engine_core.config.completeness import check_complete
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_ray.plugin import RayOptions


def test_the_runtime_is_found_by_its_name():
    runtime = PluginSet.load({"runtimes": {"ray"}}).resolve("runtimes", "ray")
    assert runtime.__name__ == "RayRuntime"


@pytest.mark.parametrize(
    ("key", "value"),
    [("cpus_per_process", 0), ("strategy", {"train": "near"}), ("adress", "x:1")],
)
def test_options_are_checked(key, value):
    with pytest.raises(ValidationError, match=key):
        RayOptions(**{key: value})


def test_importing_the_plugin_loads_neither_torch_nor_ray():
    code = "import engine_plugin_ray.plugin, sys; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


POOLS = """[placement]
pools = { train = 1, serve = 2 }
actor = "train"
rollout = "serve"
"""
RUN = """[model]
path = "model"
[data]
train = "rows.jsonl"
[[reward]]
name = "exact_match"
[runtime]
backend = "ray"
"""


@pytest.fixture
def problems(tmp_path):
    """Return ``problems(table, placement)``: why a run file is refused before anything is started."""

    def found(table, placement=POOLS):
        path = tmp_path / "run.toml"
        path.write_text(f"{RUN}[runtime.ray]\n{table}\n{placement}")
        try:
            check_complete(load_config(path))
        except ConfigError as error:
            return [re.split(r"run.toml:\d+: ", text)[1] for text in error.problems]
        return []

    return found


def test_pools_that_the_run_has_not_are_named_all_at_once_with_the_nearest(problems):
    assert problems('strategy = { trian = "pack", server = "spread" }') == [
        "runtime.ray.strategy: 'server' is no pool of this run. Did you mean 'serve'? Known: serve, train.",
        "runtime.ray.strategy: 'trian' is no pool of this run. Did you mean 'train'? Known: serve, train.",
    ]
    assert problems('strategy = { train = "pack", serve = "spread" }') == []


def test_a_run_without_pools_has_the_one_of_all_roles(problems):
    assert problems('strategy = { all = "pack" }', "") == []
    (text,) = problems('strategy = { train = "pack" }', "")
    assert text == "runtime.ray.strategy: 'train' is no pool of this run. Known: all."


def test_validate_refuses_them_as_train_does(problems, tmp_path, capsys):
    assert problems('strategy = { trian = "pack" }')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert [main([command, str(tmp_path / "run.toml")]) for command in ("validate", "train")] == [2, 2]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("engine: ")]
    assert len(said) == 2
    assert said[0] == said[1]
    assert "runtime.ray.strategy: 'trian' is no pool of this run" in said[0]
