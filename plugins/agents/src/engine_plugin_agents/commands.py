"""A harness that is a command: one process for each episode, in an empty folder, without a shell."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import re
import signal
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from engine_core.marked_processes import MARK, kill_marked
from engine_core.temporary_folder import TemporaryFolder

TAIL_BYTES = 16 * 1024
"""The part of an output that is kept: its end."""
MESSAGE_CHARACTERS = 300
MOST_BYTES = 128 * 1024 - 1
"""Of one argument or variable of a process, by Linux."""
PIPE_SECONDS = 1.0


async def run_command(
    row: Mapping[str, Any], base_url: str, api_key: str, command: Sequence[str], reward: str
) -> dict[str, float] | None:
    """Run a command that talks to the policy endpoint, and return its reward.

    The process and its children are killed when this function ends, also if it is cancelled. If the process has not
    ended by then, so are those of its children that lead a session.

    Args:
        row: fills ``{column}`` in the arguments; the process reads it as JSON in ``EPISODE_ROW``.
        base_url: address of the endpoint, in ``OPENAI_BASE_URL``; for ``ANTHROPIC_BASE_URL`` without ``/v1``.
        api_key: in ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY``.
        command: program and arguments.
        reward: ``stdout``: the last line of the output is the reward; ``none``: ``[[reward]]`` judges.

    Raises:
        RuntimeError: the process has failed, its last line is no number, or the row is too long for it.
        OSError: it cannot be started.
    """
    filled = [re.sub(r"\{(\w+)\}", lambda found: str(row.get(found[1], found[0])), part) for part in command]
    variables = os.environ | {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        # half of a surrogate pair becomes its escape
        "EPISODE_ROW": json.dumps(row, default=str, ensure_ascii=False)
        .encode("utf-8", "backslashreplace")
        .decode(),
        MARK: uuid.uuid4().hex,
        **_without_proxy("127.0.0.1"),
    }
    folder = TemporaryFolder("episode-")
    output, errors = _Tail(), _Tail()
    try:
        try:
            process = await _started(filled, folder.path, variables, output, errors)
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            size = len(variables["EPISODE_ROW"].encode())
            raise RuntimeError(
                f"{command[0]} cannot be started: its row is too long. A variable and an argument have at most "
                f"{MOST_BYTES} bytes each; EPISODE_ROW has {size}. Shorten the row, or use a Python harness"
            ) from error
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.returncode is None:
                await asyncio.to_thread(kill_marked, {variables[MARK]})
            await asyncio.wait({output.ended, errors.ended}, timeout=PIPE_SECONDS)
    finally:
        output.close()
        errors.close()
        folder.remove()
    if process.returncode:
        said = (errors.text or output.text)[-MESSAGE_CHARACTERS:]
        raise RuntimeError(f"{command[0]} ended with the exit status {process.returncode}: {said}")
    if reward == "none":
        return None
    last = (output.text.splitlines() or [""])[-1]
    with contextlib.suppress(ValueError):
        if math.isfinite(float(last)):
            return {"harness": float(last)}
    raise RuntimeError(
        f"the last line of the output of {command[0]} must be a number, the reward; got {last!r:.60}"
    )


def _without_proxy(host: str) -> dict[str, str]:
    """Return the variables that make clients ask ``host`` directly, whatever proxies the environment has."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or host
    if hosts not in ("*", host):
        hosts += f",{host}"
    return dict.fromkeys(("no_proxy", "NO_PROXY"), hosts)


async def _started(
    command: Sequence[str], folder: str, variables: Mapping[str, str], output: _Tail, errors: _Tail
) -> asyncio.subprocess.Process:
    """Start a process in a new process group. Its pipes are not asyncio's, which waits for children that hold them."""
    ends: list[int] = []
    try:
        ends += [await output.open(), await errors.open()]
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=ends[0],
            stderr=ends[1],
            cwd=folder,
            env=variables,
            start_new_session=True,
        )
    finally:
        for end in ends:
            os.close(end)


class _Tail(asyncio.Protocol):
    """The end of what a process writes into a pipe."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept = b""
        self._transport: asyncio.BaseTransport | None = None

    @property
    def text(self) -> str:
        """The last bytes, without white space around them."""
        return self._kept.decode(errors="replace").strip()

    async def open(self) -> int:
        """Return the end of a new pipe for the process."""
        read, write = os.pipe()
        pipe = os.fdopen(read, "rb")
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        return write

    def close(self) -> None:
        """Close the pipe."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Keep the last bytes."""
        self._kept = (self._kept + data)[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        """Note that nothing follows."""
        if not self.ended.done():
            self.ended.set_result(None)
