import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from engine_core.config import EngineConfig
from engine_core.errors import ConfigError
from engine_plugin_testing import RewardSuite
from engine_plugin_testing.reference import write_model
from engine_plugin_tools.scaffold import KINDS, TEMPLATES, USES_TORCH, new_plugin, new_run

ROOT = Path(__file__).parents[3]


def pip(*arguments: str) -> None:
    quiet = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", *arguments, *quiet], check=True, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_new_plugin_installs_is_listed_loads_by_name_and_passes_its_own_tests(tmp_path):
    plugin = new_plugin("brief-answers", tmp_path)
    pip("install", "--target", str(tmp_path / "site"), str(plugin))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = (
        "from engine_plugin_tools.plugin_list import list_plugins;"
        "from engine_core.plugins.plugin_set import PluginSet;"
        "info, = [i for i in list_plugins() if i.name == 'brief_answers'];"
        "print(info.distribution, info.kind, info.healthy);"
        "print(PluginSet.load({'rewards': ['brief_answers']}).resolve('rewards', 'brief_answers')(['a b', 'a b c'], 2))"
    )

    used = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(plugin)],
        env=environment,
        cwd=plugin,
        capture_output=True,
        text=True,
    )

    assert used.stdout.splitlines() == ["engine-plugin-brief-answers rewards True", "[1.0, 0.0]"]
    assert tested.returncode == 0, tested.stdout
    assert f"{len(RewardSuite.contracts)} passed" in tested.stdout, tested.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reward"])
def test_a_new_plugin_of_each_kind_is_listed_validates_and_passes_its_own_tests(tmp_path, kind):
    plugin = new_plugin("brief", tmp_path, kind)
    pip("install", "--target", str(tmp_path / "site"), str(plugin))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def run(*words):
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    engine = str(Path(sys.executable).with_name("engine"))
    assert re.search(
        r"^brief .*engine-plugin-brief .* ok +\w", run(engine, "plugins", KINDS[kind][0]), re.MULTILINE
    )
    tested = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(plugin / "tests"))
    assert "passed" in tested
    assert kind in USES_TORCH or "skipped" not in tested  # contracts of capabilities that an engine lacks

    (table,) = re.findall(r"```toml\n(.*?)```", (plugin / "README.md").read_text(), re.DOTALL)
    (tmp_path / "own.toml").write_text(table)
    write_model(tmp_path / "model", {}, seed=0, tied=True)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    base = '[model]\npath = "model"\n[run]\nsteps = 1\n[[reward]]\nname = "exact_match"\n'
    (tmp_path / "base.toml").write_text(
        base + ("" if kind == "data-source" else '[data]\ntrain = "rows.jsonl"\n')
    )
    assert "base.toml, own.toml: valid" in run(engine, "validate", "base.toml", "own.toml")


@pytest.mark.parametrize("kind", KINDS)
def test_the_readme_names_every_file_of_the_package(tmp_path, kind):
    folder = new_plugin("brief", tmp_path, kind)
    readme = (folder / "README.md").read_text()
    for file in (folder / "src/engine_plugin_brief").glob("[a-z]*.py"):
        assert f"| `src/engine_plugin_brief/{file.name}` | " in readme


@pytest.mark.parametrize("kind", KINDS)
def test_the_entry_point_of_step_hooks_is_shown_once(tmp_path, kind):
    written = (new_plugin("brief", tmp_path, kind) / "pyproject.toml").read_text()
    assert written.count("engine.plugins") == 1 + (
        KINDS[kind][0] == "plugins"
    )  # a header, and the list of tables


def test_a_kind_that_cannot_be_made_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"--kind 'advantages' is unknown\. Did you mean 'advantage'\?"):
        new_plugin("brief", tmp_path, "advantages")
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_the_template_is_left_in_a_new_plugin(tmp_path):
    plugin = new_plugin("template_reward_x", tmp_path)  # a name that holds a word of the template

    files = sorted(str(file.relative_to(plugin)) for file in plugin.rglob("*") if file.is_file())
    text = "".join(file.read_text() for file in plugin.rglob("*") if file.is_file())

    assert files == [
        "README.md",
        "pyproject.toml",
        "src/engine_plugin_template_reward_x/__init__.py",
        "src/engine_plugin_template_reward_x/plugin.py",
        "tests/test_plugin.py",
    ]
    assert "def template_reward_x(completions" in text
    assert "class TestTemplateRewardX(RewardSuite):" in text
    assert not {
        word for word in ("engine-plugin-template\n", 'template_reward"', "TemplateOptions") if word in text
    }


@pytest.mark.parametrize(
    "name", ["", "Big", "1st", "a b", "../up", "class", "ends_", "x/y", "engine-plugin-"]
)
def test_a_name_that_cannot_be_one_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ConfigError, match="must be lower-case letters, digits, '_' or '-'"):
        new_plugin(name, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_the_beginning_that_every_plugin_has_is_not_doubled(tmp_path):
    plugin = new_plugin("engine-plugin-brief", tmp_path)

    assert plugin == tmp_path / "engine-plugin-brief"
    assert 'brief = "engine_plugin_brief.plugin"' in (plugin / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["len", "engine-rewards", "hookimpl"])
def test_a_name_that_the_module_needs_itself_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="must be another one"):
        new_plugin(name, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_an_existing_plugin_is_never_overwritten(tmp_path):
    file = new_plugin("mine", tmp_path) / "README.md"
    file.write_text("my notes")

    with pytest.raises(
        ConfigError, match=r"Not written, because it exists: .*README.md.* Choose another name or folder"
    ):
        new_plugin("mine", tmp_path)

    assert file.read_text() == "my notes"


def test_a_new_run_file_has_known_keys_only_and_its_data(tmp_path):
    file = new_run(tmp_path / "first")
    data = tomllib.loads(file.read_text())

    config = EngineConfig.model_validate(data)

    assert config.reward[0].name == "numeric"
    assert config.tracking.trackers == ["tensorboard"]
    rows = (file.parent / config.data.train).read_text().splitlines()
    assert len(rows) == config.data.prompts_per_step
    with pytest.raises(ConfigError, match=r"Not written, because it exists: .*run.toml"):
        new_run(tmp_path / "first")


def wheel_of(source: Path, folder: Path) -> set[str]:
    """Return the names of the files in the wheel of a source folder, which is built in ``folder``."""
    copy = folder / "source"  # pip leaves a build folder behind
    skipped = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    copy.mkdir()
    for part in ("engine_core", "src", "pyproject.toml", "README.md", "LICENSE"):
        if (source / part).is_dir():
            shutil.copytree(source / part, copy / part, ignore=skipped)
        elif (source / part).exists():
            shutil.copy(source / part, copy)
    pip("wheel", "--wheel-dir", str(folder), str(copy))
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_carries_the_templates_and_the_page_of_a_report(tmp_path):
    carried = wheel_of(ROOT / "plugins" / "tools", tmp_path)

    templates = {
        f"engine_plugin_tools/templates/{file.relative_to(TEMPLATES)}"
        for file in TEMPLATES.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert len(templates) >= 7
    page = {f"engine_plugin_tools/page/{name}" for name in ("page.css", "page.js", "uplot/LICENSE", "uplot/uPlot.min.css", "uplot/uPlot.iife.min.js")}  # fmt: skip
    assert templates | page | {"engine_plugin_tools/py.typed"} <= carried


def test_the_wheel_of_the_core_carries_the_install_hints(tmp_path):
    carried = wheel_of(ROOT, tmp_path)

    assert {"engine_core/plugins/known_plugins.json", "engine_core/py.typed"} <= carried
    assert not {name for name in carried if name.startswith(("plugins/", "engine_plugin_", "tests/"))}
