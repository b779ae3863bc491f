"""The table ``[reward.code]``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine_core.specs import Options


class CodeOptions(Options):
    """``[reward.code]``: runs the program in a response against the tests of its row, in a sandbox."""

    chooses = {"language": "code_languages"}
    language: str = "python"
    """Language of the programs, by name; others come from plugins (``engine.code_languages``)."""
    min_isolation: Literal["limits", "landlock", "namespaces", "bubblewrap"] = "landlock"
    """The run does not start where this machine's sandbox is weaker. The strongest that there is is used anyway."""
    block: Literal["last", "first", "whole"] = "last"
    """The program: the last or the first fenced block of the response, or the whole response."""
    template: str = "{code}"
    """What is run: ``{code}`` stands for the program. For example ``def f(x): return {code}``."""
    prelude: str = ""
    """Code before it, such as ``from typing import *``."""
    score: Literal["share", "all"] = "share"
    """The reward is the share of tests that pass, or 1 if all do and 0 otherwise; the latter stops at the first that fails."""
    max_tests: Annotated[int, Field(ge=0)] = 0
    """Only the first so many tests of a row; 0: all."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """Largest difference of floating-point numbers, absolute, or relative where that is more."""
    test_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Wall-clock time for one test."""
    total_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time for all tests of a response; what is not run then has failed. Default: half of `timeout_seconds` of the ``[[reward]]``, and at most nine tenths of that."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Address space of one process, MiB."""
    output_kb: Annotated[int, Field(ge=1, le=65536)] = 256
    """What a program may print, KiB; more ends it."""
    disk_mb: Annotated[int, Field(ge=0, le=4096)] = 16
    """Size of a program's own empty folder, MiB, in memory; 0: none. Only from ``namespaces`` on, below that files cannot be written."""
    max_processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes (with more than one: and threads) of a program at the same time; more than one needs ``namespaces``."""
    readable: list[str] = []
    """Further files and folders that programs may read, absolute, such as that of an installed package."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.template.count("{code}") != 1:
            raise ValueError("template must contain {code} once.")
        if relative := [path for path in self.readable if not path.startswith("/")]:
            raise ValueError(f"readable: '{relative[0]}' must be absolute.")
        weak = self.min_isolation in ("limits", "landlock")
        if self.max_processes > 1 and weak:
            raise ValueError(
                f"max_processes = {self.max_processes} needs min_isolation = 'namespaces' or better, got '{self.min_isolation}'."
            )
        return self
