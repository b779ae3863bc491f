"""The tools ``python`` and ``bash``: code of the policy, in the sandbox of code rewards.

Each episode has a sandbox for each tool that it calls, from the first call to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from engine_core.errors import ConfigError
from engine_plugin_agents.calls import ToolBroken, in_thread

if TYPE_CHECKING:
    from engine_plugin_agents.tool_options import ToolsOptions
    from engine_plugin_rewards.sandbox.session import Reply, Session

Kind = Literal["python", "bash"]
ABOUT: Mapping[str, tuple[str, str]] = {
    "python": ("code", "Run Python code and return what it prints. Variables are kept for the next call."),
    "bash": ("command", "Run a shell command and return what it prints. Files and the folder are kept."),
}
"""For each tool the name of its argument, and its description for the policy."""
INSTALL = "pip install 'engine-plugin-agents[sandbox]'"


def sandbox_schema(kind: Kind) -> dict[str, Any]:
    """Return the JSON schema of a tool, as the chat template shows it."""
    argument, description = ABOUT[kind]
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {
        "type": "function",
        "function": {"name": kind, "description": description, "parameters": parameters},
    }


def sandbox_tier(options: ToolsOptions) -> str:
    """Return the tier of this machine's sandbox, for all tools of a run.

    Raises:
        ConfigError: the sandbox is not installed, or a path of `readable` cannot be shown.
        EnvironmentProblem: the sandbox is weaker than a tool needs.
    """
    try:
        from engine_plugin_rewards.code import check_readable
        from engine_plugin_rewards.sandbox import tiers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment.tools.tools: {', '.join(options.tools)} run in a sandbox, which is not installed. Try: {INSTALL}"
        ) from error
    check_readable(options.readable, "environment.tools.readable")
    if "bash" in options.tools:
        return tiers.demand("namespaces", "The tool 'bash' needs min_isolation")
    return tiers.demand(options.min_isolation, "[environment.tools] min_isolation")


class SandboxTool:
    """A tool of one episode, whose state lasts until it is closed.

    Args:
        kind: ``python`` or ``bash``.
        tier: the sandbox's tier.
        options: limits of the sandbox.
        seconds: time after which the sandbox ends by itself.
    """

    def __init__(self, kind: Kind, tier: str, options: ToolsOptions, seconds: float) -> None:
        self.kind = kind
        self._arguments = (tier, seconds, options.readable, options.memory_mb, options.disk_mb)
        self._session: Session | None = None
        self._late = False  # the last session was killed in the middle of a call

    @property
    def function(self) -> Callable[..., Any]:
        """The function for ``episode.answer_calls``."""

        async def python(code: str) -> str:
            """Run Python code and return what it printed."""
            return await self._run(code)

        async def bash(command: str) -> str:
            """Run a shell command and return what it printed."""
            return await self._run(command)

        return python if self.kind == "python" else bash

    async def _run(self, source: str) -> str:
        """Run code in the session, which begins with the first call; return its output.

        If the call is cancelled, as after `tool_timeout_seconds`, the session is killed.

        Raises:
            ToolBroken: the sandbox cannot be started.
        """
        from engine_plugin_rewards.sandbox.session import BoxProblem, Session

        note, self._late = (f"[{self.kind} was restarted: a call took too long]\n" * self._late), False
        ended = True
        try:
            if self._session is None:  # in the thread of the loop, which outlives the episode
                self._session = Session(self.kind, *self._arguments)
            reply = await in_thread(partial(self._session.run, source))
            ended = bool(reply.ended)
        except asyncio.CancelledError:
            self._late = True
            raise
        except (BoxProblem, OSError) as error:
            raise ToolBroken(f"the sandbox of the tool '{self.kind}' cannot be started: {error}") from error
        finally:
            if ended:
                self.close()
        return note + self._text(reply)

    def _text(self, reply: Reply) -> str:
        half = len(reply.output) // 2
        parts = [reply.output] if not reply.left_out else [reply.output[:half], reply.output[half:]]
        text = f"\n[{reply.left_out} bytes are left out]\n".join(
            part.decode("utf-8", "replace") for part in parts
        )
        if reply.ended:
            text = f"{text.rstrip()}\n[{self.kind} {reply.ended}; the next call begins a new session]".strip()
        return text or "[no output]"

    def close(self) -> None:
        """Kill the session; a later call begins another one."""
        if self._session is not None:
            self._session.close()
            self._session = None
