"""A rollout plugin that only another environment has: asked for its table, refused in words, run there."""

import json
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import engine_core
import engine_plugin_processes
from engine_core.config.assemble import load_config, plugins_for, portable, rebuild
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError, PluginError
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes import foreign_interpreter
from engine_plugin_processes.sampler_process.engine import SamplerEngine

COUNTING = Path(__file__).parent / "counting_plugin.py"
TABLE = '''
from typing import Annotated, Literal
from pydantic import Field, field_validator

class FarOptions(Options):
    starts: str = ""
    fail: str = ""
    length: Annotated[int, Field(gt=0)] = 2
    """Tokens of an answer."""
    mode: Literal["fast", "slow"] = "fast"

    @property
    def other_policy(self):
        return "rollout.far.mode" if self.mode == "slow" else ""

    @field_validator("fail")
    @classmethod
    def _known(cls, value):
        if value == "always":
            raise ValueError("an engine that always fails is of no use")
        return value


class Far(Counting):
    def share_module(self, engine):
        raise AssertionError("no module reaches this process")


@hookimpl
def engine_rollout_engines():
    capabilities = frozenset({"share_module"})
    families = {"llama": "", "gemma": "no such kernel"}
    return {"far": RolloutBackend(load=Far, config=FarOptions, capabilities=capabilities, families=families)}
'''


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The interpreter of an environment that has this one's packages and, alone, a plugin ``far``."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    here = [entry for entry in sys.path if entry and Path(entry).is_dir()]
    here.append(str(Path(engine_core.__file__).parents[1]))  # an editable core need not be on the path
    (site / "here.pth").write_text("\n".join(here) + "\n")
    code = COUNTING.read_text().partition("@hookimpl")[0] + TABLE
    (site / "engine_plugin_far.py").write_text(code)
    info = site / "engine_plugin_far-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-plugin-far\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[engine.rollout_engines]\nfar = engine_plugin_far\n")
    return folder / "env" / "bin" / "python"


@pytest.fixture
def run_file(tmp_path, elsewhere):
    """Writes a run file whose sampler is ``far``, with more lines in ``[rollout.far]``."""

    def write(table="", python=elsewhere, more=""):
        path = tmp_path / "run.toml"
        path.write_text(
            f'trainer = "rl"\n{more}[model]\npath = "m"\n[rollout]\nbackend = "far"\n[rollout.process]\n'
            f'python = "{python}"\n[rollout.far]\n{table}\n[data]\ntrain = "t.jsonl"\n'
        )
        return path

    return write


def test_that_a_table_makes_another_policy_is_told_from_there(run_file):
    assert load_config(run_file('mode = "slow"')).rollout.options.other_policy == "rollout.far.mode"


def test_the_other_environment_judges_the_table_and_the_run_samples_there(run_file, elsewhere, tmp_path):
    config = load_config(run_file(f'length = 3\nstarts = "{tmp_path / "starts"}"'))
    assert config.rollout.options.length == 3
    assert config.rollout.options.mode == "fast"  # a default of the plugin
    assert config.rollout.options.other_policy == ""
    assert plugins_for(config).versions()["engine-plugin-far"] == "3.1"
    again, plugins = rebuild(json.loads(json.dumps(portable(config))))  # as a worker of torchrun
    assert again == config
    spec = plugins.spec("rollout_engines", "far")
    assert "share_module" not in spec.capabilities
    assert spec.families == {"llama": "", "gemma": "no such kernel"}
    context = WorkerContext(plugins=plugins, role="rollout", device=torch.device("cpu"))
    engine = SamplerEngine(again.rollout, again.model, context).build(again.rollout)
    try:
        (found,) = engine.generate([Request("r", Prompt("p", [3, 4], ""), Sampling())])
    finally:
        engine.close()
    assert found.token_ids.tolist() == [3, 4, 7, 7, 7]
    assert "engine_plugin_far" not in sys.modules


def test_what_it_finds_wrong_is_told_with_line_key_and_the_nearest_name(run_file):
    path = run_file('lenght = 3\nmode = "quick"\nlength = 0\nfail = "always"')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = "\n".join(caught.value.problems)
    assert "run.toml:9: rollout.far.lenght: unknown key. Did you mean 'length'?" in text
    assert "run.toml:10: rollout.far.mode: got 'quick', expected 'fast' or 'slow'." in text
    assert "run.toml:11: rollout.far.length: got 0, expected greater than 0." in text
    assert "run.toml:12: rollout.far.fail: got 'always': an engine that always fails is of no use" in text


def test_environments_that_cannot_be_are_refused_with_key_and_way_out(run_file, tmp_path):
    with pytest.raises(
        PluginError,
        match=r"rollout\.process\.python: .*/nobody does not start: No such file .* python -m venv",
    ):
        load_config(run_file(python=tmp_path / "nobody"))
    with pytest.raises(
        PluginError, match=rf"rollout\.backend: rollout\.process\.python: {sys.executable}: .*'far'"
    ):
        load_config(run_file(python=sys.executable))


@pytest.mark.parametrize(("package", "distribution"), foreign_interpreter.PACKAGES.items())
def test_an_environment_without_the_core_or_this_distribution_is_told_how_to_get_both(
    run_file, interpreter_without, package, distribution
):
    python = interpreter_without(package)
    with pytest.raises(PluginError) as error:
        load_config(run_file(python=python))
    installed = foreign_interpreter.versions()
    assert (
        f"rollout.process.python: {python} has no {distribution} {installed[distribution]}. Install it"
        in str(error.value)
    )
    assert str(error.value).endswith(
        f"there, and the rollout plugin: {python} -m pip install engine-core-rl=={installed['engine-core-rl']} "
        f"engine-plugin-processes=={installed['engine-plugin-processes']}"
    )


@pytest.mark.parametrize(
    "package", [engine_core, engine_plugin_processes], ids=lambda package: package.__name__
)
def test_an_environment_with_another_version_is_refused_with_both(run_file, monkeypatch, package):
    distribution = foreign_interpreter.PACKAGES[package.__name__]
    theirs = package.__version__
    monkeypatch.setattr(package, "__version__", "9.9.9")
    foreign_interpreter.ask.cache_clear()
    try:
        with pytest.raises(PluginError) as error:
            load_config(run_file())
    finally:
        foreign_interpreter.ask.cache_clear()
    assert f"has {distribution} {theirs}, and the trainer has 9.9.9. Both must be the same: " in str(
        error.value
    )
    assert f"-m pip install engine-core-rl=={engine_core.__version__} engine-plugin-processes==" in str(
        error.value
    )


def test_the_version_is_that_of_the_distribution():
    assert engine_plugin_processes.__version__ == version("engine-plugin-processes")


@pytest.mark.slow
def test_a_plugin_of_the_run_that_the_sampler_does_without_may_be_absent_there(run_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from engine_core import hookimpl\nimport engine_plugin_far\n"
    )  # fails here: told; there it loads
    with pytest.raises(PluginError, match=r"Plugin file 'mine\.py' is broken"):
        load_config(run_file(more='plugins = ["mine.py"]\n'))
    (tmp_path / "mine.py").write_text(
        "import sys\nif 'elsewhere' in sys.prefix:\n    raise ImportError('not there')\n"
    )
    assert load_config(run_file(more='plugins = ["mine.py"]\n')).rollout.options.length == 2


def test_a_plugin_that_builds_the_samplers_model_must_be_there(run_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom engine_core import hookimpl\n"
        "if 'elsewhere' in sys.prefix:\n    raise ImportError('not there')\n"
        "@hookimpl\ndef engine_build_model(role):\n    pass\n"
    )
    with pytest.raises(
        PluginError, match=r"rollout\.process\.python: .*Plugin file 'mine\.py' is broken.*not there"
    ):
        load_config(run_file(more='plugins = ["mine.py"]\n'))
