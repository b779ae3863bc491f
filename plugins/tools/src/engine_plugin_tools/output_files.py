"""Files that commands write where their user asked for."""

from __future__ import annotations

from pathlib import Path

from engine_core.errors import EnvironmentProblem


def write_output(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        EnvironmentProblem: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(
            f"'{path}' cannot be written: {error.strerror}. Choose another place."
        ) from error
