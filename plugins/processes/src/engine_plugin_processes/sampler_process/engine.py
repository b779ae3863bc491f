"""The rollout engine that stands for one in another process.

Requests go there, rollouts come back as they finish, weights go through memory that both see. When the process dies
or hangs it is started again, given the present weights, and asked again for what it had not finished; each request
is answered once, whatever happens.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import RolloutEngine
from engine_core.data import tokenizer_hash
from engine_core.errors import ConfigError, EngineError, EnvironmentProblem, PluginError, SamplerLost
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_processes import foreign_interpreter
from engine_plugin_processes.remote_errors import unpack
from engine_plugin_processes.sampler_process.memory import HostMemory, environment_for, shares_device
from engine_plugin_processes.sampler_process.process import Lost, SamplerProcess
from engine_plugin_processes.sampler_process.serve import versions
from engine_plugin_processes.sampler_process.weights import Stream, Weights
from engine_plugin_processes.starting import portable_path

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.plugins.plugin_set import Plugin
    from engine_core.types import Request, Rollout

STEP_SECONDS = 0.05  # that a step waits for a rollout: others may have more to ask
PATIENCE_SECONDS = 1.0  # for an engine in the middle of a step to answer an abort; then it is interrupted
HELLO_SECONDS = 120.0  # imports of the core and of this distribution
"""Step hooks that are asked in the sampler's process."""

log = logging.getLogger("engine")


class SamplerEngine(RolloutEngine):
    """See the module and ``RolloutEngine``.

    Args:
        config: the ``[rollout]`` table with its ``process``.
        model_config: the ``[model]`` table.
        context: of the worker that owns it; ``context.live["tokenizer"]`` is the run's tokenizer.
        source: streams the present weights anew, for a process that is started again; without it a copy of
            each update is kept in host memory.
        weights: of several engines, which whoever made them updates and closes; None: its own.
        number: among several.

    Raises:
        EngineError: the process does not start; the message says why. None is left.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: ModelConfig,
        context: WorkerContext,
        source: Callable[[], Stream] | None = None,
        weights: Weights | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(config, model_config, context)
        self.settings = config.process or ProcessConfig()
        self.python = self.settings.interpreter
        self.losses = 0  # processes that were lost
        self._asked: dict[str, Request] = {}  # not yet returned
        self._forgotten: set[str] = set()  # ids that a signal cut off while they were added
        self._done: list[Rollout] = []  # of a process that was lost since
        self._paused = ""  # the mode
        self._asleep: tuple[str, ...] | None = None  # what was kept
        self._about: Mapping[str, Any] = {}  # what the process says of its engine
        self._named = f"{context.role}[{context.rank}]" + ("" if number is None else f", engine {number},")
        self._shared = weights is not None
        self._weights = weights or Weights(
            HostMemory(HostMemory.new_file()),
            context.device if shares_device(context.device) else None,
            source,
            again=self.settings.max_restarts > 0,
        )
        self._tokenizer: Any = (context.live or {}).get("tokenizer")
        self._folder = TemporaryFolder("sampler-")
        self._open = True
        self.process: SamplerProcess | None = None
        try:
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(self._folder.path)
            if not self._shared:
                self.begin()()
        except BaseException:
            self.close()
            raise

    def begin(self) -> Callable[[], None]:
        """Start the process; what is returned waits for its engine, so that several build theirs at one time.

        Raises:
            EngineError: it does not start, here or there. Close it.
        """
        try:
            ordered = self._order_engine(self._launch())
        except Lost as lost:  # before it has said which versions it has
            if absent := foreign_interpreter.missing_distribution(str(lost)):
                raise PluginError(foreign_interpreter.without(self.python, absent)) from None
            raise self._no_start(lost) from None

        def wait() -> None:
            try:
                self._take_engine(*ordered)
            except Lost as lost:
                raise self._no_start(lost) from None

        return wait

    @property
    def label(self) -> str:
        return f"{self._about.get('label')} (in a process of {self.python})"

    @property
    def capacity(self) -> int:
        return int(self._about.get("capacity", 0))

    # -- requests -----------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._asked)

    def add(self, requests: Sequence[Request]) -> None:
        known = set(self._asked)
        for request in requests:
            if request.id in known:
                raise ValueError(
                    f"Request '{request.id}' is queued already. Requests must have distinct ids."
                )
            known.add(request.id)
        self._settle_forgotten()
        try:
            self._command("add", requests=list(requests))
        except Exception:
            raise
        except BaseException:  # a signal: whether it has them is not known
            self._forget([request.id for request in requests])
            raise
        self._asked |= {request.id: request for request in requests}

    def _forget(self, ids: Sequence[str]) -> None:
        """Have these stopped without waiting for it."""
        if self.process is not None and not self.process.lost:
            self._forgotten |= set(ids)
            self.process.send(
                {"kind": "abort", "id": self.process.next_number(), "plain": {"ids": list(ids)}}
            )

    def _settle_forgotten(self) -> None:
        """Until nothing comes any more of what was forgotten: a request of the same name is another one."""
        if self._forgotten:
            self._command("abort", ids=sorted(self._forgotten))  # answered after all that came of them
            self._gather()
            self._forgotten.clear()

    def _gather(self) -> None:
        """Take what has arrived; of what was forgotten nothing is kept."""
        if self.process is not None:
            arrived = self.process.arrived
            self._done += [arrived.popleft() for _ in range(len(arrived))]
        self._done = [rollout for rollout in self._done if rollout.request_id not in self._forgotten]

    def step(self) -> list[Rollout]:
        self.go()
        return self.collect(STEP_SECONDS)

    def go(self) -> None:
        """Have it sample, where it does not yet; nothing is waited for."""
        if self._paused:
            raise RuntimeError("The sampler is paused; call resume() first.")
        if not self._asked:
            return
        self._weights.check_whole()
        process = self._working()
        if not self._done and not process.arrived and process.idle and process.failure is None:
            process.idle, process.went = False, True
            process.send({"kind": "go"})

    def collect(self, seconds: float) -> list[Rollout]:
        """What has finished since the last call; for so long at most something is waited for."""
        if not self._asked:
            return []
        try:
            self._working().wait(self._something, seconds)
        except Lost as lost:
            self._recover(lost)
        return self._take()

    def _something(self) -> bool | None:
        process = self.process
        assert process is not None
        return bool(self._done or process.arrived or process.failure or process.idle) or None

    def _take(self) -> list[Rollout]:
        """What has arrived, each with the request's own prompt; the engine's failure where it had one."""
        process = self.process
        assert process is not None
        over = process.idle and process.went  # said after the rollouts before it
        self._gather()
        found, self._done = self._done, []
        if not found and process.failure is not None:
            failure, process.failure = process.failure, None
            raise unpack(failure, self.context.rank)
        if not found and over and self._asked:
            raise PluginError(
                f"Rollout engine {self.label} stopped with {len(self._asked)} requests unfinished, such as "
                f"'{next(iter(self._asked))}'. This is a bug of the plugin."
            )
        for rollout in found:
            if (request := self._asked.pop(rollout.request_id, None)) is not None:
                rollout.prompt = request.prompt
        return found

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        mine = [self._asked[id] for id in ids if id in self._asked]
        if not mine:
            return []
        stopped: dict[str, Rollout] = {}
        process = self.process
        if process is not None and process.ready:
            try:
                reply = self._abort_there(process, [request.id for request in mine])
                stopped = {rollout.request_id: rollout for rollout in reply}
                self._gather()
            except Lost as lost:  # whatever it had of them is gone, and nobody wants it
                log.warning("The sampler's process was lost in an abort: %s", lost)
        early = {rollout.request_id: rollout for rollout in self._done}
        gone = {request.id for request in mine}
        self._done = [rollout for rollout in self._done if rollout.request_id not in gone]
        found = []
        for request in mine:
            del self._asked[request.id]
            rollout = early.get(request.id) or stopped.get(request.id) or request.unsampled()
            rollout.prompt = request.prompt
            found.append(rollout)
        return found

    def _abort_there(self, process: SamplerProcess, ids: Sequence[str]) -> list[Rollout]:
        number = process.next_number()
        process.send({"kind": "abort", "id": number, "plain": {"ids": list(ids)}})
        reply = process.reply_to(number, PATIENCE_SECONDS)
        if reply is None:
            process.send({"kind": "interrupt"})
            reply = process.reply_to(number)
        found: list[Rollout] = self._value(reply)
        return found

    def pause(self, mode: str = "drain") -> None:
        self._command("pause", mode=mode)
        self._paused = mode

    def resume(self) -> None:
        self._command("resume")
        self._paused = ""

    # -- weights ------------------------------------------------------------

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """As the contract says; the checksum is the engine's own. A process that is lost meanwhile is given all anew."""
        (found,) = self._weights.update([self.to_update()], stream, version)
        return self.updated(found, version)

    def to_update(self) -> SamplerProcess:
        """The process, ready to take weights."""
        if self._asleep is not None and "weights" not in self._asleep:
            raise RuntimeError("The sampler is asleep: its weights cannot be updated. Call wake() first.")
        return self._working()

    def updated(self, found: str | Lost, version: int) -> str:
        """An update is over: its checksum, or the process was lost, and a new one has these weights."""
        checksum = self._recover(found) if isinstance(found, Lost) else found
        self.version = version
        return checksum

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        self._command("sleep", keep=list(keep))
        self._asleep = tuple(keep)

    def wake(self, only: Sequence[str] | None = None) -> None:
        self._command("wake", only=None if only is None else list(only))
        if self._asleep is not None:
            kept = {*self._asleep, *(only or ())}
            self._asleep = None if only is None else tuple(sorted(kept))

    # -- the process --------------------------------------------------------

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None
        if self._open:
            self._folder.remove()
            if not self._shared:
                self._weights.close()
                self._weights.host.close()
            self._open = False
        self._asked.clear()
        self._done.clear()

    def _working(self) -> SamplerProcess:
        """The process; started again where it is gone, or a signal has cut its start short."""
        if self.process is None or not self.process.ready or self.process.lost:
            cause = self.process.lost if self.process is not None else ""
            self._recover(Lost(cause or "its start was cut short"))
        assert self.process is not None
        return self.process

    def _command(self, kind: str, **plain: Any) -> Any:
        """Have a method called there; asked again of a process that is started again."""
        while True:
            process = self._working()
            try:
                return self._value(process.ask(kind, plain=plain))
            except Lost as lost:
                self._recover(lost)

    def _value(self, reply: Mapping[str, Any] | None) -> Any:
        """Of a reply; the error that it tells is raised here."""
        assert reply is not None
        if reply.get("error"):
            raise unpack(reply["error"], self.context.rank)
        return reply["value"]

    def _recover(self, lost: Lost) -> str:
        """Start again, with the present weights and all that is unfinished; the engine's checksum of the weights.

        Raises:
            SamplerLost: it was lost too often.
            EngineError: it does not start any more.
        """
        while True:
            self._bury()
            self.losses += 1
            if self.losses > self.settings.max_restarts:
                raise SamplerLost(
                    f"Lost the sampler {self._named} on {socket.gethostname()}, which was started "
                    f"again {self.settings.max_restarts} times (rollout.process.max_restarts): {lost}"
                )
            log.warning(
                "The sampler's process is lost: %s It is started again (%d of %d) and asked for %d unfinished requests.",
                lost, self.losses, self.settings.max_restarts, len(self._asked) - len(self._done),
            )  # fmt: skip
            try:
                return self._start()
            except Lost as again:
                lost = again

    def _bury(self) -> None:
        """Take from a process that is gone what it had finished."""
        if self.process is not None:
            self.process.close()
            self._gather()
            self.process = None
            self._forgotten.clear()  # the next one has not heard of them

    def _start(self) -> str:
        """A process with the engine, the weights, the requests and the state that it should have.

        Raises:
            Lost: it ended meanwhile.
            EngineError: it refuses, in its own words.
        """
        return self._take_engine(*self._order_engine(self._launch()))

    def _launch(self) -> SamplerProcess:
        settings = self.settings
        env = environment_for(self.context.device)
        try:
            self.process = process = SamplerProcess(
                self.python,
                self._weights.host.descriptor,
                env,
                settings.heartbeat_timeout_seconds,
                settings.command_timeout_minutes * 60,
                bool(settings.python),
            )
        except OSError as error:
            raise ConfigError(f"rollout.process.python: '{self.python}' does not start: {error}") from None
        return process

    def _order_engine(self, process: SamplerProcess) -> tuple[SamplerProcess, int]:
        """Have it build its engine; the number of the command."""
        self._compare(process.reply_to(0, HELLO_SECONDS))
        number = process.next_number()
        device = "cuda:0" if self.context.device.type == "cuda" else None  # the only one that it sees
        process.send({"kind": "start", "id": number, **self._order(device)})
        return process, number

    def _take_engine(self, process: SamplerProcess, number: int) -> str:
        """Once it is built, it gets all that it should have; its checksum of the weights."""
        settings = self.settings
        reply = process.reply_to(number, settings.startup_timeout_minutes * 60)
        if reply is None:
            process.lose(
                f"its engine was not built within {settings.startup_timeout_minutes:g} minutes (rollout.process.startup_timeout_minutes)"
            )
            raise Lost(process.lost)
        if reply.get("error"):
            raise _start_failure(unpack(reply["error"], self.context.rank), self.python)
        self._about = reply["value"]
        found = self._weights.push(process)
        self._restore(process)
        process.ready = True
        return found

    def _restore(self, process: SamplerProcess) -> None:
        """What was asked of the process before it."""
        finished = {rollout.request_id for rollout in self._done}
        left = [request for id, request in self._asked.items() if id not in finished]
        if left:
            self._value(process.ask("add", plain={"requests": left}))
        if self._paused:
            self._value(process.ask("pause", plain={"mode": "keep"}))
        if self._asleep is not None:
            self._value(process.ask("sleep", plain={"keep": list(self._asleep)}))

    def _order(self, device: str | None) -> dict[str, Any]:
        """What the process is told of the run."""
        plugins, context, config = self.context.plugins, self.context, self.config
        tokenizer, asked = self._tokenizer, self._model_plugins()
        options = {} if config.options is None else config.options.model_dump(mode="json", exclude_none=True)
        return {
            "rollout": config.model_dump(mode="json", exclude={"process"}),
            "steps_are_short": config.steps_are_short,
            "options": options,
            "model": self.model_config.model_dump(mode="json"),
            "modules": list(plugins.modules),
            "root": str(plugins.root),
            "allow_code": plugins.allow_code,
            "other": bool(self.settings.python) and not asked,  # plugins of the model must be there
            "actor": context.actor if any(plugin not in plugins.named for plugin in asked) else "",
            "path": None if self.settings.python else portable_path(),
            "tokenizer": None if tokenizer is None else [self._folder.path, tokenizer_hash(tokenizer)],
            "log_level": log.getEffectiveLevel(),
            "context": {
                "role": context.role,
                "device": device or str(context.device),
                "seed": context.seed,
                "total_steps": context.total_steps,
                "deterministic": context.deterministic,
            },
        }

    def _model_plugins(self) -> list[Plugin]:
        """The plugins of the run that may build or register the sampler's model."""
        plugins, backend = self.context.plugins, ("train_engines", self.context.actor)
        if self.context.role != "rollout":
            return []
        asked, hooks = (
            plugins.asked(*([backend] if backend in plugins.chosen else [])),
            foreign_interpreter.MODEL_HOOKS,
        )
        return [plugin for plugin in asked if any(hasattr(plugin.module, hook) for hook in hooks)]

    def _compare(self, hello: Mapping[str, Any] | None) -> None:
        """Both sides must be of one version."""
        if hello is None:
            raise Lost(f"it did not say a word within {HELLO_SECONDS:g} s")
        theirs, mine = hello["value"], versions()
        foreign_interpreter.compare(self.python, theirs, mine)
        if theirs["torch"] != mine["torch"]:
            log.info("The sampler's process has torch %s, the trainer %s.", theirs["torch"], mine["torch"])

    def _no_start(self, cause: Lost) -> EngineError:
        return PluginError(f"The sampler's process ({self.python}) does not start: {cause}")


def _start_failure(error: Exception, python: str) -> EngineError:
    """What an engine raised while it was built, as one message."""
    if isinstance(error, EngineError):
        error.add_note(f"In the sampler's process, {python}.")
        return error
    kind = (
        EnvironmentProblem
        if isinstance(error, (MemoryError, torch.OutOfMemoryError, OSError))
        else PluginError
    )
    made = kind(
        f"The engine does not start in the sampler's process ({python}): {type(error).__name__}: {error}"
    )
    made.__cause__ = error.__cause__
    return made
