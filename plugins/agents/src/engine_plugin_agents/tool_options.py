"""The table ``[environment.tools]``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine_core.specs import Options


class ToolsOptions(Options):
    """``[environment.tools]``: a dialogue in which the policy calls tools, until a turn without a call."""

    tools: list[Literal["python", "bash"]] = []
    """Tools that run code of the policy in a sandbox, which keeps its state until the episode ends. ``python``: variables last from call to call. ``bash``: files, variables and the current folder last. It needs the sandbox ``namespaces``. Both need ``pip install 'engine-plugin-agents[sandbox]'``."""
    min_isolation: Literal["limits", "landlock", "namespaces"] = "landlock"
    """Weakest sandbox that the run accepts. The run does not start if this machine supports only a weaker sandbox. The run always uses the strongest sandbox of the machine."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Maximum address space of each process in the sandbox, in MiB. ``bash`` may start 32 processes."""
    disk_mb: Annotated[int, Field(ge=1, le=4096)] = 16
    """Size of the folder in memory, in MiB, that each tool has in the sandbox ``namespaces``. Weaker sandboxes allow no writing of files."""
    readable: list[str] = []
    """Absolute paths of additional files and folders that the tools may read, such as the folder of an installed package."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.tools:
            raise ValueError('names no tool: set tools = ["python"], for example.')
        if twice := [name for name in self.tools if self.tools.count(name) > 1]:
            raise ValueError(f"tools: '{twice[0]}' is named twice.")
        if relative := [path for path in self.readable if not path.startswith("/")]:
            raise ValueError(f"readable: '{relative[0]}' must be absolute.")
        return self
