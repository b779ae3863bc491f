"""The check of one option table outside of a run file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine_core.config.inputs import absent
from engine_core.config.read import Path_, RawConfig, key_text
from engine_core.config.wording import located, sentence
from engine_core.errors import ConfigError, did_you_mean
from engine_core.specs import InputFile, Spec


def check_table(spec: Spec, path: Path_, data: Mapping[str, Any], root: Path) -> None:
    """Check an option table with the types and the words of a run file.

    Args:
        spec: whose table it is.
        path: where it stands in a run file: ``("actor", "fast")``; a reward's after its name, ``("reward", "r", "r")``.
        data: the table.
        root: folder of the run file, for validators of the table.

    Raises:
        ConfigError: every problem of the table.
    """
    problems: list[tuple[tuple[str, ...], str]] = []
    try:
        context = {"folder": root, "allow_code": False}
        text = json.dumps(data, default=str)
        table = spec.config.model_validate_json(text, strict=True, context=context)
        files = [(key, value) for key, value in table if isinstance(value, InputFile)]
        problems = [((key,), absent(file)) for key, file in files if not Path(file).exists()]
    except ValidationError as error:
        for key, (value, details) in located(error, data).items():
            wrong = sentence(value, path + key, details, RawConfig({}))
            if details[0]["type"] == "extra_forbidden":
                wrong = f"unknown key.{did_you_mean(key[-1], spec.config.model_fields)}"
            problems.append((key, f"{wrong} Table of {spec.noun} '{path[-1]}'."))
    if problems:
        raise ConfigError([f"{key_text(path + key)}: {problem}" for key, problem in sorted(problems)])
