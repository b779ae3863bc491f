"""What a shell completes: runs, run files, and the keys of ``--set``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine_core.config.assemble import load_config
from engine_core.config.dump import as_data, leaves
from engine_core.config.read import key_text, read_config
from engine_core.errors import EngineError
from engine_core.runs.tracking import RunFolder


def completion(what: str, words: Sequence[str], incomplete: str) -> list[str]:
    """Return what an incomplete word may become.

    Args:
        what: the metavar: ``RUN``, ``FILE``, both as in ``FILE|RUN|MODEL``, or ``KEY=VALUE``.
        words: those that were typed after the command.
        incomplete: the beginning of the word.
    """
    if "KEY" in what:
        return keys(words, incomplete)
    return [*(runs(incomplete) if "RUN" in what else ()), *(files(incomplete) if "FILE" in what else ())]


def runs(incomplete: str) -> list[str]:
    """Return the names of the runs below ``runs/`` that begin with the typed text."""
    names = sorted(file.parent.name for file in Path("runs").glob("*/config.resolved.toml"))
    return [name for name in names if name.startswith(incomplete)]


def files(incomplete: str) -> list[str]:
    """Return the TOML files and the folders whose paths begin with the typed text."""
    folder, slash, start = incomplete.rpartition("/")
    named = (path for path in Path(folder or slash or ".").iterdir() if path.name.startswith(start))
    found = sorted(path for path in named if path.is_dir() or path.suffix == ".toml")
    return [f"{path}/" if path.is_dir() else str(path) for path in found]


def keys(words: Sequence[str], incomplete: str) -> list[str]:
    """Return the keys of the typed run files, or run, that begin with the typed text. Runs no code of the files."""
    named = [word for word in words if word.endswith(".toml")]
    try:
        data = read_config(named or [RunFolder.open(words[0]).config_file]).data
        config = load_config({key: value for key, value in data.items() if key != "plugins"})
    except (EngineError, IndexError, OSError):  # no file yet, or one that is not complete
        config = load_config()
    found = (key_text(path) for path, _ in leaves(as_data(config, unset=True)))
    return [f"{key}=" for key in found if key.startswith(incomplete)]
