"""Start something new from the templates in the wheel: a plugin, or a run file.

The plugin template, ``templates/plugin``, is a working plugin. Copying replaces a few exact words, so what is tested
there is what is written here.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from engine_core.errors import ConfigError
from engine_core.plugins.metadata import installed, our_plugins

TEMPLATES = Path(__file__).parent / "templates"
USED_IN_TEMPLATE = ("len", "hookimpl", "engine_rewards")  # a function of that name would hide it
LEFT_BY_TOOLS = re.compile(r"\..*|__pycache__|build|.*\.egg-info")


def new_plugin(name: str, folder: Path) -> Path:
    """Write a complete plugin that offers one reward called ``name``.

    Args:
        name: letters, digits, ``_`` and ``-``; the name that run files will use (with ``_``). A leading
            ``engine-plugin-`` is left out, as the folder gets it anyway.
        folder: where the plugin's own folder ``engine-plugin-NAME`` is put.

    Returns:
        The plugin's folder.

    Raises:
        ConfigError: the name cannot be one, or a file of the plugin exists; nothing was written.
    """
    python_name = _python_name(name)
    distribution = _distribution(python_name)
    camel = python_name.title().replace("_", "")
    words = {
        "engine-plugin-template": distribution,
        "engine_plugin_template": f"engine_plugin_{python_name}",
        "template_reward": python_name,
        "TemplateReward": camel,
        "TemplateOptions": f"{camel}Options",
    }
    return _copy("plugin", folder / distribution, words)


def taken(name: str) -> str:
    """Why a plugin of this name would get in the way of another one; empty where it would not."""
    reward = _python_name(name)
    own = _distribution(reward)
    offers = {(offer.kind, offer.name): offer.distribution.name for offer in installed()}
    known = {**our_plugins(), **offers}
    if other := known.get(("rewards", reward)):
        return (
            f"'{reward}' is the name of a reward of {other} already. With both installed, run files must write "
            f"'{own}:{reward}'. Another name is easier."
        )
    if own in known.values():
        return (
            f"{own} is the name of a plugin already; installing one replaces the other. Choose another name."
        )
    return ""


def _python_name(name: str) -> str:
    """The name that run files and modules use."""
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


def _distribution(python_name: str) -> str:
    return f"engine-plugin-{python_name.replace('_', '-')}"


def new_run(folder: Path) -> Path:
    """Write a starting run file and a few rows of data.

    Args:
        folder: where ``run.toml`` and ``data/train.jsonl`` are put; made if absent.

    Returns:
        The path of the run file.

    Raises:
        ConfigError: one of the files exists; nothing was written.
    """
    return _copy("run", folder, {}) / "run.toml"


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
