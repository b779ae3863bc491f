"""Every distribution as a wheel, in a fresh environment without the source tree.

The new environment sees the installed third-party packages of this one through a path file, since
fetching torch again would prove nothing about us; of ours it has only the wheels.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = [ROOT, *sorted(p.parent for p in ROOT.glob("plugins/[a-z]*/pyproject.toml"))]


def run(*command, cwd, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ENGINE"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Folder with a wheel of each distribution."""
    return build(tmp_path_factory.mktemp("wheels"), DISTRIBUTIONS)


def build(folder, distributions):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
    done = run(*command, *distributions, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def environment(folder, wheels, without=()):
    """A virtual environment in ``folder``: our wheels, and this environment's third-party packages but the entries ``without``."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", *wheels]
    done = run(sys.executable, *install, cwd=folder)
    assert done.returncode == 0, done.stderr
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).stdout.strip())
    others = folder / "others"  # everything installed here but our own editable installs
    others.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        ours = entry.name.startswith(("engine_", "__editable__", "_engine")) or entry.suffix == ".pth"
        if not ours and entry.name not in without:
            (others / entry.name).symlink_to(entry)
    (site / "others.pth").write_text(f"{others}\n")
    return folder


@pytest.fixture(scope="module")
def fresh(wheels, tmp_path_factory):
    """Folder of a virtual environment that holds our wheels and this environment's third-party packages."""
    return environment(tmp_path_factory.mktemp("venv"), wheels.glob("*.whl"))


def test_every_wheel_is_typed_and_names_its_licence(wheels):
    assert len(list(wheels.glob("*.whl"))) == len(DISTRIBUTIONS) >= 3
    for wheel in wheels.glob("*.whl"):
        names = zipfile.ZipFile(wheel).namelist()
        metadata = (
            zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        )
        assert "License-Expression: Apache-2.0" in metadata, wheel.name
        assert any(name.endswith("py.typed") for name in names), wheel.name


@pytest.mark.slow
def test_plugins_are_found_and_healthy(fresh):
    done = run(fresh / "bin" / "engine", "plugins", "--check", "--json", cwd=fresh)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    listed = found["plugins"] if isinstance(found, dict) else found
    names = {(entry["kind"], entry["name"]) for entry in listed}
    assert {("train_engines", "torch"), ("rollout_engines", "hf"), ("rewards", "numeric")} <= names
    assert all(entry["healthy"] for entry in listed), [entry for entry in listed if not entry["healthy"]]


def test_a_run_is_validated_and_trained(fresh, world, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
[model]
path = "{world / "model"}"
[rollout]
group_size = 4
max_response_tokens = 8
[[reward]]
name = "numeric"
[data]
train = "{world / "data" / "train.jsonl"}"
prompts_per_step = 4
[run]
steps = 2
name = "wheels"
"""
    )
    engine = fresh / "bin" / "engine"
    checked = run(engine, "validate", file, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    trained = run(engine, "train", file, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert trained.returncode == 0, trained.stderr
    assert len((tmp_path / "runs" / "wheels" / "metrics.jsonl").read_text().splitlines()) == 2
    where = run(
        fresh / "bin" / "python", "-c", "import engine_core; print(engine_core.__file__)", cwd=tmp_path
    )
    assert str(fresh) in where.stdout


ALONE = {
    "deepspeed": ("deepspeed", "deepspeed", "deepspeed {}, ZeRO 0 to 3"),
    "megatron": ("megatron", "megatron-core", "megatron-core {}; without Transformer Engine and apex"),
}
"""Of a plugin: the package that it imports, its distribution, what its health begins with."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALONE)
def test_a_plugin_alone_beside_the_core_is_told_without_its_library_being_imported(tmp_path, name):
    """First with a library that fails when it is imported, then with none."""
    package, library, begins = ALONE[name]
    (tmp_path / "wheels").mkdir()
    plugins = [ROOT / "plugins" / plugin for plugin in ("torch", "tools", name)]
    ours = build(tmp_path / "wheels", [ROOT, *plugins]).glob("*.whl")
    metadata = f"{library.replace('-', '_')}-{importlib.metadata.version(library)}.dist-info"
    folder = environment(tmp_path / "venv", ours, without=[package, metadata])
    broken = folder / "others" / package
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('The library was imported')\n")
    (folder / "others" / metadata).symlink_to(Path(torch.__file__).parents[1] / metadata)
    engine = folder / "bin" / "engine"

    def told(*command):
        done = run(engine, *command, cwd=tmp_path)
        assert "The library was imported" not in done.stdout + done.stderr
        return done.stdout

    listed = json.loads(told("plugins", "--check", "--json"))
    entries = {entry["name"]: entry for entry in listed}
    distributions = {"engine-core-rl", *(f"engine-plugin-{plugin}" for plugin in ("torch", "tools", name))}
    assert {e["distribution"] for e in listed} == distributions
    assert entries[name]["healthy"]
    assert begins.format(importlib.metadata.version(library)) in entries[name]["health"]
    (folder / "others" / metadata).unlink()
    missing = f"{library} is not installed. Try: pip install engine-plugin-{name}"
    assert f"warning: {missing}" in told("plugins", "--check")
