"""What pydantic found, in our words: file and line, key, value, what was expected, who owns the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.config.read import RawConfig, key_text
from engine_core.redaction import secrets_in

if TYPE_CHECKING:
    from pydantic import ValidationError

Path_ = tuple[str, ...]

_EXPECTED = {
    "string_type": "a text in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "path_type": "a path in quotes",
}


@dataclass(frozen=True)
class Problem:
    """One line of a ConfigError, sorted by where it stands."""

    path: Path_
    text: str

    def line(self, raw: RawConfig) -> str:
        """``run.toml:14: actor.optim.lr: ...``"""
        origin = raw.origin(self.path)
        where = f"{origin}: " if origin else ""
        return f"{where}{key_text(self.path)}: {self.text}"


def in_order(problems: Sequence[Problem], raw: RawConfig) -> list[str]:
    """Their lines: by file and line, then those of the environment and overrides."""

    def place(problem: Problem) -> tuple[bool, str, int]:
        origin = raw.origin(problem.path)
        return (
            origin is None or not origin.line,
            (origin and origin.file) or "",
            (origin and origin.line) or 0,
        )

    return list(dict.fromkeys(problem.line(raw) for problem in sorted(problems, key=place)))


def shown(value: Any, path: Path_, raw: RawConfig) -> str:
    """A value for a message: short, and nothing that may be a secret."""
    origin = raw.origin(path)
    if (origin and origin.env) or (path and any(secrets_in({path[-1]: value}))):
        return "a value that is not shown"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def type_problems(
    error: ValidationError, base: Path_, data: Any, raw: RawConfig, owner: str
) -> list[Problem]:
    """Everything in ``error`` but unknown keys, one problem a key.

    Args:
        base: path of the table that was validated.
        data: that table.
        owner: the end of each message: whose table it is, and how to see its keys.
    """
    found: dict[Path_, list[Any]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] != "extra_forbidden":
            path, value = _locate(data, detail["loc"], detail["type"] == "missing")
            found.setdefault(base + path, [value]).append(detail)
    problems = []
    for path, (value, *details) in found.items():
        problems.append(Problem(path, _sentence(value, path, details, raw) + owner))
    return problems


def unknown_keys(error: ValidationError, data: Any) -> list[Path_]:
    """Paths of keys that no model has."""
    return [
        _locate(data, e["loc"], False)[0]
        for e in error.errors(include_url=False)
        if e["type"] == "extra_forbidden"
    ]


def _locate(data: Any, loc: Sequence[int | str], missing: bool) -> tuple[Path_, Any]:
    """The part of pydantic's location that exists in the data, list entries by their names."""
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


def _sentence(value: Any, path: Path_, details: list[Any], raw: RawConfig) -> str:
    kinds = {detail["type"] for detail in details}
    if kinds == {"missing"}:
        return "too few entries." if isinstance(value, list) else "missing, and it has no default."
    got = f"got {shown(value, path, raw)}"
    if errors := [d["ctx"]["error"] for d in details if d["type"] in ("value_error", "assertion_error")]:
        return f"{got}: {errors[0]}"  # the author of the model worded it
    expected = " or ".join(dict.fromkeys(_expectation(detail) for detail in details))
    origin = raw.origin(path)
    quoted = ""
    if "string_type" in kinds and origin and not origin.file:
        quoted = f" (a text that looks like something else needs quotes of its own: '\"{value}\"')"
    return f"{got}, expected {expected}{quoted}."


def _expectation(detail: Any) -> str:
    template = _EXPECTED.get(detail["type"])
    if template is None:
        message = str(detail["msg"]).removeprefix("Input should be ")
        return message[:1].lower() + message[1:]
    return template.format(**detail.get("ctx", {}))
