"""The table ``[environment.tools]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from engine_core.specs import Options


def _absolute_files(command: list[str], info: ValidationInfo) -> list[str]:
    folder = Path(
        (info.context or {}).get("folder") or "."
    ).absolute()  # links are kept: that of a venv matters
    return [str(folder / part) if (folder / part).is_file() else part for part in command]


Arguments = Annotated[list[str], AfterValidator(_absolute_files)]
"""A program and its arguments. An argument that names a file in the run file's folder becomes its absolute path."""


class McpServer(Options):
    """``[environment.tools.mcp.NAME]``: an MCP server, one for all episodes of a run. Needs ``pip install 'engine-plugin-agents[mcp]'``."""

    command: Arguments = []
    """Program and arguments of a server that talks over stdin and stdout. An argument that names a file in the run file's folder becomes its absolute path."""
    url: str = ""
    """Address of a server that runs already (streamable HTTP), such as ``http://127.0.0.1:8000/mcp``."""
    only: list[str] = []
    """Tools of the server that the policy may call; default: all."""
    variables: list[str] = []
    """Environment variables that the command receives, by name, in addition to ``PATH``, ``HOME`` and ``USER``."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("needs either command or url.")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: '{self.url}' must begin with http:// or https://.")
        return self


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

    mcp: dict[str, McpServer] = {}
    """MCP servers, by a name of yours: ``[environment.tools.mcp.NAME]``. The policy sees their tools by the names that the servers give."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not (self.tools or self.mcp):
            raise ValueError('names no tool: set tools = ["python"], for example, or a server in mcp.')
        if twice := [name for name in self.tools if self.tools.count(name) > 1]:
            raise ValueError(f"tools: '{twice[0]}' is named twice.")
        if relative := [path for path in self.readable if not path.startswith("/")]:
            raise ValueError(f"readable: '{relative[0]}' must be absolute.")
        return self
