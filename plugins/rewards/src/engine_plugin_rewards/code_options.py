"""The table ``[reward.code]``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine_core.specs import Options


class CodeOptions(Options):
    """``[reward.code]``: runs the program of a response against the tests of the row, in a sandbox."""

    min_isolation: Literal["limits", "landlock", "namespaces"] = "landlock"
    """Weakest sandbox that the run accepts. The run does not start if this machine supports only a weaker sandbox. The run always uses the strongest sandbox of the machine."""
    block: Literal["last", "first", "whole"] = "last"
    """Part of the response that is the program: the ``last`` or the ``first`` fenced block, or the ``whole`` response."""
    template: str = "{code}"
    """Text that is run; ``{code}`` is replaced by the program. For example ``def f(x): return {code}``."""
    prelude: str = ""
    """Code that is put before the program, such as ``from typing import *``."""
    score: Literal["share", "all"] = "share"
    """``share``: the reward is the share of tests that pass. ``all``: the reward is 1 if all tests pass, else 0; testing stops at the first failure."""
    max_tests: Annotated[int, Field(ge=0)] = 0
    """Maximum number of tests that are run for each row, from the first test on; 0: all tests."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """Maximum difference of floating-point numbers: the absolute or the relative tolerance, whichever is larger."""
    test_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Maximum wall-clock time of one test."""
    total_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Maximum time for all tests of a response. A test that has not run by then counts as failed. Default: half of the reward's `timeout_seconds`. Maximum: nine tenths of `timeout_seconds`."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Maximum address space of one process, in MiB."""
    output_kb: Annotated[int, Field(ge=1, le=65536)] = 256
    """Maximum output of a program, in KiB. A program that prints more is killed."""
    disk_mb: Annotated[int, Field(ge=0, le=4096)] = 16
    """Size of the program's folder, in MiB; 0: no folder. Each program gets an empty folder in memory. Only the sandbox ``namespaces`` has such a folder; weaker sandboxes allow no writing of files."""
    readable: list[str] = []
    """Absolute paths of additional files and folders that programs may read, such as the folder of an installed package."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.template.count("{code}") != 1:
            raise ValueError("template must contain {code} once.")
        if relative := [path for path in self.readable if not path.startswith("/")]:
            raise ValueError(f"readable: '{relative[0]}' must be absolute.")
        return self
