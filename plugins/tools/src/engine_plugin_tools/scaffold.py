"""New plugins and run files, from the templates in the wheel.

The plugin template, ``templates/plugin``, is a working plugin with a reward. ``templates/kinds`` has what replaces its
hooks, its tests and its table of a run file in plugins of other kinds. Copying replaces a few exact words, so the
tested template is what gets written.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from engine_plugin_tools.recipes import Recipe

TEMPLATES = Path(__file__).parent / "templates"
USED_IN_TEMPLATE = ("len", "hookimpl", "engine_rewards")  # a function of that name would hide it
KINDS = {
    "reward": ("rewards", "A reward", ""),
    "advantage": ("advantages", "An advantage estimator", "torch"),
    "loss": ("losses", "A policy loss", "torch"),
    "stage": ("stages", "A stage", "torch"),
    "environment": ("environments", "An environment", "torch"),
    "trainer": ("trainers", "A trainer", "torch"),
    "data-source": ("data_sources", "A data source", ""),
    "observer": ("plugins", "An observer", ""),
    "model": ("plugins", "A model", "torch"),
    "train-engine": ("train_engines", "A train engine", "torch"),
    "rollout-engine": ("rollout_engines", "A rollout engine", "torch"),
}
"""Kinds of a new plugin, each with its entry-point group, its noun, and the extra of the kit that its tests need."""
USES_TORCH = ("model", "train-engine", "rollout-engine")  # kinds whose package imports the reference engine's
TABLE = re.compile(r"```toml\n.*?```", re.DOTALL)
STEP_HOOKS = re.compile(r"# Step hooks and observers.*?\n\n", re.DOTALL)
LEFT_BY_TOOLS = re.compile(r"\..*|__pycache__|build|.*\.egg-info")


def new_plugin(name: str, folder: Path, kind: str = "reward") -> Path:
    """Write a complete plugin that offers one reward, or something of another kind, called ``name``.

    Args:
        name: letters, digits, ``_`` and ``-``; run files will use this name (with ``_``). A leading ``engine-plugin-``
            is ignored, since the folder's name has it anyway.
        folder: parent of the plugin's own folder ``engine-plugin-NAME``.
        kind: one of ``KINDS``.

    Returns:
        The plugin's folder.

    Raises:
        ConfigError: name or kind is not valid, or a file of the plugin exists; nothing was written.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind '{kind}' is unknown.{did_you_mean(kind, KINDS)}")
    python_name = _python_name(name)
    distribution = f"engine-plugin-{python_name.replace('_', '-')}"
    camel = python_name.title().replace("_", "")
    words = {
        "engine-plugin-template": distribution,
        "engine_plugin_template": f"engine_plugin_{python_name}",
        "template_reward": python_name,
        "TemplateReward": camel,
        "TemplateOptions": f"{camel}Options",
    }
    if kind == "reward":
        return _write(_files("plugin", words), folder / distribution)
    group, noun, extra = KINDS[kind]
    words |= {"template_name": python_name, "TemplateName": camel}
    files = _files("plugin", words | {"engine.rewards": f"engine.{group}", "A reward": noun})
    own = _files(f"kinds/{kind}", words)
    table = own.pop("usage.toml")
    files["tests/test_plugin.py"] = own.pop("test_plugin.py")
    files |= {f"src/engine_plugin_{python_name}/{path}": text for path, text in own.items()}
    files["README.md"] = TABLE.sub(lambda _: f"```toml\n{table}```", files["README.md"])
    tests = "| `tests/test_plugin.py`"
    for path in sorted(own.keys() - {"plugin.py"}):
        about = own[path].removeprefix('"""').partition("\n")[0].rstrip('."')
        row = f"| `src/engine_plugin_{python_name}/{path}` | {about} |\n"
        files["README.md"] = files["README.md"].replace(tests, row + tests)
    if group == "plugins":  # the entry point above the comment is the one that the comment shows
        files["pyproject.toml"] = STEP_HOOKS.sub("", files["pyproject.toml"])
    if kind in USES_TORCH:
        core = '"engine-core-rl>=0.1,<0.2"'
        both = f'{core}, "engine-plugin-torch>=0.1,<0.2"'
        files["pyproject.toml"] = files["pyproject.toml"].replace(f"[{core}]", f"[{both}]")
    if extra:
        files["pyproject.toml"] = files["pyproject.toml"].replace("-testing>", f"-testing[{extra}]>")
    return _write(files, folder / distribution)


def _python_name(name: str) -> str:
    """Return the name that run files and modules use."""
    found = name.replace("-", "_").removeprefix("engine_plugin_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", found) or keyword.iskeyword(found):
        raise ConfigError(
            f"Plugin name '{name}' must be lower-case letters, digits, '_' or '-', from a letter to a letter or digit, "
            "such as 'my_reward'."
        )
    if found in USED_IN_TEMPLATE:
        raise ConfigError(
            f"Plugin name '{name}' must be another one: its module uses '{found}' for something else."
        )
    return found


def new_run(folder: Path, recipe: Recipe | None = None) -> Path:
    """Write a run file to start from: a recipe, or a small one with a few rows of data.

    Args:
        folder: for ``run.toml`` and, without a recipe, ``data/train.jsonl``; made if absent.
        recipe: the run file to write.

    Returns:
        The path of the run file.

    Raises:
        ConfigError: one of the files exists; nothing was written.
    """
    files = {"run.toml": recipe.text} if recipe else _files("run", {})
    return _write(files, folder) / "run.toml"


def new_demo(folder: Path) -> None:
    """Write the run files of ``engine demo`` into its folder.

    Raises:
        ConfigError: one of the files exists; nothing was written.
    """
    _write(_files("demo", {"demo/runs": (folder / "runs").as_posix()}), folder)


def _files(template: str, words: dict[str, str]) -> dict[str, str]:
    """Return the texts of a template's files by path, with words replaced in both."""
    source = TEMPLATES / template
    files: dict[str, str] = {}
    for file in source.rglob("*"):
        path = file.relative_to(source)
        if file.is_file() and not any(LEFT_BY_TOOLS.fullmatch(part) for part in path.parts):
            files[_replaced(str(path), words)] = _replaced(file.read_text("utf-8"), words)
    return files


def _write(files: dict[str, str], target: Path) -> Path:
    """Write files below a folder and return it.

    Raises:
        ConfigError: one of the files exists; nothing was written.
    """
    if existing := [str(target / path) for path in files if (target / path).exists()]:
        raise ConfigError(
            f"Not written, because it exists: {', '.join(sorted(existing))}. Choose another name or folder."
        )
    for path, text in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, "utf-8")
    return target


def _replaced(text: str, words: dict[str, str]) -> str:
    # One pass: a new name may itself contain a word of the template.
    return re.sub("|".join(map(re.escape, words)) or r"(?!)", lambda match: words[match.group()], text)
