"""From a run file to a config and its plugins: read, load what is named, validate, test the inputs.

Nothing here imports torch, transformers or datasets, so that ``engine validate`` answers at once.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import OPTIONAL_ROLES, bare, places, prepared, used_names
from engine_core.config.dump import as_data
from engine_core.config.evaluation import held_out_sets
from engine_core.config.frozen_roles import frozen_role_problems
from engine_core.config.inputs import HUB_NAME, data_problems, files_of, model_problems
from engine_core.config.needed_parts import absent_parts
from engine_core.config.read import RawConfig, key_text, read_config
from engine_core.config.requirements import GREEDY, plan_run, producers_of
from engine_core.config.roles import RolloutConfig
from engine_core.config.validate import validate
from engine_core.config.weight_sharing import in_separate_pools, sharing_problems, transport_problem
from engine_core.config.wording import place_of
from engine_core.errors import ConfigError, PluginError, did_you_mean
from engine_core.plugins.metadata import our_plugins
from engine_core.plugins.plugin_set import PluginProblems, PluginSet, known_names
from engine_core.specs import RefillOptions, TrainerSpec, resolve

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig


def load_config(
    *files: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    allow_code: bool = False,
) -> EngineConfig:
    """Read, merge and validate run files; the plugins that they name are loaded for their tables.

    Args:
        files: TOML files, a later one over an earlier one. A mapping among them counts as
            ``overrides``: ``load_config("run.toml", {"actor.optim.lr": 1e-6})``.
        overrides: keys with dots and their values, or ``["actor.optim.lr=1e-6"]``.
        allow_code: plugin files and extended files outside the run file's folder are accepted.

    Returns:
        The config. What may be missing because a live object stands for it is tested by
        ``check_complete``, what is on the disk by ``check_inputs``.

    Raises:
        ConfigError: every problem, with file and line.
        PluginError: something that the run names cannot be had; nothing else was wrong.
    """
    mappings = [file for file in files if isinstance(file, Mapping)]
    given = [overrides] if isinstance(overrides, Mapping) else overrides or ()
    paths = [file for file in files if not isinstance(file, Mapping)]
    raw = read_config(paths, [*mappings, *given], allow_code=allow_code)
    lines: list[str] = []
    try:
        plugins = _load(raw)
    except PluginProblems as error:  # everything else can be judged all the same
        plugins = error.loaded
        lines = [f"{_where(raw, kind, name)}{message}" for kind, name, message in error.problems]
    try:
        context = {"folder": raw.folder, "allow_code": allow_code}
        config = validate(raw, plugins.find, _known(plugins), context)
    except ConfigError as error:
        raise ConfigError([*error.problems, *lines]) from None
    if lines:
        raise PluginError("\n".join(lines))
    _resolve_paths(config, raw)
    return config


def plugins_for(config: EngineConfig) -> PluginSet:
    """The plugins that a config names, loaded in this process."""
    return _load(_source(config))


def portable(config: EngineConfig) -> dict[str, Any]:
    """Plain values from which ``rebuild`` makes the same config in another process."""
    raw = _source(config)
    files = [str(file.resolve()) for file in raw.files]
    return {"data": raw.data, "files": files, "allow_code": raw.allow_code}


def rebuild(values: Mapping[str, Any]) -> tuple[EngineConfig, PluginSet]:
    """The config that ``portable`` told, and its plugins, loaded in this process.

    Raises:
        ConfigError, PluginError: what is installed here is not what the other process has.
    """
    raw = RawConfig(dict(values["data"]), {}, [Path(file) for file in values["files"]], values["allow_code"])
    plugins = _load(raw)
    context = {"folder": raw.folder, "allow_code": raw.allow_code}
    return validate(raw, plugins.find, _known(plugins), context), plugins


def check_complete(
    config: EngineConfig, live: Collection[str] = (), plugins: PluginSet | None = None
) -> None:
    """What a run needs and no file said.

    Args:
        config: from ``load_config``.
        live: which of ``model``, ``tokenizer``, ``data``, ``rewards`` are objects of the program.
        plugins: those of the config, where they are loaded already.

    Raises:
        ConfigError: every missing thing.
        PluginError: a part that the run needs is not installed; nothing else was wrong.
    """
    plugins = plugins or plugins_for(config)
    spec: Any = plugins.spec("trainers", config.trainer)
    reads = spec.sections or type(config).model_fields
    missing = [*_lora_problems(config, plugins, reads), *frozen_role_problems(config, reads)]
    missing += _frozen_problems(config, plugins, reads)
    if "rollout" in reads and config.rollout.weights == "shared":
        missing += sharing_problems(config, plugins)
    if "rollout" in reads and (
        problem := transport_problem(config, plugins, in_separate_pools(config, plugins))
    ):
        missing.append(problem)
    missing += _runtime_problems(config, plugins)
    if not config.model.path and "model" not in live and "model" in reads:
        missing.append(
            "model.path: missing. Expected a folder or a hub name like 'Qwen/Qwen3-0.6B' in [model]."
        )
    source = config.data.source and not spec.stored  # rollouts come from files alone
    if "data" in spec.required and not (files_of(config.data.train) or source or "data" in live):
        named = "files of rollouts" if spec.stored else "a JSONL, Parquet or CSV file, or a source,"
        missing.append(f"data.train: missing. Expected {named} in [data].")
    if "teacher" in spec.required:
        missing += _teacher_missing(config, f"Trainer '{config.trainer}'")
    rewarded = _rewarded(config, plugins) or "rewards" in live
    if "reward" in spec.required and not rewarded and _reads_rewards(config, plugins, reads):
        missing.append(
            f"reward: missing. Trainer '{config.trainer}' needs at least one [[reward]] with a name, or an [environment] "
            "that sets rewards."
        )
    evaluates = "eval" in reads and config.eval.during_training
    if evaluates and "reward" in spec.for_eval and not rewarded:
        missing.append(
            "reward: missing. [eval] asks for scores: name a [[reward]], or set eval.every_steps = 0."
        )
    if evaluates and not held_out_sets(config):
        missing.append(
            "data.validation: missing. [eval] asks for scores on it; name a file, or set eval.every_steps = 0."
        )
    if {"eval", "reward"} <= set(reads) and (evaluates or "reward" not in spec.for_eval):
        missing += _unjudged(config, plugins, "rewards" in live)
    if "algorithm" in reads:
        missing += _unmet(config, plugins)
    if "stage" in reads:
        missing += _stage_problems(config, plugins)
    absent = absent_parts(config, plugins, spec)
    files = _source(config).files
    lines = [f"{files[-1]}: {line}" if files else line for line in [*missing, *absent]]
    if missing:
        raise ConfigError(lines)
    if absent:
        raise PluginError("\n".join(lines))


def _runtime_problems(config: EngineConfig, plugins: PluginSet) -> Iterable[str]:
    """What the runtime itself finds wrong with its options."""
    spec: Any = plugins.spec("runtimes", config.runtime.backend)
    return resolve(spec.check)(config) if spec.check is not None else ()


def _rewarded(config: EngineConfig, plugins: PluginSet) -> bool:
    """Whether anything gives rewards."""
    return bool(config.reward or _of_episodes(config, plugins))


def _of_episodes(config: EngineConfig, plugins: PluginSet) -> list[str]:
    """Names of the rewards that the environment sets."""
    named = config.environment and config.environment.name
    spec: Any = plugins.find("environments", named) if named else None
    return sorted(spec.rewards) if spec else []


def _reads_rewards(config: EngineConfig, plugins: PluginSet, reads: Collection[str]) -> bool:
    """Whether what is learned comes from rewards; an estimator may have another source."""
    if "algorithm" not in reads:
        return True
    advantage: Any = plugins.spec("advantages", config.algorithm.advantage)
    return any(column.startswith("reward") or column == GREEDY for column in advantage.needs)


def _teacher_missing(config: EngineConfig, who: str) -> list[str]:
    """What to say to a run that learns from a teacher and names none."""
    if config.teacher is not None and config.teacher.path:
        return []
    return [f"teacher.path: missing. {who} learns from a teacher: name its folder or hub name in [teacher]."]


def peft_missing(role: str) -> str | None:
    """What to say to a role that asks for LoRA where peft is not installed."""
    if importlib.util.find_spec("peft") is not None:
        return None
    return (
        f"{role}.lora: needs the package peft, which is not installed. Try: pip install 'engine-plugin-torch[lora]', "
        "or take the table out to train the whole model."
    )


def _frozen_problems(config: EngineConfig, plugins: PluginSet, reads: Collection[str]) -> Iterator[str]:
    """Roles whose weights change, with a backend for weights that never do."""
    for role in (role for role in ("actor", "critic", "ref", "rollout") if role in reads):
        table = getattr(config, role)
        kind = "rollout_engines" if role == "rollout" else "train_engines"
        found: Any = None if table is None else plugins.find(kind, table.backend)
        if getattr(found, "frozen_only", False):
            yield (
                f"{role}.backend: '{table.backend}' runs models that are never trained, those of a teacher and of rewards. "
                f"Choose another {found.noun} for [{role}] (engine plugins)."
            )


def _lora_problems(config: EngineConfig, plugins: PluginSet, reads: Collection[str]) -> Iterator[str]:
    """Roles with an adapter that cannot have one here."""
    for role in (role for role in ("actor", *OPTIONAL_ROLES) if role in reads):
        holder = getattr(config, role)
        if holder is None or holder.lora is None:
            continue
        backend: Any = plugins.spec("train_engines", holder.backend)
        if "lora" not in backend.capabilities:
            yield (
                f"{role}.lora: backend '{holder.backend}' trains no adapters (it has no capability 'lora'). "
                'Take the table out, or use backend = "torch".'
            )
        elif missing := peft_missing(role):
            yield missing


def _unjudged(config: EngineConfig, plugins: PluginSet, more: bool) -> Iterator[str]:
    """Sets whose score or vote is of a reward that the run has not, or that extracts no answers.

    Args:
        config: with its rewards.
        plugins: that offer them.
        more: the program brings rewards, whose names are not known here.
    """
    names = [*(reward.name for reward in config.reward), *_of_episodes(config, plugins)]
    votes = [name for name in names if getattr(plugins.find("rewards", name), "answers", False)]
    for held_out in held_out_sets(config):
        if held_out.score and held_out.score not in names and not more:
            key = key_text(held_out.key("score"))
            yield f"{key}: got '{held_out.score}', which is no reward of the run.{did_you_mean(held_out.score, names)}"
        if held_out.majority not in ("off", "text", *votes) and not (more and held_out.majority not in names):
            known = ", ".join(repr(name) for name in ("off", "text", *votes))
            yield (
                f"{key_text(held_out.key('majority'))}: got '{held_out.majority}', expected one of {known}: 'text', or a "
                "[[reward]] of the run that extracts answers."
            )


def _unmet(config: EngineConfig, plugins: PluginSet) -> Sequence[str]:
    """Columns and outputs that the algorithm needs and nothing makes."""
    advantage: Any = plugins.spec("advantages", config.algorithm.advantage)
    loss: Any = plugins.spec("losses", config.algorithm.loss)
    try:
        plan = plan_run(config, advantage, loss, producers_of(plugins, advantage, loss))
    except ConfigError as error:
        return error.problems
    who = f"algorithm.advantage = '{config.algorithm.advantage}'"
    return _teacher_missing(config, who) if plan.needs_teacher else []


def _stage_problems(config: EngineConfig, plugins: PluginSet) -> Iterator[str]:
    """Stages that bring in older rollouts where groups are still to be replaced, or which have no log-probs."""
    refills = [isinstance(stage.options, RefillOptions) for stage in config.stage]
    for number, stage in enumerate(config.stage):
        spec: Any = plugins.spec("stages", stage.name)
        if spec.off_policy and any(refills[number:]):
            last = config.stage[max(i for i, refill in enumerate(refills) if refill)].name
            yield (
                f"stage.{stage.name}: stands before '{last}', which has groups replaced in rounds; rollouts of earlier "
                f"steps would count as replacements. Put it after '{last}'."
            )
        if spec.off_policy and config.rollout.log_probs_every_steps > 1:
            yield (
                f"rollout.log_probs_every_steps: got {config.rollout.log_probs_every_steps}, expected 1: stage "
                f"'{stage.name}' brings in rollouts of other steps, of which some would have no log-probs."
            )


def check_inputs(config: EngineConfig) -> list[str]:
    """Problems of the folders and files that a config names, as far as they can be seen without torch."""
    trainer: Any = plugins_for(config).spec("trainers", config.trainer)
    return [*model_problems(config), *data_problems(config.data, config.eval.set, trainer.stored)]


def _source(config: EngineConfig) -> RawConfig:
    """What the config holds now, with the files and permissions that it was read with."""
    source = config._source or RawConfig({})
    return RawConfig(as_data(config), source.origins, source.files, source.allow_code)


def _load(raw: RawConfig) -> PluginSet:
    """The trainer first: it says which sections of the file are read."""
    entries = raw.data.get("plugins")
    modules = [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []

    def load(
        sections: Collection[str] | None, trainer: TrainerSpec | None = None
    ) -> tuple[PluginSet, list[tuple[str, str, str]]]:
        names = used_names(raw.data, sections)
        if trainer is not None:
            names |= {kind: {name} for _, kind, name in _chosen_by_trainer(raw, trainer)}
        foreign = _foreign_sampler(raw, names)
        try:
            plugins, problems = PluginSet.load(names, modules, raw.folder, raw.allow_code), []
        except PluginProblems as error:
            plugins, problems = error.loaded, error.problems
        if foreign is not None:
            python, name = foreign
            try:
                processes = plugins.require("parts", "sampler_process")
                found = processes.foreign_plugin(python, name, modules, raw.folder, raw.allow_code)
                plugins.adopt("rollout_engines", name, *found)
            except PluginError as error:
                problems = [*problems, ("rollout_engines", name, str(error))]
        return plugins, problems

    first, problems = load(())
    trainers = [spec for spec, _ in first.chosen.values() if isinstance(spec, TrainerSpec)]
    sections = trainers[0].sections if trainers else frozenset()
    if trainers and not _asks_for_scores(raw):
        sections -= trainers[0].for_eval
    plugins, more = load(sections or None, trainers[0] if trainers else None)  # one that names none reads all
    if trainers:
        problems = more
    if problems:  # without a trainer nobody knows what else the run needs: that is judged, not asked for
        raise PluginProblems(problems, plugins)
    return plugins


def _foreign_sampler(raw: RawConfig, names: dict[str, set[str]]) -> tuple[str, str] | None:
    """Interpreter and name of a rollout engine that another environment offers; taken out of ``names``.

    One that a reward's model uses too is loaded here, and judged here.
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
    """The other interpreter that a run file names for its sampler: a path, or a command."""
    node: Any = raw.data
    for key in ("rollout", "process", "python"):
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, str) or not node:
        return None
    if os.sep not in node and not node.startswith("~"):
        return node
    return str(_absolute(raw, "rollout.process.python", node))


def _chosen_by_trainer(raw: RawConfig, trainer: TrainerSpec) -> Iterator[tuple[str, str, str]]:
    """Key, kind and name of what the trainer's own table chooses: ``dpo.loss``."""
    table = bare(str(raw.data.get("trainer", "rl")))
    given = raw.data.get(table)
    for key, kind in getattr(trainer.config, "chooses", {}).items():
        name = (given if isinstance(given, dict) else {}).get(key, trainer.config.model_fields[key].default)
        if isinstance(name, str):
            yield f"{table}.{key}", kind, name


def _asks_for_scores(raw: RawConfig) -> bool:
    """As ``EvalConfig.during_training``, of a tree that is not checked yet."""
    table = raw.data.get("eval")
    return isinstance(table, dict) and any(table.get(key) for key in ("every_steps", "at_start", "at_end"))


def _known(plugins: PluginSet) -> Callable[[str], Collection[str]]:
    """Kind -> names whose tables may stand in a file: installed, of one-file plugins, or published by us."""

    def known(kind: str) -> Collection[str]:
        local = {name for plugin in plugins.named for name in plugin.tables.get(kind, {})}
        return {*known_names(kind), *local, *(name for our_kind, name in our_plugins() if our_kind == kind)}

    return known


def _where(raw: RawConfig, kind: str, name: str) -> str:
    """``run.toml:14: rollout.backend: `` for the key that chose a name."""
    for place in places(prepared(raw.data)):
        for chosen in place.chosen:
            if (chosen.kind, chosen.name) == (kind, name):
                path = (*place.path, chosen.key)
                origin = raw.origins.get(key_text(path))
                return place_of(origin, key_text(path)) if origin else f"{key_text(path)} (default): "
    if kind == "plugins" and (origin := raw.origins.get("plugins")):
        return place_of(origin, "plugins")
    table = bare(str(raw.data.get("trainer", "")))
    given = raw.data.get(table)
    for key, value in given.items() if isinstance(given, dict) else ():  # what a trainer's own table chooses
        if value == name and (origin := raw.origins.get(f"{table}.{key}")):
            return place_of(origin, f"{table}.{key}")
    return ""


def _resolve_paths(config: EngineConfig, raw: RawConfig) -> None:
    """Paths of a file are relative to that file's folder, others to the working directory; plugin files
    to the first file's folder.

    ``a/b`` stays as it is where no folder ``a`` lies there: it is a hub name.
    """
    holders: list[tuple[str, Any, str]] = [("model", config.model, "tokenizer")]
    holders += [(role, getattr(config, role), "path") for role in ("model", "actor", *OPTIONAL_ROLES)]
    for reward in config.reward:
        for kind, table in reward.models.items():
            at = key_text(("reward", reward.name, kind))
            holders += [(at, table, "path"), (at, table, "tokenizer")]
    for at, holder, field in holders:
        if text := holder and getattr(holder, field):
            path = _absolute(raw, f"{at}.{field}", text)
            if path.parent.is_dir() or not HUB_NAME.fullmatch(text):
                setattr(holder, field, str(path))
    if config.rollout.process and config.rollout.process.python:
        config.rollout.process.python = interpreter_of(raw) or ""
    for role in ("actor", *OPTIONAL_ROLES):
        holder = getattr(config, role)
        if holder and holder.lora and holder.lora.path:
            holder.lora.path = str(_absolute(raw, f"{role}.lora.path", holder.lora.path))
    config.plugins = [str(raw.folder / name) if name.endswith(".py") else name for name in config.plugins]
    tables: list[tuple[str, Any]] = [("data.train", config.data), ("data.validation", config.data)]
    tables += [(key_text(("eval", "set", each.name, "path")), each) for each in config.eval.set]
    for key, table in tables:
        field = key.rpartition(".")[2]
        value = getattr(table, field)
        files = [str(_absolute(raw, key, file)) for file in files_of(value)]
        setattr(table, field, files[0] if isinstance(value, str) and files else files)


def _absolute(raw: RawConfig, key: str, text: str) -> Path:
    origin = raw.origins.get(key)
    folder = Path(origin.file).resolve().parent if origin and origin.file else Path.cwd()
    path = folder / Path(text).expanduser()
    return path.parent.resolve() / path.name  # a link keeps its own name, and so its ending
