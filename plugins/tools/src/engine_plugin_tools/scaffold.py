"""New plugins and run files, from the templates in the wheel.

The plugin template, ``templates/plugin``, is a working plugin. Copying replaces a few exact words, so the tested
template is what gets written.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from engine_core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
USED_IN_TEMPLATE = ("len", "hookimpl", "engine_rewards")  # a function of that name would hide it
LEFT_BY_TOOLS = re.compile(r"\..*|__pycache__|build|.*\.egg-info")


def new_plugin(name: str, folder: Path) -> Path:
    """Write a complete plugin that offers one reward called ``name``.

    Args:
        name: letters, digits, ``_`` and ``-``; run files will use this name (with ``_``). A leading ``engine-plugin-``
            is ignored, since the folder's name has it anyway.
        folder: parent of the plugin's own folder ``engine-plugin-NAME``.

    Returns:
        The plugin's folder.

    Raises:
        ConfigError: the name is not valid, or a file of the plugin exists; nothing was written.
    """
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
    return _copy("plugin", folder / distribution, words)


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


def new_run(folder: Path) -> Path:
    """Write a run file to start from and a few rows of data.

    Args:
        folder: for ``run.toml`` and ``data/train.jsonl``; made if absent.

    Returns:
        The path of the run file.

    Raises:
        ConfigError: one of the files exists; nothing was written.
    """
    return _copy("run", folder, {}) / "run.toml"


def new_demo(folder: Path) -> None:
    """Write the run files of ``engine demo`` into its folder.

    Raises:
        ConfigError: one of the files exists; nothing was written.
    """
    _copy("demo", folder, {"demo/runs": (folder / "runs").as_posix()})


def _copy(template: str, target: Path, words: dict[str, str]) -> Path:
    source = TEMPLATES / template
    files: dict[Path, str] = {}
    for file in source.rglob("*"):
        path = file.relative_to(source)
        if file.is_file() and not any(LEFT_BY_TOOLS.fullmatch(part) for part in path.parts):
            files[target / _replaced(str(path), words)] = _replaced(file.read_text("utf-8"), words)
    if existing := [str(file) for file in files if file.exists()]:
        raise ConfigError(
            f"Not written, because it exists: {', '.join(sorted(existing))}. Choose another name or folder."
        )
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return target


def _replaced(text: str, words: dict[str, str]) -> str:
    # One pass: a new name may itself contain a word of the template.
    return re.sub("|".join(words) or r"(?!)", lambda match: words[match.group()], text)
