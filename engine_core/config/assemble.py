"""Loading of a config and its plugins from run files: read, load plugins, validate, check the inputs.

This module imports neither torch, transformers nor datasets, so ``engine validate`` is fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import bare, places, prepared, used_names
from engine_core.config.dump import as_data
from engine_core.config.inputs import HUB_NAME, absent, data_problems, files_of, model_problems, model_tables
from engine_core.config.read import RawConfig, key_text, read_config
from engine_core.config.roles import RolloutConfig
from engine_core.config.validate import validate
from engine_core.config.wording import place_of, place_of_path
from engine_core.errors import ConfigError, PluginError
from engine_core.plugins.plugin_set import PluginProblems, PluginSet
from engine_core.specs import TrainerSpec

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig


def load_config(
    *files: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    allow_code: bool = False,
) -> EngineConfig:
    """Read, merge and validate run files. The plugins that the files name are loaded, to validate their tables.

    Args:
        files: TOML files; a later one takes precedence over an earlier one. A mapping among them counts as
            ``overrides``: ``load_config("run.toml", {"actor.optim.lr": 1e-6})``.
        overrides: a mapping from dotted keys to values, or ``["actor.optim.lr=1e-6"]``.
        allow_code: accept plugin files and extended files outside the run file's folder.

    Returns:
        The config. ``check_complete`` checks for missing keys, which Python objects may replace;
        ``check_inputs`` checks files and folders.

    Raises:
        ConfigError: every problem, with file and line; also absent files, if each value has the right type.
        PluginError: a plugin that the run names cannot be loaded, and there is no other problem.
    """
    mappings = [file for file in files if isinstance(file, Mapping)]
    given = [overrides] if isinstance(overrides, Mapping) else overrides or ()
    paths = [file for file in files if not isinstance(file, Mapping)]
    raw = read_config(paths, [*mappings, *given], allow_code=allow_code)
    _place_plugin_files(raw)
    lines: list[str] = []
    try:
        plugins = _load(raw)
    except PluginProblems as error:  # the rest of the config can still be validated
        plugins = error.loaded
        lines = [f"{_where(raw, kind, name)}{message}" for kind, name, message in error.problems]
    try:
        config = validate(raw, plugins.find, plugins.known)
    except ConfigError as error:
        if error.config is not None and not lines:  # its files can still be checked
            _resolve_paths(error.config, raw)
            lines = check_inputs(error.config)
        raise ConfigError([*error.problems, *lines]) from None
    if lines:
        raise PluginError("\n".join(lines))
    _resolve_paths(config, raw)
    return config


def plugins_for(config: EngineConfig) -> PluginSet:
    """Load the plugins that a config names into this process and return them."""
    return _load(_source(config))


def portable(config: EngineConfig) -> dict[str, Any]:
    """Return plain values from which ``rebuild`` makes the same config in another process."""
    raw = _source(config)
    files = [str(file.resolve()) for file in raw.files]
    return {"data": raw.data, "files": files, "allow_code": raw.allow_code}


def rebuild(values: Mapping[str, Any]) -> tuple[EngineConfig, PluginSet]:
    """Return the config that ``portable`` described and its plugins, loaded in this process.

    Raises:
        ConfigError, PluginError: the installed plugins differ from those of the other process.
    """
    raw = RawConfig(dict(values["data"]), {}, [Path(file) for file in values["files"]], values["allow_code"])
    plugins = _load(raw)
    return validate(raw, plugins.find, plugins.known), plugins


def check_inputs(config: EngineConfig) -> list[str]:
    """Return the problems of the folders and files that a config names, as far as they show without torch."""
    trainer: Any = plugins_for(config).spec("trainers", config.trainer)
    source = config._source or RawConfig({})
    found = [*model_problems(config), *data_problems(config.data, config.eval.set, trainer.stored)]
    lines = [place_of(source.origins.get(key), key) + text if key else text for key, text in found]
    missing = ((path, file) for path, file in source.inputs.items() if not Path(file).exists())
    return lines + [
        place_of_path(source.origins.get(key_text(path)), path) + absent(file) for path, file in missing
    ]


def _source(config: EngineConfig) -> RawConfig:
    """Return the current values of the config, with the files and permissions that it was read with."""
    source = config._source or RawConfig({})
    return RawConfig(as_data(config), source.origins, source.files, source.allow_code)


def _load(raw: RawConfig) -> PluginSet:
    """Load the trainer, then the plugins of the sections that the trainer reads."""
    first, unknown = _loaded(raw, used_names(raw.data, ()))
    trainer = next((spec for spec, _ in first.chosen.values() if isinstance(spec, TrainerSpec)), None)
    if trainer is None:  # only its problems, as the other needs are unknown
        raise PluginProblems(unknown, _loaded(raw, used_names(raw.data))[0])
    names = used_names(raw.data, trainer.sections_for(_asks_for_scores(raw)) or None)  # none: it reads all
    plugins, problems = _loaded(
        raw, names | {kind: {name} for _, kind, name in _chosen_by_trainer(raw, trainer)}
    )
    if problems:
        raise PluginProblems(problems, plugins)
    return plugins


def _loaded(raw: RawConfig, names: dict[str, set[str]]) -> tuple[PluginSet, list[tuple[str, str, str]]]:
    """Load the plugins of names; return them and the problems as (kind, name, message)."""
    entries = raw.data.get("plugins")
    modules = [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    foreign = _foreign_sampler(raw, names)
    problems: list[tuple[str, str, str]] = []
    try:
        plugins = PluginSet.load(names, modules, raw.folder, raw.allow_code, raw.data.get("plugin"))
    except PluginProblems as error:
        plugins, problems = error.loaded, error.problems
    if foreign is not None:
        python, name = foreign
        try:
            processes = plugins.require("parts", "sampler_process")
            plugins.adopt("rollout_engines", name, *processes.foreign_plugin(python, name, plugins))
        except PluginError as error:
            problems = [*problems, ("rollout_engines", name, str(error))]
    return plugins, problems


def _foreign_sampler(raw: RawConfig, names: dict[str, set[str]]) -> tuple[str, str] | None:
    """Return the interpreter and name of a rollout engine in another Python environment; remove it from ``names``.

    An engine that a reward's judge uses as well is loaded in this process: return None.
    """
    python = interpreter_of(raw)
    table = raw.data.get("rollout")
    name = table.get("backend", RolloutConfig.model_fields["backend"].default) if python and table else None
    if python is None or not isinstance(name, str) or name not in names.get("rollout_engines", ()):
        return None
    others = [place for place in places(prepared(raw.data)) if place.section == "reward.judge"]
    if any(chosen.name == name for place in others for chosen in place.chosen):
        return None
    names["rollout_engines"].discard(name)
    return python, name


def interpreter_of(raw: RawConfig) -> str | None:
    """Return the interpreter that a run file names for its sampler, a path or a command; None without one."""
    node: Any = raw.data
    for key in ("rollout", "process", "python"):
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, str) or not node:
        return None
    if os.sep not in node and not node.startswith("~"):
        return node
    return str(_absolute(raw, "rollout.process.python", node))


def _chosen_by_trainer(raw: RawConfig, trainer: TrainerSpec) -> Iterator[tuple[str, str, str]]:
    """Yield key (``dpo.loss``), kind and name of each plugin that the trainer's own table chooses."""
    table = bare(str(raw.data.get("trainer", "rl")))
    given = raw.data.get(table)
    for key, kind in getattr(trainer.config, "chooses", {}).items():
        name = (given if isinstance(given, dict) else {}).get(key, trainer.config.model_fields[key].default)
        if isinstance(name, str):
            yield f"{table}.{key}", kind, name


def _asks_for_scores(raw: RawConfig) -> bool:
    """Return ``EvalConfig.during_training`` for a tree that is not validated yet."""
    table = raw.data.get("eval")
    return isinstance(table, dict) and any(table.get(key) for key in ("every_steps", "at_start", "at_end"))


def _where(raw: RawConfig, kind: str, name: str) -> str:
    """Return the message prefix for the key that chose a name: ``run.toml:14: rollout.backend: ``."""
    if kind == "plugins" and (origin := raw.origins.get("plugins")):
        return place_of(origin, "plugins")
    for place in places(prepared(raw.data)):
        for chosen in place.chosen:
            if (chosen.kind, chosen.name) == (kind, name):
                path = (*place.path, chosen.key)
                origin = raw.origins.get(key_text(path))
                return place_of(origin, key_text(path)) if origin else f"{key_text(path)} (default): "
    table = bare(str(raw.data.get("trainer", "")))
    given = raw.data.get(table)
    for key, value in given.items() if isinstance(given, dict) else ():  # the trainer's choices
        if value == name and (origin := raw.origins.get(f"{table}.{key}")):
            return place_of(origin, f"{table}.{key}")
    return ""


def _resolve_paths(config: EngineConfig, raw: RawConfig) -> None:
    """Make the paths of a config absolute.

    A path in a file is relative to that file's folder, any other path to the working directory; plugin files that
    no file names to the first file's folder. ``a/b`` is kept as a hub name if no folder ``a`` exists there.
    """
    for at, holder in model_tables(config).items():
        for field in ("path", "tokenizer"):
            if text := getattr(holder, field, None):
                path = _absolute(raw, f"{at}.{field}", text)
                if path.parent.is_dir() or not HUB_NAME.fullmatch(text):
                    setattr(holder, field, str(path))
        if (lora := getattr(holder, "lora", None)) and lora.path:
            lora.path = str(_absolute(raw, f"{at}.lora.path", lora.path))
    if config.rollout.process and config.rollout.process.python:
        config.rollout.process.python = interpreter_of(raw) or ""
    config.plugins = [str(raw.folder / name) if name.endswith(".py") else name for name in config.plugins]
    tables: list[tuple[str, Any]] = [("data.train", config.data), ("data.validation", config.data)]
    parts = enumerate(config.data.mix)
    tables += [(key_text(("data", "mix", part.name or str(number), "path")), part) for number, part in parts]
    tables += [(key_text(("eval", "set", each.name, "path")), each) for each in config.eval.set]
    for key, table in tables:
        field = key.rpartition(".")[2]
        value = getattr(table, field)
        files = [str(_absolute(raw, key, file)) for file in files_of(value)]
        setattr(table, field, files[0] if isinstance(value, str) and files else files)


def _place_plugin_files(raw: RawConfig) -> None:
    """Resolve plugin files that a file in another folder names against that folder."""
    origin, entries = raw.origins.get("plugins"), raw.data.get("plugins")
    folder = Path(origin.file).resolve().parent if origin and origin.file else raw.folder
    if folder != raw.folder and isinstance(entries, list):
        raw.data["plugins"] = [
            os.path.relpath(folder / entry, raw.folder) if str(entry).endswith(".py") else entry
            for entry in entries
        ]


def _absolute(raw: RawConfig, key: str, text: str) -> Path:
    origin = raw.origin(key.split("."))
    folder = Path(origin.file).resolve().parent if origin and origin.file else Path.cwd()
    path = folder / Path(text).expanduser()
    return path.parent.resolve() / path.name  # a symbolic link keeps its name, and so its suffix
