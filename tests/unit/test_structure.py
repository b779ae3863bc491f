"""The rules that keep the project small and safe, held against its sources.

Sources are the Python files of the kernel, the distributions of ``plugins/``, the examples and the benchmarks; sizes are
also those of the tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import engine_core

ROOT = Path(__file__).parents[2]
CORE = Path(engine_core.__file__).parent
SOURCES = [
    path
    for folder in ("engine_core", "plugins", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"build", "tests", "__pycache__"} & set(path.relative_to(ROOT).parts)
]
TESTS = [
    ROOT / "conftest.py",
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted(path for folder in (ROOT / "plugins").glob("*/tests") for path in folder.rglob("*.py")),
]
PROJECTS = sorted((ROOT / "plugins").glob("[a-z]*/pyproject.toml"))
NAMED = re.compile(r"fsdp|megatron|deepspeed|vllm|(?<![a-z])ray(?![a-z])")  # backends that are plugins

KERNEL_LINES = 13_000
"""Lines of code that the kernel may have, its algorithms included."""
LOOP_MODULES = 45
"""Modules of ours that importing the loop, ``engine_core.train.loop``, may load."""
TRAINER_MODULES = 78
"""Modules of ours that importing the whole of reinforcement learning may load. Lower it where it can be; never raise it."""
VALIDATE_MODULES = 70
"""Modules of ours that ``engine validate`` may load."""

HEAVY = (
    *("torch", "transformers", "datasets", "numpy", "matplotlib", "pyarrow", "tokenizers", "safetensors"),
    *("deepspeed", "megatron", "ray", "vllm", "tensorboard", "wandb", "math_verify", "sympy"),
)


def modules(folder: Path, pattern: str, root: Path = ROOT) -> list[str]:
    """Return the names of the modules of a folder, the names of packages without ``__init__``."""
    paths = sorted(path.relative_to(root).with_suffix("").parts for path in folder.glob(pattern))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in paths]


def named_modules(project: Path) -> list[str]:
    """Return the modules behind the names that a distribution offers, and those of its options and families of models."""
    groups = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"]
    named = {
        module for group, names in groups.items() if group.startswith("engine.") for module in names.values()
    }
    source = project.parent / "src"
    read = [
        name for pattern in ("**/*options.py", "*/families.py") for name in modules(source, pattern, source)
    ]
    return sorted({*named, *read})


LIGHT = [
    "engine_core",
    *modules(CORE, "plugins/*.py"),
    *modules(CORE, "config/*.py"),
    *modules(CORE, "cli/*.py"),
    *(
        f"engine_core.{module}"
        for module in ("errors", "types", "specs", "hooks", "builtin", "redaction", "launch", "faults")
    ),
    "engine_core.contracts.parts",
    "engine_core.contracts.weight_transport",  # a transport of one file is a hook module
    "engine_plugin_tools.commands.configs",
    *(module for project in PROJECTS for module in named_modules(project)),
]
"""Modules that ``engine validate``, ``engine plugins`` or the hook module of a plugin imports: none of them imports a heavy library."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def code_lines(source: str) -> int:
    """Count the lines that are neither blank, nor a comment alone, nor of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    texts = enumerate((line.strip() for line in source.splitlines()), start=1)
    return sum(bool(text) and not text.startswith("#") and number not in documented for number, text in texts)


def plugins_imported(source: str) -> list[str]:
    """Return what a source imports of a plugin, wherever the import stands."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            names = [node.value]  # a spec's "module:attribute"
        else:
            continue
        found += [f"{each} in line {node.lineno}" for each in names if re.match(r"engine_plugin_\w", each)]
    return found


def loaded_by(program: str, cwd: Path, path: Sequence[Path] = ()) -> set[str]:
    """Return the modules that a fresh process has loaded at the end of a program."""
    lines = [
        "import sys",
        f"sys.path[:0] = {[str(folder) for folder in path]!r}",
        program,
        "print(*sys.modules, file=sys.stderr)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def ours(loaded: Iterable[str]) -> list[str]:
    return sorted(module for module in loaded if re.match(r"engine_(core|plugin_)", module))


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


def broken(rule, paths):
    """Name each file that breaks a rule, with what the rule found in it."""
    found = {name(path): rule(path.read_text("utf-8")) for path in paths}
    assert len(found) > 50  # they were found
    return {file: lines for file, lines in found.items() if lines}


def test_every_file_has_under_500_lines():
    counted = {name(path): lines(path) for path in [*SOURCES, *TESTS]}
    assert {file: count for file, count in counted.items() if count >= 500} == {}


def test_the_loop_fits_on_200_lines():
    assert lines(CORE / "train" / "trainer.py") <= 200


def test_the_kernel_is_small():
    counted = {name(path): code_lines(path.read_text("utf-8")) for path in CORE.rglob("*.py")}
    assert sum(counted.values()) <= KERNEL_LINES, f"{sum(counted.values())} lines of code"
    assert len(counted) > 50  # they were found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Module.\n\nMore.\n"""\n\nx = 1  # said\n# alone\n', 1),
        ('def f():\n    """One line."""\n    return """\n# text\n"""\n', 3),
        ('class A:\n    """Of\n    two lines."""\n\n    x: int = 0\n    """Of a field: counted."""\n', 3),
        ("async def f(\n    a,\n):\n    'Doc.'\n    await a\n", 4),
        ("", 0),
    ],
)
def test_lines_of_code_are_counted(source, expected):
    assert code_lines(source) == expected


def test_the_kernel_imports_no_plugin():
    assert broken(plugins_imported, CORE.rglob("*.py")) == {}


def test_the_kernel_names_no_module_of_a_plugin():
    """Docstrings and comments too; the modules of weight transports are the exception, which their contract refers to."""
    found = re.compile(r"engine_plugin_(?!processes\.transports)\w+[\w.]*")
    named = {name(path): found.findall(path.read_text("utf-8")) for path in CORE.rglob("*.py")}
    assert {file: modules for file, modules in named.items() if modules} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import engine_plugin_torch.engine",
        "def f():\n    from engine_plugin_processes import flow",
        "if TYPE_CHECKING:\n    from engine_plugin_rewards.models import roles",
        'Part(load="engine_plugin_agents.runner:Episodes")',
    ],
)
def test_the_rule_sees_an_import_of_a_plugin(source):
    assert plugins_imported(source)


def test_the_rule_leaves_docstrings_about_plugins_alone():
    assert plugins_imported('"""See ``engine_plugin_torch``: more."""\nfrom engine_core import plugins') == []


def test_no_file_is_a_drawer_for_odds_and_ends():
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [
        name(path) for path in [*SOURCES, *TESTS] if path.stem in drawers or path.parent.name in drawers
    ] == []


def test_no_source_runs_anything_untrusted():
    assert broken(banned, SOURCES) == {}


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


def test_the_core_names_no_backend_plugin():
    assert broken(backends_named, CORE.rglob("*.py")) == {}


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


def test_the_light_modules_are_of_every_distribution():
    packages = {project.parent / "src" for project in PROJECTS}
    expected = {
        path.name
        for source in packages
        for path in source.glob("engine_plugin_*/")
        if path.suffix != ".egg-info"
    }
    assert {module.partition(".")[0] for module in LIGHT} == {"engine_core", *expected}
    assert {f"{package}.plugin" for package in expected} <= set(LIGHT)
    assert {"engine_core.builtin", "engine_core.config.assemble", "engine_core.cli.main"} <= set(LIGHT)


def test_importing_the_light_modules_loads_nothing_heavy(tmp_path):
    program = "\n".join(
        [
            "import importlib",
            f"for name in {LIGHT!r}:",
            "    importlib.import_module(name)",
            f"    heavy = set({HEAVY!r}) & set(sys.modules)",
            "    assert not heavy, (name, heavy)",
        ]
    )
    assert set(LIGHT) <= loaded_by(program, tmp_path, [project.parent / "src" for project in PROJECTS])


def test_importing_the_package_loads_its_hooks_alone(tmp_path):
    assert ours(loaded_by("import engine_core", tmp_path)) == ["engine_core", "engine_core.hooks"]


@pytest.mark.parametrize(
    ("module", "limit"),
    [("engine_core.train.loop", LOOP_MODULES), ("engine_core.train.trainer", TRAINER_MODULES)],
)
def test_importing_the_loop_loads_a_part_of_the_kernel_and_no_plugin(module, limit, tmp_path):
    loaded = ours(loaded_by(f"import {module}", tmp_path))
    assert module in loaded
    assert [name for name in loaded if name.startswith("engine_plugin_")] == []
    assert len(loaded) <= limit, f"{len(loaded)} modules: {loaded}"


def test_validate_loads_of_plugins_what_the_run_names_and_nothing_heavy(sft_run):
    program = f"from engine_core.cli.main import main; assert main(['validate', {str(sft_run)!r}]) == 0"
    loaded = loaded_by(program, sft_run.parent)
    assert sorted(loaded & set(HEAVY)) == []
    found = ours(loaded)
    assert "engine_core.config.assemble" in found
    assert len(found) <= VALIDATE_MODULES, f"{len(found)} modules: {found}"
    of_plugins = {module for module in found if module.startswith("engine_plugin_")}
    packages = {"engine_plugin_tools", "engine_plugin_torch", "engine_plugin_trainers"}
    assert {module.partition(".")[0] for module in of_plugins} == packages
    folders = {"engine_plugin_tools.commands", "engine_plugin_trainers.algorithms"}
    assert of_plugins - packages - folders <= set(LIGHT)
    assert [m for m in found if m.startswith(("engine_core.data", "engine_core.train.trainer"))] == []


def test_every_folder_of_tests_is_run():
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    folders = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert {"plugins/*/tests", *folders} == set(paths)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.parent.name)
def test_the_tests_of_a_plugin_run_alone_with_the_configuration_of_the_root(project):
    """A table of pytest in a plugin would make its folder the root and hide ``conftest.py`` of the repository."""
    assert "pytest" not in tomllib.loads(project.read_text("utf-8"))["tool"]
