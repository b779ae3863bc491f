"""The parts of this plugin that the engine reads before Ray is needed."""

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
    [("cpus_per_process", 0), ("strategy", {"train": "near"}), ("object_store_mib", 1), ("adress", "x:1")],
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
            return [text.partition("run.toml: ")[2] for text in error.problems]
        return []

    return found


def test_pools_that_the_run_has_not_are_named_all_at_once_with_the_nearest(problems):
    assert problems('strategy = { trian = "pack" }\npython = { server = "/opt/python" }') == [
        "runtime.ray.strategy: 'trian' is no pool of this run. Did you mean 'train'? Known: serve, train.",
        "runtime.ray.python: 'server' is no pool of this run. Did you mean 'serve'? Known: serve, train.",
    ]
    assert (
        problems('strategy = { train = "pack", serve = "spread" }\npython = { serve = "/opt/python" }') == []
    )


def test_a_run_without_pools_has_the_one_of_all_roles(problems):
    assert problems('strategy = { all = "pack" }', "") == []
    (text,) = problems('strategy = { train = "pack" }', "")
    assert text == "runtime.ray.strategy: 'train' is no pool of this run. Known: all."


@pytest.mark.parametrize(
    ("placement", "pool", "key"),
    [(POOLS, "serve", "placement.pools.serve"), ("", "all", "runtime.ray.processes")],
)
def test_a_cluster_of_the_runs_own_is_one_node(problems, placement, pool, key):
    table = f'processes = {3 if placement else 2}\nstrategy = {{ {pool} = "strict_spread" }}'
    (text,) = problems(table, placement)
    assert text == (
        f"runtime.ray.strategy.{pool} = 'strict_spread': 2 processes on as many nodes, and a cluster of the run's own is "
        f"this machine alone. Set it to 'spread', name a cluster in runtime.ray.address, or lower {key}."
    )
    assert problems(f'address = "10.0.0.1:6379"\n{table}', placement) == []  # which may have more nodes


def test_one_process_is_spread_and_a_number_that_the_machine_decides_is_not_guessed(problems):
    assert problems('strategy = { train = "strict_spread" }') == []
    assert problems('strategy = { all = "strict_spread" }', "") == []


def test_validate_refuses_them_as_train_does(problems, tmp_path, capsys):
    assert problems('strategy = { trian = "pack" }')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert [main([command, str(tmp_path / "run.toml")]) for command in ("validate", "train")] == [2, 2]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0] == said[1]
    assert "runtime.ray.strategy: 'trian' is no pool of this run" in said[0]
