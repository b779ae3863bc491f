"""Start something new from the templates in the wheel: a plugin, or a run file.

The plugin template is a working plugin (``plugins/_template`` is the same folder). Copying replaces
three exact words, so what is tested there is what is written here.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from engine_core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
LEFT_BY_TOOLS = re.compile(r"\..*|__pycache__|build|.*\.egg-info")


def new_plugin(name: str, folder: Path) -> Path:
    """Write a complete plugin that offers one reward called ``name``.

    Args:
        name: letters, digits, ``_`` and ``-``; the name that run files will use (with ``_``).
        folder: where the plugin's own folder ``engine-plugin-NAME`` is put.

    Returns:
        The plugin's folder.

    Raises:
        ConfigError: the name cannot be one, or a file of the plugin exists; nothing was written.
    """
    python_name = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", python_name) or keyword.iskeyword(python_name):
        raise ConfigError(
            f"Plugin name '{name}' must be lower-case letters, digits, '_' or '-', from a letter to a letter or digit, "
            "such as 'my_reward'."
        )
    distribution = f"engine-plugin-{python_name.replace('_', '-')}"
    words = {
        "engine-plugin-template": distribution,
        "engine_plugin_template": f"engine_plugin_{python_name}",
        "template_reward": python_name,
        "TemplateOptions": f"{python_name.title().replace('_', '')}Options",
    }
    return _copy("plugin", folder / distribution, words)


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
