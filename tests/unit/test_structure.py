"""The rules that keep the project small and safe, held against its sources.

Sources are the Python files of the core, the plugins, the examples and the benchmarks; sizes are also
those of the tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import engine_core

ROOT = Path(__file__).parents[2]
CORE = Path(engine_core.__file__).parent
SOURCES = [
    path
    for folder in ("engine_core", "plugins", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"build", "tests", "_template", "__pycache__"} & set(path.relative_to(ROOT).parts)
]
TESTS = [*sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "plugins").glob("*/tests/*.py"))]
NAMED = re.compile(r"fsdp|megatron|deepspeed|vllm|(?<![a-z])ray(?![a-z])")  # backends that are plugins

LIGHT = [
    "builtin",
    "errors",
    "types",
    "specs",
    "hookspecs",
    "plugins",
    "plugin_listing",
    "assemble",
    "scaffold",
    "redaction",
]
LIGHT += [f"config.{path.stem}" for path in (CORE / "config").glob("[a-z]*.py")]
LIGHT += [f"cli.{path.stem}" for path in (CORE / "cli").glob("[a-z]*.py")]
LIGHT += [
    "algorithms.loss_options",
    "engines.torch_options",
    "runtime.options",
    "trainers.options",
    "tracking_options",
]
HEAVY = ("torch", "transformers", "datasets", "numpy", "matplotlib", "pyarrow", "tokenizers")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def banned(source: str) -> list[str]:
    """What a source does that none of ours may do, with its line; comments and docstrings do nothing."""
    found = []
    for node in ast.walk(ast.parse(source)):
        where = f" in line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            found += [f"import {a.name}{where}" for a in node.names if a.name.split(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            found.append(f"from {node.module}{where}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in {"eval", "exec"}:
            found.append(f"{node.id}{where}")
        elif isinstance(node, ast.Attribute) and node.attr in PICKLES:
            found.append(f"{node.attr}{where}")
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            if (node.arg, node.value.value) in {
                ("shell", True),
                ("weights_only", False),
                ("allow_pickle", True),
            }:
                found.append(f"{node.arg}={node.value.value}{where}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.system", "os.popen"}:
            found.append(f"{ast.unparse(node)}{where}")
    return found


PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def backends_named(source: str) -> list[str]:
    """Backend plugins that a source names in code, in a string or in a name; docstrings may give examples."""
    tree = ast.parse(source)
    documented = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            said = node.value
        else:
            fields = (getattr(node, key, None) for key in ("id", "attr", "name", "arg", "module"))
            said = " ".join(value for value in fields if isinstance(value, str))
        found += [f"{word} in line {getattr(node, 'lineno', 0)}" for word in NAMED.findall(said.lower())]
    return found


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name)
def test_a_file_has_under_500_lines(path):
    assert lines(path) < 500


def test_the_loop_fits_on_200_lines():
    assert lines(CORE / "trainer.py") <= 200


def test_no_file_is_a_drawer_for_odds_and_ends():
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [
        name(path) for path in [*SOURCES, *TESTS] if path.stem in drawers or path.parent.name in drawers
    ] == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_source_runs_nothing_untrusted(path):
    assert banned(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.serialization.pickle.load(f)",
        "eval(text)",
        "exec(code)",
        "subprocess.run(c, shell=True)",
        "torch.load(f, weights_only=False)",
        "os.system(c)",
    ],
)
def test_the_rule_sees(source):
    assert banned(source)


def test_the_rule_leaves_words_alone():
    assert (
        banned('"""No pickle, no eval(x)."""\nmodel.eval()  # not exec(\nraise ValueError("a pickle")') == []
    )


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(CORE)], ids=name)
def test_the_core_names_no_backend_plugin(path):
    assert backends_named(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        'if backend == "fsdp": pass',
        "import ray",
        "from vllm import LLM",
        "class FSDPEngine: ...",
        'x = f"megatron {y}"',
    ],
)
def test_the_rule_sees_a_backend(source):
    assert backends_named(source)


def test_the_rule_leaves_docstrings_and_arrays_alone():
    assert backends_named('"""As in fsdp."""\nx: int = 0\n"""of vllm"""\narray = "arrays"') == []


def test_backends_are_named_in_one_data_file():
    named = {
        path.name
        for path in CORE.rglob("*")
        if path.suffix in {".json", ".toml", ".html"} and NAMED.search(path.read_text("utf-8").lower())
    }
    assert named == {"known_plugins.json"}


@pytest.mark.parametrize("module", LIGHT)
def test_every_light_module_exists(module):
    path = CORE / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_importing_the_light_modules_loads_nothing_heavy():
    modules = ["engine_core", *(f"engine_core.{module}" for module in LIGHT)]
    program = "\n".join(
        [
            "import importlib, sys",
            f"for name in {modules!r}:",
            "    importlib.import_module(name)",
            f"    heavy = set({HEAVY!r}) & set(sys.modules)",
            "    assert not heavy, (name, heavy)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_folder_of_tests_is_run():
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    folders = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert {"plugins", *folders} == set(paths)
