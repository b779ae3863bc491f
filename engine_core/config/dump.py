"""A config as plain data: written as TOML, and compared with the one of a checkpoint.

A change since the checkpoint is *allowed* (meant to be changed: length, optimizer settings, where things are written),
*warned* about (the run continues, but is not the run that it was), or *refused* unless it is forced (the checkpoint
would not fit, or mean something else).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from engine_core.config.choices import holder_of, keys_of, places
from engine_core.config.read import Path_, key_text, quoted
from engine_core.config.rewards import MODELS
from engine_core.errors import ConfigError, did_you_mean
from engine_core.redaction import REDACTED, secrets_in

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig


def as_data(config: EngineConfig, unset: bool = False) -> dict[str, Any]:
    """Plain values as a TOML holds them: option tables under their names, keys without a value left out if not ``unset``."""
    data = _plain(config, unset)
    for each, table in zip(config.eval.set, data["eval"]["set"], strict=True):
        for key in () if unset else table.keys() - each.model_fields_set:
            del table[key]  # a later value of [eval] reaches the set, too
    for place in places(data):
        holder = holder_of(config, place.path)
        for chosen in place.chosen:
            found = getattr(holder, chosen.field)
            options = found.get(chosen.table) if isinstance(found, dict) else found
            free = chosen.table not in keys_of(type(holder))  # a name like a key of the core has no table
            if free and isinstance(options, BaseModel) and type(options).model_fields:
                place.table[chosen.table] = place.table.get(chosen.table, {}) | _plain(options, unset)
    if not data["plugin"]:
        del data["plugin"]
    return data


def _plain(model: BaseModel, unset: bool) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_none=not unset)


def dump_toml(config: EngineConfig, masked: bool = False) -> str:
    """Return the resolved config as TOML: every key with its value, read back as an equal config.

    Relative paths were resolved when it was loaded, so the text means the same in any folder. ``masked`` replaces the
    values of keys that are named like a secret; such a text is for display only.
    """
    data = as_data(config)
    return "\n".join(_table_lines(_masked(data) if masked else data, ())).lstrip("\n") + "\n"


def _masked(node: Any) -> Any:
    if isinstance(node, list):
        return [_masked(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {
        key: REDACTED if isinstance(value, str) and any(secrets_in({key: value})) else _masked(value)
        for key, value in node.items()
    }


def _table_lines(table: Mapping[str, Any], path: Path_) -> Iterator[str]:
    def is_tables(value: Any) -> bool:
        """Return whether a value is a list of tables."""
        return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)

    below = {key: value for key, value in table.items() if isinstance(value, dict) or is_tables(value)}
    for key, value in table.items():
        if key not in below:
            yield f"{key_text((key,))} = {_value(value)}"
    for key, value in below.items():
        inner = (*path, key)
        for entry in [value] if isinstance(value, dict) else value:
            header = f"[{key_text(inner)}]" if isinstance(value, dict) else f"[[{key_text(inner)}]]"
            yield from ("", header)
            yield from _table_lines(entry, inner)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(entry) for entry in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key_text((key,))} = {_value(entry)}' for key, entry in value.items())}}}"
    return repr(value)  # int; float: "1e-06", "inf" and "nan" are TOML


def origins(config: EngineConfig) -> list[tuple[str, Any, str]]:
    """Key, value and where it was set (``default`` where it was not), in the order of the tables.

    Values of keys that are named like a secret are replaced.
    """
    known = config._source.origins if config._source else {}
    return [
        (key_text(path), value, str(known.get(key_text(path), "default")))
        for path, value in leaves(_masked(as_data(config)))
    ]


def leaves(node: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield the path and the value of every key; lists of tables are entered by number."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, list) and node and all(isinstance(entry, dict) for entry in node):
        for number, entry in enumerate(node):
            yield from leaves(entry, (*path, entry.get("name", str(number))))
    else:
        yield path, node


Verdict = Literal["allowed", "warned", "refused"]


def _allowed(*patterns: str) -> tuple[tuple[str, Verdict, str], ...]:
    return tuple((pattern, "allowed", "") for pattern in patterns)


RULES: tuple[tuple[str, Verdict, str], ...] = (
    ("runtime.backend", "allowed", ""),
    ("rollout.backend", "warned", ""),
    ("trainer", "refused", "another trainer has another state"),
    ("model.attention", "warned", "it computes the same with other roundings"),
    ("model.trust_remote_code", "warned", ""),
    ("model.*", "refused", "a checkpoint fits the model that wrote it"),
    *_allowed("reward.*.max_tokens_per_rank"),
    *(
        (f"reward.*.{kind}.*", "warned", "later steps are judged by another model, or in another way")
        for kind in MODELS
    ),
    *_allowed("eval.*"),
    ("*.backend", "refused", "each engine writes its own state"),
    ("data.mix.*.path", "warned", ""),
    ("data.mix.*.weight", "refused", "the position counts rows of the parts' shares"),
    ("*.path", "refused", "a checkpoint fits the model that wrote it"),
    ("*.lora.*", "refused", "a checkpoint fits the model that wrote it"),
    ("ref.*.quantize", "warned", "later steps are held against a reference that is rounded in another way"),
    ("teacher.*.quantize", "warned", "later steps follow a teacher that is rounded in another way"),
    ("*.quantize", "refused", "an adapter fits the rounded weights that it was trained above"),
    ("*.param_dtype", "warned", "the weights are rounded to it, later steps keep what it holds"),
    ("*.compute_dtype", "warned", "it computes the same with other roundings"),
    ("data.curriculum", "refused", "the position is one of its rounds"),
    ("run.seed", "warned", "the data keeps its order, sampling gets other seeds"),
    *_allowed("*.optim.*", "*.max_tokens_per_rank", "run.*", "checkpoint.*", "tracking.*", "runtime.*"),
    *_allowed("placement.*", "schedule.*"),
    *_allowed("data.validation", "data.num_workers", "data.prefetch_factor", "data.max_bad_rows"),
    *_allowed(
        "environment.timeout_seconds", "environment.tool_timeout_seconds", "environment.max_concurrent"
    ),
    *_allowed("reward.*.workers", "reward.*.timeout_seconds", "reward.*.max_memory_gb"),
    ("*", "warned", "steps from here on use the new value"),
)
"""The first pattern that fits a key decides."""
UNSET = "unset"
ROLES = ("actor", "ref", "critic", "teacher", "reward_model")
"""Tables of the config that are roles."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that is not what it was."""

    key: str
    was: Any
    now: Any
    verdict: Verdict
    why: str = ""

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.key}: {_shown(self.was)} -> {_shown(self.now)} ({self.verdict}{why})"


def differences(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    roles: Collection[str] | None = None,
    movable: Collection[str] = (),
) -> list[Difference]:
    """Return the keys that differ between two configs as plain data, in the order of the tables.

    If a backend changed, options of the same name in both backends are compared.

    Args:
        was: the config then.
        now: the config now.
        roles: the roles that the run had then; tables of other roles are not compared. None: all roles.
        movable: roles whose engine may change, because the new one reads what the old one saved.
    """
    before, after = _flat(was), _flat(now)
    _align_backends(before, after)
    new = set() if roles is None else set(ROLES) - set(roles)
    return [
        Difference(key, before.get(key, UNSET), after.get(key, UNSET), *_judged(key, new, movable))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, UNSET) != after.get(key, UNSET)
    ]


def _align_backends(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Reduce the option tables of a changed backend to their common options, under the name of the new one.

    The backend's own key reports the change; options of the old backend that are unset now add nothing.
    """
    for key in [
        key for key in before if key.endswith(".backend") and after.get(key, before[key]) != before[key]
    ]:
        parent = key.removesuffix("backend")
        old, new = (f"{parent}{str(side[key]).rpartition(':')[2]}." for side in (before, after))
        if old == new:
            continue
        was = {name: before.pop(name) for name in [name for name in before if name.startswith(old)]}
        moved = {new + name.removeprefix(old): value for name, value in was.items()}
        for name in [name for name in after if name.startswith(new) and name not in moved]:
            before.pop(name, None)
            del after[name]
        before |= {name: value for name, value in moved.items() if name in after}


def _judged(key: str, new: Collection[str], movable: Collection[str]) -> tuple[Verdict, str]:
    role, _, rest = key.partition(".")
    if role in new:
        return "warned", "the run had no such role"
    if rest == "backend" and role in movable:
        return "warned", "another engine computes the same with other roundings"
    return judge(key)


def judge(key: str) -> tuple[Verdict, str]:
    """Return whether a change of ``key`` is allowed, warned about or refused, and why."""
    return next((verdict, why) for pattern, verdict, why in RULES if fnmatch.fnmatchcase(key, pattern))


def check(found: Sequence[Difference], force: Sequence[str]) -> list[Difference]:
    """Return the differences to report.

    Args:
        found: all differences.
        force: keys, or tables, whose refused changes are wanted.

    Raises:
        ConfigError: a refused difference is not forced, or ``force`` names what did not change.
    """
    problems = [
        f"--force {key}: nothing of that name changed.{did_you_mean(key, [d.key for d in found])}"
        for key in force
        if not any(_covers(key, d.key) for d in found)
    ]
    for difference in found:
        if difference.verdict == "refused" and not any(_covers(key, difference.key) for key in force):
            problems.append(
                f"{difference.key}: the checkpoint was written with {_shown(difference.was)}, now it is "
                f"{_shown(difference.now)}; {difference.why}. Put the old value back, or say that you mean it: "
                f"--force {difference.key}"
            )
    if problems:
        raise ConfigError(problems)
    return list(found)


def _covers(forced: str, key: str) -> bool:
    return key == forced or key.startswith(f"{forced}.")


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key_text(path): value for path, value in leaves(dict(data))}


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
