"""The modules that a distribution imports from another one are those of docs/reference/api.md."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "api.md"
PLUGINS = sorted(file.parent for file in (ROOT / "plugins").glob("[a-z]*/pyproject.toml"))
TEMPLATE = ROOT / "plugins" / "tools" / "src" / "engine_plugin_tools" / "templates"
OURS = re.compile(r"engine_(core|plugin_\w+)(\.\w+)*")
LOAD = re.compile(rf"({OURS.pattern}):\w+")
INTERNAL = "## Internal modules"


def tables(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row that names a module, without back ticks."""
    for row in re.findall(r"^\| `engine_.*\|$", text, re.MULTILINE):
        yield [cell.strip().strip("`") for cell in row.strip("|").split("|")]


def listed() -> tuple[set[str], dict[str, set[str]]]:
    """Return the public modules of the page, and the internal ones with the folders of the plugins that may import them."""
    public, internal = PAGE.read_text("utf-8").split(INTERNAL)
    owners = {module: set(cells[-1].split(", ")) for module, *cells in tables(internal)}
    return {cells[0] for cells in tables(public)}, owners


def file_of(module: str) -> Path | None:
    """Return the file of one of our modules; None where it does not exist."""
    package = module.partition(".")[0]
    base = (
        ROOT
        if package == "engine_core"
        else ROOT / "plugins" / package.removeprefix("engine_plugin_") / "src"
    )
    path = base.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def imports(source: str) -> Iterator[str]:
    """Yield our modules that a source imports or names as ``"module:attribute"``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and OURS.fullmatch(node.module or ""):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if file_of(inner) else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if OURS.fullmatch(alias.name))
        elif isinstance(node, ast.Constant) and (found := LOAD.fullmatch(str(node.value))):
            yield found[1]


def sources() -> Iterator[tuple[str, str, str]]:
    """Yield (owner, where, source) of every plugin, of the template, of the examples and of the Python in the pages."""
    for folder in PLUGINS:
        for path in sorted((folder / "src").rglob("*.py")):
            owner = "template" if path.is_relative_to(TEMPLATE) else folder.name
            yield owner, str(path.relative_to(ROOT)), path.read_text("utf-8")
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield "examples", str(path.relative_to(ROOT)), path.read_text("utf-8")
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").glob("*/README.md")]:
        if "_build" not in page.parts:
            for block in re.findall(
                r"^```py(?:thon)?\b[^\n]*\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S
            ):
                yield "docs", str(page.relative_to(ROOT)), block


@functools.cache
def crossings() -> list[tuple[str, str, str]]:
    """Return (owner, where, module) of every import from another distribution of ours; examples have packages, too."""
    ours = {"engine_core", *(f"engine_plugin_{folder.name}" for folder in PLUGINS)}
    return [
        (owner, where, module)
        for owner, where, source in sources()
        for module in imports(source)
        if module.partition(".")[0] in ours - {f"engine_plugin_{owner}"}
    ]


def test_the_walk_finds_every_sort_of_source():
    found = list(sources())
    assert {"template", "examples", "docs"} <= {owner for owner, _, _ in found}
    assert TEMPLATE.is_dir()
    assert len(crossings()) > 1000


def test_plugins_import_only_listed_modules():
    public, internal = listed()
    wrong = {
        f"{where}: {module} is not on docs/reference/api.md for '{owner}'"
        for owner, where, module in crossings()
        if module not in public and owner not in internal.get(module, ())
    }
    assert not wrong, "\n" + "\n".join(sorted(wrong))


def test_every_listed_module_exists_once():
    names = [cells[0] for cells in tables(PAGE.read_text("utf-8"))]
    assert len(names) > 100
    assert [name for name in names if file_of(name) is None] == []
    assert sorted(names) == sorted(set(names))


def test_every_listed_module_can_be_found():
    public, _ = listed()
    packages = {name.partition(".")[0] for name in public}
    assert [name for name in sorted(packages) if importlib.util.find_spec(name) is None] == []


def test_an_internal_module_is_listed_only_for_its_importers():
    _, internal = listed()
    used = {(owner, module) for owner, _, module in crossings()}
    idle = [
        (owner, module)
        for module, owners in internal.items()
        for owner in owners
        if (owner, module) not in used
    ]
    assert not idle, f"Remove from docs/reference/api.md: {idle}"


def fields_without_text(source: str) -> list[str]:
    """Return the public fields of public dataclasses, structs and named tuples of a source that have no text.

    A text is a ``#:`` comment, a docstring below the field, an entry in the class's docstring, or ``_doc(...)``.
    """
    lines, found = source.splitlines(), []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        made_by = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
        if not any(re.search(r"\b(dataclass|Struct|NamedTuple)\b", each) for each in made_by):
            continue
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                continue
            name = ast.unparse(field.target)
            documented = (
                name.startswith("_")
                or "_doc(" in ast.unparse(field.annotation)
                or "#: " in lines[field.end_lineno - 1]
                or lines[field.lineno - 2].strip().startswith("#: ")
                or (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
                or re.search(rf"^\s*{name}: ", ast.get_docstring(node) or "", re.MULTILINE)
            )
            if not documented:
                found.append(f"{node.name}.{name}")
    return found


def test_every_field_of_a_public_dataclass_has_a_text():
    public, _ = listed()
    bare = [
        f"{module}: {field}"
        for module in sorted(public)
        if (file := file_of(module))
        for field in fields_without_text(file.read_text("utf-8"))
    ]
    assert bare == []


def test_a_field_without_a_text_is_found():
    head = "@dataclass\nclass Pair:\n    "
    assert fields_without_text(head + "left: int\n    right: int  #: the other\n") == ["Pair.left"]
    assert (
        fields_without_text(head + '"""A pair.\n\n    Args:\n        left: one\n    """\n\n    left: int\n')
        == []
    )
    assert fields_without_text(head + "left: Annotated[int, _doc('one')] = 0\n    _right: int = 0\n") == []


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_declares_the_distributions_that_it_imports(folder):
    project = project_of(folder)
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "dev"]
    declared = {
        *distributions(project["dependencies"]),
        *(name for lines in extras for name in distributions(lines)),
    }
    imported = {module.partition(".")[0] for owner, _, module in crossings() if owner == folder.name}
    assert {
        package.replace("_", "-").replace("engine-core", "engine-core-rl") for package in imported
    } <= declared


def distributions(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", line)[0].lower() for line in requirements}


def extras_too(requirements: list[str]) -> set[str]:
    """Return the distributions of requirements, with those of the extras of ours that they name."""
    found = distributions(requirements)
    for line in requirements:
        if named := re.match(r"engine-plugin-([\w-]+)\[([\w,-]+)\]", line):
            other = project_of(ROOT / "plugins" / named[1].replace("-", "_"))
            for extra in named[2].split(","):
                found |= extras_too(other["optional-dependencies"][extra])
    return found


distributions_of_packages = functools.cache(importlib.metadata.packages_distributions)


def project_of(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def packages_imported(folder: Path) -> set[str]:
    """Return the top-level packages that the Python files of a folder import, its own files left out."""
    files = sorted(folder.rglob("*.py"))
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    return found - {path.stem for path in files} - {path.parent.name for path in files}


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_the_extra_of_developers_names_what_the_tests_import(folder):
    project = project_of(folder)
    declared = {"engine-core-rl", *distributions(project_of(ROOT)["dependencies"])}
    declared |= extras_too([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    imported = packages_imported(folder / "tests") - {"engine_core", f"engine_plugin_{folder.name}"}
    own = packages_imported(folder / "src")  # a library of the plugin is an extra for its users
    missing = set()
    for package in imported:
        if package.startswith("engine_plugin_"):
            names = {package.replace("_", "-")}
        else:
            names = set() if package in own else {*distributions_of_packages().get(package, ())}
        if names and not declared & {name.lower() for name in names}:
            missing.add(package)
    assert missing == set(), f"Add to dev in {folder.name}/pyproject.toml"
    assert {"pytest", "pytest-timeout"} <= distributions(project["optional-dependencies"]["dev"])


def test_imports_and_loads_are_read():
    source = "from engine_core.train import loop\nimport engine_core.errors\nload = 'engine_plugin_torch.build:make'\n"
    assert list(imports(source)) == [
        "engine_core.train.loop",
        "engine_core.errors",
        "engine_plugin_torch.build",
    ]
    assert file_of("engine_core.no_such_module") is None
