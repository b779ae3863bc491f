"""A merged tree becomes an ``EngineConfig``, or one error that lists everything wrong with it.

Core tables are checked by ``models.py``, option tables by the models of the specs that are handed
in; this module imports no plugin and no torch. Types are those of the TOML: ``"8"`` is no number.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engine_core.builtin import COLUMNS
from engine_core.config.checks import cross_problems
from engine_core.config.choices import (
    OPTIONAL_ROLES,
    ChoiceTable,
    Chosen,
    bare,
    holder_of,
    keys_of,
    model_in,
    model_of,
    places,
    prepared,
)
from engine_core.config.evaluation import held_out_sets
from engine_core.config.models import EngineConfig
from engine_core.config.read import ENV_PREFIX, Path_, RawConfig, key_text
from engine_core.config.roles import CriticConfig
from engine_core.config.schedule import boundaries, config_at
from engine_core.config.wording import Problem, in_order, located, sentence
from engine_core.errors import ConfigError, did_you_mean, names_elsewhere
from engine_core.plugins.metadata import known_names
from engine_core.specs import Advantage, InputFile, Loss, RolloutBackend, Spec, TrainerSpec
from engine_core.tables import DEFAULTS

Model = TypeVar("Model", bound=BaseModel)
SpecOf = Callable[[str, str], Spec | None]


def validate(
    raw: RawConfig,
    spec_of: SpecOf,
    known: Callable[[str], Collection[str]],
) -> EngineConfig:
    """Check everything and fill ``options`` in.

    Args:
        raw: from ``read_config``.
        spec_of: kind and name of a chosen thing -> its spec; None leaves its table unjudged.
        known: kind -> the names that are installed; a table of one of them may stand unread.

    Returns:
        The config; ``_source`` is ``raw`` with ``unread`` filled in.

    Raises:
        ConfigError: every problem, with file and line.
    """
    return _Validation(raw, spec_of, known).run()


class _Validation:
    def __init__(self, raw: RawConfig, spec_of: SpecOf, known: Callable[[str], Collection[str]]) -> None:
        self.raw, self.spec_of, self.known = raw, spec_of, known
        # for validators: ``info.context``
        self.context = {"folder": raw.folder, "allow_code": raw.allow_code}
        self.data = prepared(raw.data)  # option tables are taken out of it
        self.places = {place.path: place for place in places(self.data)}
        self.problems: list[Problem] = []
        self.unread: list[str] = []
        self.options: list[tuple[ChoiceTable, Chosen, BaseModel]] = []
        self.inputs: dict[Path_, str] = {}
        self.tables = dict(_tables_in((), EngineConfig))  # models by header, for hints

    def run(self) -> EngineConfig:
        """Validate the tree and return the config.

        Raises:
            ConfigError: every problem, in the order of the files.
        """
        sections = self.sections_read()
        for place in list(places(self.data)):
            self.take_options(place, place.in_any(sections))
        config = self.check(EngineConfig, self.data, ())
        if config is not None:
            self.attach(config, sections)
            self.judge_algorithm(config, sections)
            self.judge_sampler(config, sections)
            self.problems += cross_problems(config, sections)
            runtime = self.spec_of("runtimes", config.runtime.backend)
            if "placement" in self.data and getattr(runtime, "in_process", False):
                self.unread.append(
                    f"[placement]: runtime '{config.runtime.backend}' has one pool, this process"
                )
            unread = [*self.unread, *self.misnamed()]
            config._source = dataclasses.replace(self.raw, unread=unread, inputs=self.inputs)
        if self.problems or config is None:
            raise ConfigError(in_order(self.problems, self.raw), config)
        return config

    def misnamed(self) -> Iterator[str]:
        """Yield an entry for each environment variable that is a key's except for its underscores."""
        keys = {
            "_".join((*table, key)): (*table, key)
            for table, model in self.tables.items()
            for key in keys_of(model)
        }
        for variable in self.raw.strays:
            if path := keys.get(re.sub("_+", "_", variable[len(ENV_PREFIX) - 1 :].lower())):
                right = ENV_PREFIX + "__".join(path).upper()
                if variable.upper() != right:
                    yield f"{variable}: the environment variable of {key_text(path)} is {right}"

    def sections_read(self) -> Collection[str]:
        """Return the core's tables that the trainer reads; record others that are present."""
        for chosen in self.places[()].chosen:
            spec = self.spec_of(chosen.kind, chosen.name)
            if isinstance(spec, TrainerSpec) and spec.sections:
                core = set(self.data) & set(EngineConfig.model_fields) - {"trainer"}
                for name in sorted(core - spec.sections):
                    self.unread.append(f"[{name}]: trainer '{chosen.name}' does not read it")
                return spec.sections
        return EngineConfig.model_fields

    def take_options(self, place: ChoiceTable, read: bool) -> None:
        """Take the option tables out of a core table and validate those of the chosen names."""
        model, chosen = model_of(place.section), {c.table for c in place.chosen if read}
        tables: dict[str, Any] = {}
        for key in [key for key in place.table if key not in keys_of(model)]:
            if key in chosen:
                tables[key] = place.table.pop(key)
            elif isinstance(place.table[key], dict) and any(key in self.known(kind) for kind in place.kinds):
                del place.table[key]
                names = ", ".join(f"'{c.name}'" for c in place.chosen) or "none"
                self.unread.append(f"[{key_text(_header((*place.path, key)))}]: the run uses {names}")
            elif key in model.model_fields:  # filled in by the loader, unknown to a file
                self.unknown((*place.path, key))
                del place.table[key]
        for name in sorted(chosen):
            self.validate_options(place, name, tables.get(name, {}))

    def validate_options(self, place: ChoiceTable, table: str, data: Any) -> None:
        """One table; where an advantage and a loss share its name, each takes the keys that it has."""
        found = [(c, self.spec_of(c.kind, c.name)) for c in place.chosen if c.table == table]
        users = [(chosen, spec) for chosen, spec in found if spec is not None]
        path = (*place.path, table)
        for number, (chosen, spec) in enumerate(users):
            mine, own = data, set(spec.config.model_fields)
            if isinstance(data, dict) and len(users) > 1:  # the first one reports unknown keys
                foreign = {key for _, other in users for key in other.config.model_fields} - own
                mine = {k: v for k, v in data.items() if (k in own if number else k not in foreign)}
            self.tables |= _tables_in(_header(path), spec.config)
            owner = f" Table of {spec.noun} '{table}'"
            # a plugin file is not installed, so `engine schema` does not know its tables
            listed = table in known_names(chosen.kind)
            owner += f"; see: engine schema {key_text(_header(path))}" if listed else "."
            options = self.check(spec.config, mine, path, owner)
            if options is not None:
                self.options.append((place, chosen, options))
                files = {key: value for key, value in options if isinstance(value, InputFile)}
                self.inputs |= {(*path, key): value for key, value in files.items()}

    def check(self, model: type[Model], data: Any, path: Path_, owner: str = "") -> Model | None:
        """Validate one table; ``owner`` ends each message: whose table it is, and how to see its keys."""
        text = json.dumps(data, default=str)
        try:
            return model.model_validate_json(text, strict=True, context=self.context)
        except ValidationError as error:
            for inner, (value, details) in located(error, data).items():
                key = path + inner
                if details[0]["type"] == "extra_forbidden":
                    self.unknown(key, owner)
                else:
                    wrong = sentence(value, key, details, self.raw)
                    self.problems.append(Problem(key, wrong + (owner or _core_owner(key))))
        return None

    def attach(self, config: EngineConfig, sections: Collection[str]) -> None:
        """Put validated option tables where the engines look for them, and remove roles that the trainer does not read."""
        for place, chosen, options in self.options:
            holder = holder_of(config, place.path)
            if isinstance(getattr(holder, chosen.field), dict):  # of several names
                holder.options = {**holder.options, chosen.table: options}
            else:
                setattr(holder, chosen.field, options)
        if getattr(config.options, "updates_weights_in_flight", False):
            config.rollout.expect_updates()
        for name in OPTIONAL_ROLES:
            if name not in sections:
                setattr(config, name, None)
            role, actor = getattr(config, name), config.actor
            if role and role.backend == actor.backend and bare(role.backend) not in self.raw.data[name]:
                role.take_options(actor)

    def judge_algorithm(self, config: EngineConfig, sections: Collection[str]) -> None:
        """Refuse too small groups; remove critic and teacher if nothing asks them, and add a needed critic.

        Groups are too small if the advantage estimator would give nothing but 0. A column of a plugin may be of the
        teacher.
        """
        name, size = config.algorithm.advantage, config.rollout.group_size
        advantage = self.spec_of("advantages", name)
        loss = self.spec_of("losses", config.algorithm.loss)
        if "algorithm" not in sections or not isinstance(advantage, Advantage) or not isinstance(loss, Loss):
            return
        if "rollout" in sections and size < advantage.min_group_size:
            text = (
                f"got {size}, expected at least {advantage.min_group_size}: algorithm.advantage = '{name}' compares the "
                "responses to a prompt, and with fewer every advantage is 0. Raise it, or use an estimator without "
                "groups, such as 'batch_mean'."
            )
            self.problems.append(Problem(("rollout", "group_size"), text))
        needs = advantage.needs | loss.needs
        if "critic" in sections and "values" in needs:
            config.critic = config.critic or CriticConfig.like(config.actor)
        elif "critic" in sections and config.critic is not None:
            self.unread.append(f"[critic]: algorithm.advantage = '{name}' needs no values")
            config.critic = None
        asking = {"teacher_log_probs"} | set(self.known("columns")) - COLUMNS.keys()
        if "teacher" in sections and config.teacher is not None and not needs & asking:
            self.unread.append(f"[teacher]: algorithm.advantage = '{name}' asks none")
            config.teacher = None

    def judge_sampler(self, config: EngineConfig, sections: Collection[str]) -> None:
        """Refuse a sampling option that the sampler does not implement."""
        backend = config.rollout.backend
        spec = self.spec_of("rollout_engines", backend) if "rollout" in sections else None
        if not isinstance(spec, RolloutBackend):
            return
        for name in sorted(DEFAULTS.keys() - spec.sampling):
            asked: list[tuple[Path_, Any]]
            asked = [(("rollout", name), config_at(config, step).rollout) for step in boundaries(config)]
            asked += [(each.key(name), each) for each in held_out_sets(config) if "eval" in sections]
            for key, value in {key: getattr(table, name, DEFAULTS[name]) for key, table in asked}.items():
                if value != DEFAULTS[name]:
                    text = f"got {value}, but rollout.backend = '{backend}' does not implement this sampling option."
                    self.problems.append(Problem(key, f"{text} Remove it, or use another backend."))

    def unknown(self, path: Path_, owner: str = "") -> None:
        """Report an unknown key: the nearest known one, the tables that have it, and its owner."""
        key, model, place = path[-1], self.tables.get(_header(path[:-1])), self.places.get(path[:-1])
        owner = owner or _core_owner(path)
        names = set(keys_of(model)) if model else set()
        is_table = place is not None and isinstance(place.table.get(key), dict)
        if place is not None and is_table:
            names |= {name for kind in place.kinds for name in self.known(kind)} | {
                c.table for c in place.chosen
            }
        ours = [] if is_table else names_elsewhere(key)
        if not names & set(ours) and (name := next(filter(self.homes, ours), "")):
            known = f" Here '{key}' is '{name}', a key of {self.homes(name)}.{did_you_mean('', names)}"
        else:
            known = did_you_mean(key, names)
            if homes := self.homes(key):
                known += f" '{key}' is a key of {homes}."
        self.problems.append(Problem(path, f"unknown key.{known}{owner}"))

    def homes(self, key: str) -> str:
        """Return the tables that have a key, five at most: ``[actor.optim] and of [critic.optim]``; "" if none has it."""
        found = [f"[{key_text(t)}]" for t, model in self.tables.items() if t and key in keys_of(model)]
        return " and of ".join(found[:5])


def _header(path: Path_) -> Path_:
    """Return a table as the file writes it: ``[reward.format]``, for any reward."""
    if path and path[0] == "schedule":  # its keys are settings of other tables
        return path[:1]
    if path[:2] in (("eval", "set"), ("data", "mix")):
        return (*path[:2], *path[3:])
    return (path[0], *path[2:]) if path and path[0] in ("reward", "stage") else path


def _core_owner(path: Path_) -> str:
    """Return the end of a message about a key of the core."""
    table = key_text(_header(path[:-1]))
    if table == "plugin":
        return " A table [plugin.NAME] is of a plugin in plugins = [...]."
    return f" Table of the core; see: engine schema {table}" if table else " See: engine schema"


def _tables_in(
    header: Path_, model: type[BaseModel], above: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[Path_, type[BaseModel]]]:
    """Yield a table and those in it, by header; a model that contains itself is entered once."""
    yield header, model
    for name in keys_of(model):
        inner = model_in(model.model_fields[name].annotation)
        if inner is not None and inner not in (*above, model):
            yield from _tables_in((*header, name), inner, (*above, model))
