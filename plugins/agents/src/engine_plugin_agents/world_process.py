"""Worlds in processes: environments of other libraries, in the interpreter that has them.

A run has a few processes for a world, each with many episodes. A process that dies or hangs takes its episodes with it;
they follow `environment.on_error`, and the next episode starts another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError
from engine_plugin_agents.child import kill_child, last_words, shorten, start_child

log = logging.getLogger("engine")

START_SECONDS = 120.0
ROWS_SECONDS = 600.0
CLOSE_SECONDS = 60.0
READY = -1
"""Id of the answer that a process gives when its world is made."""
WORLDS = Path(__file__).with_name("worlds")


class WorldError(Exception):
    """An error of a world, or the end of its process."""


class WorldProcess:
    """One process of a world.

    Args:
        kind: the module of ``worlds``, without ``_world``.
        python: its interpreter; empty: that of the run.
        options: the arguments of its ``World``.
        variables: names of environment variables that it receives.
    """

    def __init__(
        self, kind: str, python: str, options: dict[str, Any], variables: Iterable[str] = ()
    ) -> None:
        self.kind, self.python, self.options, self.variables = kind, python, options, variables
        self.lost, self._why = False, "the run has ended"
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._answered = 0.0  # when, by the clock of the loop
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._ready = self._calls[READY] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._started = asyncio.ensure_future(self._start())

    async def _start(self) -> asyncio.subprocess.Process:
        ours = () if self.python else ("PYTHONPATH",)  # another environment has its packages, not ours
        command = [self.python or sys.executable, str(WORLDS), self.kind, json.dumps(self.options)]
        try:
            process = self._process = await start_child(command, (*ours, *self.variables), self._errors)
            self._reading = asyncio.ensure_future(self._read(process))
            await asyncio.wait_for(self._ready, START_SECONDS)
        except TimeoutError:
            self.lost = True
            await kill_child(process)
            said = last_words(self._errors)
            raise WorldError(
                f"the process of {self.kind} did not start within {START_SECONDS:g} s. {said}".rstrip(". ")
            ) from None
        except BaseException:
            self.lost = True
            raise
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Deliver answers until the process ends or a line is too long."""
        assert process.stdout
        with contextlib.suppress(ValueError):
            while line := await process.stdout.readline():
                answer = json.loads(line)
                self._answered = asyncio.get_running_loop().time()
                shorten(self._errors)
                future = self._calls.get(answer["id"])
                if future and not future.done():
                    future.set_result(answer)
        self.lost = True
        await kill_child(process)
        self._why = f"the process of {self.kind} has ended: {last_words(self._errors)}"
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorldError(self._why))

    async def call(self, name: str, seconds: float | None, **arguments: Any) -> Any:
        """Make a call and return its value.

        Args:
            name: a method of ``World``.
            seconds: time limit; after it the process is killed if it has answered no call for as long. None: no limit.
            arguments: values for JSON.

        Raises:
            WorldError: the call failed, took too long, or the process has ended.
        """
        process = await asyncio.shield(self._started)
        if self.lost:
            raise WorldError(self._why)
        loop = asyncio.get_running_loop()
        id, future = next(self._ids), loop.create_future()
        self._calls[id] = future
        try:
            self._send(process, {"id": id, "call": name, "arguments": arguments})
            answer = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            assert seconds is not None
            if loop.time() - self._answered < seconds:  # it works: other calls took the time
                self._send(process, {"id": id, "cancel": True})
            else:
                self.lost = True
                await kill_child(process)
            raise WorldError(f"{self.kind} did not answer '{name}' within {seconds:g} s") from None
        except asyncio.CancelledError:
            self._send(process, {"id": id, "cancel": True})
            raise
        finally:
            del self._calls[id]
        if "error" in answer:
            raise WorldError(answer["error"])
        return answer["value"]

    def _send(self, process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
        assert process.stdin
        process.stdin.write(json.dumps(message, default=str).encode() + b"\n")

    async def close(self) -> None:
        """Kill the process."""
        self.lost = True
        self._started.cancel()
        await asyncio.wait({self._started})
        if self._process is not None:
            await kill_child(self._process)
        if self._reading is not None:
            await self._reading
        self._errors.close()


class Worlds:
    """The processes of a world, started as episodes need them.

    Args:
        make: makes a process, in the loop.
        processes: their maximum number.
    """

    def __init__(self, make: Callable[[], WorldProcess], processes: int) -> None:
        self._make, self._slots = make, processes
        self._processes: dict[int, WorldProcess] = {}
        self._episodes = itertools.count()

    @contextlib.asynccontextmanager
    async def session(self, seconds: float | None) -> AsyncIterator[Callable[..., Any]]:
        """Yield the function that makes calls of one episode: ``await call("step", text=text)``.

        Args:
            seconds: time limit of each call; None: no limit.
        """
        session = next(self._episodes)
        slot = session % self._slots
        process = self._processes.get(slot)
        if process is None or process.lost:
            old, process = process, self._make()
            self._processes[slot] = process  # before other episodes run
            if old is not None:
                await old.close()

        async def call(name: str, **arguments: Any) -> Any:
            """Call the world for this episode."""
            return await process.call(name, seconds, session=session, **arguments)

        try:
            yield call
        finally:
            if not process.lost:
                with contextlib.suppress(WorldError):  # a process that does not answer is replaced
                    await process.call("close", CLOSE_SECONDS, session=session)

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(process.close() for process in self._processes.values()))


def check_python(where: str, python: str) -> None:
    """Refuse an interpreter that does not exist.

    Args:
        where: the table, for the message.
        python: path or name; empty: the interpreter of the run.

    Raises:
        ConfigError: there is no such interpreter.
    """
    if python and shutil.which(python) is None:
        raise ConfigError(
            f"{where}.python: there is no program '{python}'. Write the path of an interpreter."
        )


def world_rows(
    kind: str,
    split: str,
    python: str,
    count: int,
    held_out: int,
    variables: Iterable[str] = (),
    **world: Any,
) -> list[dict[str, Any]]:
    """Return the rows of a data source. Held-out rows follow those of training.

    Args:
        kind: the world.
        split: ``train`` or ``validation``.
        python, count, held_out, variables: see ``RowsOptions``.
        world: the arguments of the ``World``.

    Raises:
        ConfigError: the world cannot be used, or no row is left for the held-out ones.
    """
    check_python(f"data.{kind}", python)
    rows = _rows(kind, python, count + held_out, json.dumps(world), tuple(variables))
    said = f"{len(rows)} rows; count = {count} and held_out = {held_out} ask for {count + held_out}"
    if held_out and len(rows) <= count:
        raise ConfigError(f"data.{kind}: no row is held out of {said}. Lower count.")
    if split == "train" and len(rows) < count + held_out:
        log.warning("data.%s: %s", kind, said)
    return rows[:count] if split == "train" else rows[count:]


@functools.lru_cache(maxsize=1)  # a run asks for one split after the other
def _rows(kind: str, python: str, count: int, world: str, variables: tuple[str, ...]) -> list[dict[str, Any]]:
    """Start a process of a world and return its first rows.

    Raises:
        ConfigError: the process does not start, or the call fails.
    """

    async def ask() -> list[dict[str, Any]]:
        """Make the call."""
        process = WorldProcess(kind, python, json.loads(world), variables)
        try:
            rows: list[dict[str, Any]] = await process.call("rows", ROWS_SECONDS, count=count)
            return rows
        finally:
            await process.close()

    with ThreadPoolExecutor(1) as thread:  # this thread may have a loop that runs
        try:
            return thread.submit(asyncio.run, ask()).result()
        except (WorldError, OSError) as error:
            raise ConfigError(f"data.{kind}: {error}.") from error


gymnasium_rows = functools.partial(world_rows, "gymnasium")
openenv_rows = functools.partial(world_rows, "openenv")
verifiers_rows = functools.partial(world_rows, "verifiers")
