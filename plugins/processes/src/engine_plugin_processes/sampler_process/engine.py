"""A rollout engine that represents one or several engines in worker processes.

The processes form a ``WorkerPool``. Requests are sent as a ``Flow``, weights over a transport. ``Replacements``
replaces a lost process and sends it the current weights. Lost requests are sent again, and each is answered exactly once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import RolloutEngine
from engine_core.data import tokenizer_hash
from engine_core.errors import (
    ConfigError,
    EngineError,
    EnvironmentProblem,
    PluginError,
    SamplerLost,
    TrainingFailed,
    WorkerLost,
)
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_processes import foreign_interpreter
from engine_plugin_processes.flow import Flow
from engine_plugin_processes.placement import Slice
from engine_plugin_processes.replacement import Replacements
from engine_plugin_processes.sampler_process.weights import Stream, Weights
from engine_plugin_processes.starting import portable_path
from engine_plugin_processes.worker_group import RemoteWorkerGroup
from engine_plugin_processes.worker_pool import WorkerPool
from engine_plugin_processes.worker_process import WorkerHandle

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.plugins.plugin_set import Plugin
    from engine_core.types import Request, Rollout

STEP_SECONDS = 0.05  # time that a step waits for a rollout: the caller may have more requests
TICK_SECONDS = 0.05
NOT_INHERITED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ENGINE_TOKEN", "ENGINE_FAULT"),
)
"""Variables of the owner that an engine would take for its own, or does not need."""

log = logging.getLogger("engine")


class SamplerEngine(RolloutEngine):
    """The sampler of ``[rollout.process]``; ``RolloutEngine`` describes its methods. ``build`` is called before the others.

    The constructor starts the processes, which load the engine's libraries in the background.

    Args:
        config: the ``[rollout]`` table with its ``process``.
        model_config: the ``[model]`` table.
        context: context of the owning worker; ``context.live["tokenizer"]`` is the run's tokenizer.
        source: streams the current weights to a replaced process; without it updates are kept in host memory.

    Raises:
        ConfigError: there are fewer devices than engines, or the interpreter does not start. No process is left.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: ModelConfig,
        context: WorkerContext,
        source: Callable[[], Stream] | None = None,
    ) -> None:
        super().__init__(config, model_config, context)
        self.settings = config.process or ProcessConfig()
        self.python = self.settings.interpreter
        self.devices = devices(context.device, self.settings.engines, context.world_size)
        self._asked: dict[str, Request] = {}  # not yet returned
        self._arrived: list[Rollout] = []
        self._changed = threading.Condition()
        self._news = False  # a sampler rests, has failed or was lost
        self._paused = ""  # the mode
        self._asleep: tuple[str, ...] | None = None  # parts that stay awake; None: not asleep
        self._label = ""  # of the first process's engine
        self._tokenizer: Any = (context.live or {}).get("tokenizer")
        self._folder = TemporaryFolder("sampler-")
        self._closers: list[Callable[[], None]] = [self._folder.remove]
        try:
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(self._folder.path)
            self._start(source)
        except BaseException:
            self.close()
            raise

    def build(self, config: RolloutConfig) -> SamplerEngine:
        """Build the engines, all at the same time; return this one.

        Args:
            config: the ``[rollout]`` table of the constructor; memory may have been planned since.

        Raises:
            EngineError: a process cannot build its engine; the message says why. No process is left.
        """
        self.config = config
        try:
            self._build_all()
        except BaseException:
            self.close()
            raise
        return self

    @property
    def label(self) -> str:
        """The engine's label, with the interpreter and the number of processes."""
        count = "" if len(self.devices) == 1 else f", one of {len(self.devices)}"
        return f"{self._label} (in a process of {self.python}{count})"

    # -- requests -----------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose rollout has not been returned."""
        return len(self._asked)

    def add(self, requests: Sequence[Request]) -> None:
        """Send requests to the processes; raise ``ValueError`` for an id that is queued or occurs twice."""
        known = set(self._asked)
        for request in requests:
            if request.id in known:
                raise ValueError(f"Request '{request.id}' is queued already. Request ids must be distinct.")
            known.add(request.id)
        try:
            self._present()
            self.group.call("advance", requests=list(requests), rounds=0).result()
        except WorkerLost as loss:  # its requests are sent again
            self._check_replaced(loss)
        except BaseException:  # refused, or a signal: the processes may have them
            self.group.call("advance", dropped=[request.id for request in requests], rounds=0)
            raise
        self._asked |= {request.id: request for request in requests}

    def step(self) -> list[Rollout]:
        """Return the rollouts that have arrived; wait up to ``STEP_SECONDS`` for one.

        Raises:
            RuntimeError: the sampler is paused.
            DataError: a process may not have all of the current weights.
        """
        if self._paused:
            raise RuntimeError("The sampler is paused; call resume() first.")
        if not self._asked:
            return []
        self._weights.check_complete()
        self._present()
        if self.flow.resting and self.flow.error is None:
            self.flow.go()
        with self._changed:
            self._changed.wait_for(lambda: self._news, STEP_SECONDS)
            self._news = False
        found = self._taken(lambda id: True)
        if not found and self.flow.error is not None:
            error, self.flow.error = self.flow.error, None
            if not isinstance(error, WorkerLost):
                raise error
            self._check_replaced(error)
        return found

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        """Stop requests; return a rollout for each known one, even if its process is lost meanwhile."""
        mine = {id: self._asked[id] for id in ids if id in self._asked}
        if not mine:
            return []
        stopped: list[Rollout] = []
        if self.replacements.present and self.pool.broken is None:
            try:
                stopped = self.group.call("advance", stopped=list(mine), rounds=0).result()
            except WorkerLost as loss:  # its part of these aborted requests is lost, too
                log.warning("A sampler was lost in an abort: %s", loss)
        self.group.forget(mine)
        found = {rollout.request_id: rollout for rollout in stopped}
        found |= {rollout.request_id: rollout for rollout in self._taken(mine.__contains__)}
        for id in mine:
            self._asked.pop(id, None)
        if not self._asked:
            self.flow.error = None  # error of an aborted request
        return [found.get(id) or request.unsampled() for id, request in mine.items()]

    def _taken(self, wanted: Callable[[str], bool]) -> list[Rollout]:
        """Remove the wanted rollouts from those that have arrived, and return them."""
        with self._changed:
            found = [rollout for rollout in self._arrived if wanted(rollout.request_id)]
            self._arrived = [rollout for rollout in self._arrived if not wanted(rollout.request_id)]
        return [rollout for rollout in found if self._asked.pop(rollout.request_id, None) is not None]

    def _tell(self, rollouts: Sequence[Rollout] = ()) -> None:
        """Take rollouts of the flow, or let ``step`` look at it; called in a thread that reads answers."""
        with self._changed:
            self._arrived += rollouts
            self._news = True
            self._changed.notify_all()

    def pause(self, mode: str = "drain") -> None:
        """Pause every process."""
        self._call("pause", mode=mode)
        self._paused = mode

    def resume(self) -> None:
        """Resume every process."""
        self._call("resume")
        self._paused = ""

    # -- weights and device memory ------------------------------------------

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Update every engine with weights [D_1, D_2, ...]; replace a lost process; return the checksum of the first.

        Raises:
            RuntimeError: the sampler's weights are asleep.
        """
        if self._asleep is not None and "weights" not in self._asleep:
            raise RuntimeError("The sampler is asleep: its weights cannot be updated. Call wake() first.")
        ranks = self._present()
        send: Callable[[Sequence[int]], str]
        send = partial(self._weights.update, stream=stream, version=version)
        while True:
            try:
                found = send(ranks)
                break
            except TrainingFailed as error:
                if not self._weights.known:  # the stream's own
                    raise
                self._check_lost(ranks, error)
            ranks, send = self._present(), self._weights.again
        self.version = version
        return found

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Release device memory in every process."""
        self._call("sleep", keep=list(keep))
        self._asleep = tuple(keep)

    def wake(self, only: Sequence[str] | None = None) -> None:
        """Restore device memory in every process."""
        self._call("wake", only=None if only is None else list(only))
        if self._asleep is not None:
            kept = {*self._asleep, *(only or ())}
            self._asleep = None if only is None else tuple(sorted(kept))

    def close(self) -> None:
        """End the processes and drop all requests."""
        while self._closers:
            self._closers.pop()()
        self._asked.clear()
        self._arrived.clear()

    # -- the processes ------------------------------------------------------

    def _call(self, method: str, **plain: Any) -> Any:
        """Call a method of every engine; retry if a process is lost meanwhile."""
        while True:
            self._present()
            try:
                return self.group.call(method, **plain).result()
            except WorkerLost as loss:
                self._check_replaced(loss)

    def _present(self) -> list[int]:
        """Return the ranks of the available processes; wait for one if all are being replaced.

        Raises:
            SamplerLost: processes were lost too often.
            EngineError: one cannot be started again.
        """
        while True:
            if joined := self.replacements.join():
                self._bring_in(joined)
            if self.pool.broken is not None:
                self._check_replaced(self.pool.broken)
            if present := self.replacements.present:
                return present
            if self.replacements.failure is not None:
                raise _start_failure(self.replacements.failure, self.python)
            time.sleep(TICK_SECONDS)

    def _bring_in(self, ranks: list[int]) -> None:
        """Bring new processes to the current weights and the current paused or sleeping state."""
        incomplete = self._weights.incomplete
        while ranks and self.pool.broken is None:
            try:
                if self._weights.known:
                    self._weights.again(ranks)
                if self._paused:
                    self._to(ranks, "pause", mode="keep")
                if self._asleep is not None:
                    self._to(ranks, "sleep", keep=list(self._asleep))
                return
            except TrainingFailed as error:
                self._check_lost(ranks, error)
                ranks = [rank for rank in ranks if rank in self.replacements.present]
        self._weights.incomplete = incomplete  # all were lost: nothing has changed for the others

    def _check_lost(self, ranks: Sequence[int], error: TrainingFailed) -> None:
        """Raise the error of an update unless one of these processes counts as lost in time."""
        if not self.replacements.lost_one_of(ranks) and self.pool.broken is None:
            raise error

    def _check_replaced(self, loss: WorkerLost) -> None:
        """Raise ``SamplerLost`` unless the lost process is being replaced."""
        if self.pool.broken is None and self.replacements.goes_on_without(loss):
            return
        self.pool.close()
        chosen = self.settings.max_restarts == "auto" and not self.replacements.budget
        raise SamplerLost(
            f"Lost the sampler {self.context.role}[{self.context.rank}] on {socket.gethostname()}, which was started again "
            f"{self.replacements.budget} times (rollout.process.max_restarts): {loss.cause}"
            + (" With several processes no sampler is started again unless the key is set." if chosen else "")
        )

    def _start(self, source: Callable[[], Stream] | None) -> None:
        """Start all processes at the same time."""
        settings, ranks = self.settings, range(len(self.devices))
        restarts = settings.restarts(self.context.world_size)
        limit = settings.startup_timeout_minutes * 60, "rollout.process.startup_timeout_minutes"
        key = "rollout.process.command_timeout_minutes"
        self.pool = WorkerPool([], settings.command_timeout_minutes * 60, key)
        self._weights = Weights(self.pool, self.context, source, restarts > 0)
        self.replacements = Replacements(
            self.pool, ranks, restarts, "rollout.process.max_restarts",
            lambda rank, attempt: (self._launch(rank), self._order(rank)),
            limit, last_too=True,
        )  # fmt: skip
        self._closers += [
            self.replacements.settle,
            self._weights.close,  # after the receivers have released its memory
            self.pool.close,
            self.replacements.close,
        ]  # fmt: skip
        for rank in ranks:
            self.pool.admit(self._launch(rank))
        orders = {rank: {**self._order(rank), "kind": "prepare"} for rank in ranks}
        self.pool.send(orders, ("rollout", "start"), deadline=limit)  # ``_build_all`` meets what fails

    def _build_all(self) -> None:
        """Have each process build its engine."""
        try:
            orders = {rank: self._order(rank) for rank in self.replacements.ranks}
            limit = self.replacements.start_limit
            self._label = self.pool.send(orders, ("rollout", "start"), deadline=limit).result()
        except WorkerLost as loss:
            if absent := foreign_interpreter.missing_distribution(loss.cause):
                raise PluginError(foreign_interpreter.without(self.python, absent)) from None
            raise PluginError(f"The sampler's process ({self.python}) does not start: {loss.cause}") from None
        except Exception as error:
            raise _start_failure(error, self.python) from None
        self.pool.may_lose = self.replacements.lost
        slices = [Slice((rank,), rank) for rank in self.replacements.ranks]
        self.group = RemoteWorkerGroup(
            self.pool, "rollout", slices, 0.0, True, replacements=self.replacements
        )
        self.flow = Flow(self.group, self._tell, self._tell)
        self._closers.append(self.flow.close)

    def _launch(self, rank: int) -> WorkerHandle:
        dropped = {name for name in os.environ if name in NOT_INHERITED or name.startswith("TORCHELASTIC_")}
        if self.settings.python:
            dropped |= set(foreign_interpreter.OF_AN_INTERPRETER)
        number = f" {rank}" if len(self.devices) > 1 else ""
        try:
            worker = WorkerHandle.start(
                rank,
                {**dict.fromkeys(dropped), **environment_for(self.devices[rank])},
                self.python,
                keeper=True,
                name=f"sampler{number}",
                heartbeat_timeout_seconds=self.settings.heartbeat_timeout_seconds,
            )
        except OSError as error:
            raise ConfigError(f"rollout.process.python: '{self.python}' does not start: {error}") from None
        worker.roles = ("rollout",)
        return worker

    def _to(self, ranks: Sequence[int], method: str, **plain: Any) -> None:
        """Call a method of some engines."""
        message = {"kind": "call", "role": "rollout", "method": method, "batch": None, "plain": plain}
        self.pool.send(dict.fromkeys(ranks, message), ("rollout", method)).result()

    def _order(self, rank: int) -> dict[str, Any]:
        """Return the command by which a process builds its engine."""
        plugins, context, config = self.context.plugins, self.context, self.config
        tokenizer, asked = self._tokenizer, self._model_plugins()
        options = {} if config.options is None else config.options.model_dump(mode="json", exclude_none=True)
        device = self.devices[rank]
        return {
            "kind": "sampler",
            "versions": foreign_interpreter.versions(),
            "rollout": config.model_dump(mode="json", exclude={"process"}),
            "steps_are_short": config.steps_are_short,
            "options": options,
            "model": self.model_config.model_dump(mode="json"),
            "modules": list(plugins.modules),
            "plugin_tables": plugins.tables,
            "root": str(plugins.root),
            "allow_code": plugins.allow_code,
            "other": bool(self.settings.python) and not asked,  # the model's plugins must load there
            "actor": context.actor if any(plugin not in plugins.named for plugin in asked) else "",
            "path": None if self.settings.python else portable_path(),
            "tokenizer": None if tokenizer is None else [self._folder.path, tokenizer_hash(tokenizer)],
            "log_level": log.getEffectiveLevel(),
            "token": self._weights.token,
            "context": {
                "role": context.role,
                "device": "cuda:0" if device.type == "cuda" else str(device),  # the only one visible to it
                # another in each process: so do requests without a seed get other tokens
                "seed": context.seed + context.rank * len(self.devices) + rank,
                "total_steps": context.total_steps,
                "deterministic": context.deterministic,
            },
        }

    def _model_plugins(self) -> list[Plugin]:
        """Return the plugins of the run that may build or register the sampler's model."""
        plugins, backend = self.context.plugins, ("train_engines", self.context.actor)
        if self.context.role != "rollout":
            return []
        asked = plugins.asked(*([backend] if backend in plugins.chosen else []))
        return [
            each
            for each in asked
            if any(hasattr(each.module, hook) for hook in foreign_interpreter.MODEL_HOOKS)
        ]


def devices(own: torch.device, count: int, world_size: int) -> list[torch.device]:
    """Return a device for each engine: the owner's and the next ones. On a CPU all engines share it.

    Raises:
        ConfigError: there are too few devices, or the pool has several ranks.
    """
    if own.type == "cpu":
        return [own] * count
    first, there = own.index or 0, torch.accelerator.device_count()
    if count > 1 and world_size > 1:
        raise ConfigError(
            f"rollout.process.engines = {count}: each of the pool's {world_size} processes has one device, and an engine on "
            "it. Remove the key; a separate pool for the sampler ([placement]) has as many engines as processes."
        )
    if count > 1 and first + count > there:
        raise ConfigError(
            f"rollout.process.engines = {count}: each needs its own device, and from {own} on there are {there - first}. Lower it."
        )
    return [own, *(torch.device(own.type, index) for index in range(first + 1, first + count))]


def environment_for(device: torch.device) -> dict[str, str]:
    """Return the environment in which a process sees only this CUDA device, as device 0; {} for other devices."""
    if device.type != "cuda":
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": visible[device.index or 0]}


def _start_failure(error: Exception, python: str) -> EngineError:
    """Return an ``EngineError`` for what an engine raised while it was built."""
    if isinstance(error, EngineError):
        error.add_note(f"In the sampler's process, {python}.")
        return error
    lacks = isinstance(error, (MemoryError, torch.OutOfMemoryError, OSError))
    text = f"The engine does not start in the sampler's process ({python}): {type(error).__name__}: {error}"
    made = EnvironmentProblem(text) if lacks else PluginError(text)
    made.__cause__ = error.__cause__
    return made
