"""The messages for what pydantic found: file and line, key, value, what was expected, who owns the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.config.read import Origin, Path_, RawConfig, key_text
from engine_core.redaction import secrets_in

if TYPE_CHECKING:
    from pydantic import ValidationError

_EXPECTED = {
    "string_type": "a text in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a text that matches {pattern}",
}


@dataclass(frozen=True)
class Problem:
    """One line of a ConfigError, sorted by where it stands."""

    path: Path_
    text: str

    def line(self, raw: RawConfig) -> str:
        """Return the message with its place: ``run.toml:14: actor.optim.lr: ...``."""
        return place_of_path(raw.origin(self.path), self.path) + self.text


def place_of_path(origin: Origin | None, path: Path_) -> str:
    """Return ``place_of`` a path; of an option in a file as the file writes it: ``reward.math.precision`` for the reward `math`."""
    of_option = path[:1] in (("reward",), ("stage",)) and len(path) > 3 and path[1] == path[2]
    if of_option and origin is not None and origin.line:
        path = (path[0], *path[2:])
    return place_of(origin, key_text(path))


def place_of(origin: Origin | None, key: str) -> str:
    """``run.toml:14: actor.optim.lr: ``; of an override of this very key ``--set actor.optim.lr: ``, which names it."""
    if origin is None:
        return f"{key}: "
    return f"{origin}: " if origin.override == key else f"{origin}: {key}: "


def placed(line: str, raw: RawConfig, only_known: bool = False) -> str:
    """Return ``KEY: message`` with its file and line before it: those of the key, else of the table around it.

    Args:
        line: of an error.
        raw: where its keys were set.
        only_known: return lines unchanged that begin with no key that was set.
    """
    key = line.split(":")[0].split(" ")[0]
    origin = raw.origin(key.split("."))
    if origin is None:
        if only_known:
            return line
        return f"{raw.files[-1]}: {line}" if raw.files else line
    return f"{origin}: {line.removeprefix(f'{key}: ') if origin.override == key else line}"


def in_order(problems: Sequence[Problem], raw: RawConfig) -> list[str]:
    """Their lines: by file and line, then those of the environment and overrides."""

    def place(problem: Problem) -> tuple[bool, str, int]:
        """Return the sort key of a problem: its file and line."""
        origin = raw.origin(problem.path) or Origin()
        return not origin.line, origin.file or "", origin.line or 0

    return list(dict.fromkeys(problem.line(raw) for problem in sorted(problems, key=place)))


def shown(value: Any, path: Path_, raw: RawConfig) -> str:
    """Return a value for a message: short, without secrets."""
    origin = raw.origin(path)
    if (origin and origin.env) or (path and any(secrets_in({path[-1]: value}))):
        return "a value that is not shown"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def located(error: ValidationError, data: Any) -> dict[Path_, tuple[Any, list[Any]]]:
    """Return pydantic's findings by the key in ``data``: the value, and the details of each finding."""
    found: dict[Path_, tuple[Any, list[Any]]] = {}
    for detail in error.errors(include_url=False):
        path, value = _locate(data, detail["loc"], detail["type"] == "missing")
        found.setdefault(path, (value, []))[1].append(detail)
    return found


def _locate(data: Any, loc: Sequence[int | str], missing: bool) -> tuple[Path_, Any]:
    """Return the part of pydantic's location that exists in the data, with names of list entries."""
    path: list[str] = []
    node = data
    for part in loc:
        if isinstance(node, dict) and part in node:
            path.append(str(part))
            node = node[str(part)]
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
            name = node.get("name") if isinstance(node, dict) else None
            path.append(name if isinstance(name, str) else str(part))
        else:
            if missing and isinstance(part, str):
                path.append(part)
            break
    return tuple(path), node


def sentence(value: Any, path: Path_, details: list[Any], raw: RawConfig) -> str:
    """Return what is wrong with a value: ``got '8', expected a number.``."""
    kinds = {detail["type"] for detail in details}
    if kinds == {"missing"}:
        return "too few entries." if isinstance(value, list) else "missing, and it has no default."
    got = f"got {shown(value, path, raw)}"
    if errors := [d["ctx"]["error"] for d in details if d["type"] in ("value_error", "assertion_error")]:
        worded = str(errors[0])  # by the author of the model
        return f"{got}: {worded}" if worded.endswith((".", "!", "?")) else f"{got}: {worded}."
    expected = " or ".join(dict.fromkeys(expectation(detail) for detail in details))
    origin, quoted = raw.origin(path), ""
    if "string_type" in kinds and origin and not origin.file:
        quoted = f" (a text that looks like something else needs its own quotes: '\"{value}\"')"
    if path[:1] == ("schedule",) and "list_type" in kinds:
        expected += " of steps and values, such as [[1, 1e-4], [100, 1e-5]]"
    elif kinds == {"list_type"} and isinstance(value, dict):
        expected += f" of tables, each below its own header: [[{key_text(path)}]]"
        inner = [
            str(at) for key, at in raw.origins.items() if key.startswith(f"{key_text(path)}.") and not at.file
        ]
        expected += f", with the entry that '{inner[0]}' names" if inner else ""
    return f"{got}, expected {expected}{quoted}."


def expectation(detail: Any) -> str:
    """Return what a value should have been, from one of the errors of pydantic."""
    if template := _EXPECTED.get(detail["type"]):
        return template.format(**detail.get("ctx", {}))
    message = str(detail["msg"]).removeprefix("Input should be ")
    return message[:1].lower() + message[1:]
