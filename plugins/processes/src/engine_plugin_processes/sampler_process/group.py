"""Several engines behind one sampler, each in a process of its own (``[rollout.process] engines``).

Every engine has all weights and samples requests of its own (data parallelism). Whoever asks sees one engine: requests go
in together, rollouts come out as they finish, wherever they were sampled. A process that is lost is started again alone,
while the others go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import RolloutEngine
from engine_core.errors import ConfigError
from engine_plugin_processes.sampler_process.engine import STEP_SECONDS, SamplerEngine
from engine_plugin_processes.sampler_process.memory import HostMemory
from engine_plugin_processes.sampler_process.weights import Stream, Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import Request, Rollout


def make_sampler(
    config: RolloutConfig,
    model_config: ModelConfig,
    context: WorkerContext,
    source: Callable[[], Stream] | None = None,
) -> RolloutEngine:
    """The sampler that ``[rollout.process]`` asks for; see ``SamplerEngine`` and ``SamplerGroup``."""
    if config.process is not None and config.process.engines > 1:
        return SamplerGroup(config, model_config, context)
    return SamplerEngine(config, model_config, context, source)


class SamplerGroup(RolloutEngine):
    """See the module and ``RolloutEngine``.

    Args:
        config: the ``[rollout]`` table with its ``process``.
        model_config: the ``[model]`` table.
        context: of the worker that owns it.

    Raises:
        ConfigError: there are fewer devices than engines.
        EngineError: a process does not start; the message says why. None is left.
    """

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        super().__init__(config, model_config, context)
        places = devices(context.device, (config.process or ProcessConfig()).engines, context.world_size)
        # one copy of the last update for all: each could ask for it again at another time
        self._weights = Weights(HostMemory(HostMemory.new_file()), None, None)
        self.engines: list[SamplerEngine] = []
        self._where: dict[str, int] = {}  # of what is not yet returned: the engine, by request id
        self._left: dict[str, int] = {}  # tokens that it may still sample, by request id
        try:
            for number, device in enumerate(places):
                place = dataclasses.replace(context, device=device)
                self.engines.append(SamplerEngine(config, model_config, place, None, self._weights, number))
            for wait in [engine.begin() for engine in self.engines]:
                wait()
        except BaseException:
            self.close()
            raise

    @property
    def label(self) -> str:
        return f"{self.engines[0].label}, one of {len(self.engines)}"

    @property
    def capacity(self) -> int:
        return sum(engine.capacity for engine in self.engines)

    # -- requests -----------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._where)

    def add(self, requests: Sequence[Request]) -> None:
        """Deal requests out: all of them, or none where one is malformed."""
        known = set(self._where)
        for request in requests:
            if request.id in known:
                raise ValueError(
                    f"Request '{request.id}' is queued already. Requests must have distinct ids."
                )
            known.add(request.id)
        added: list[str] = []
        try:
            for number, part in self._dealt(requests).items():
                self.engines[number].add(part)
                for request in part:
                    added.append(request.id)
                    self._where[request.id], self._left[request.id] = number, _tokens(request)
        except BaseException:
            self.abort(added)
            raise

    def _dealt(self, requests: Sequence[Request]) -> dict[int, list[Request]]:
        """Engine -> its requests: those of one prompt together, to the engine with the fewest tokens to sample."""
        loads = [0] * len(self.engines)
        for id, number in self._where.items():
            loads[number] += self._left[id]
        parts: dict[int, list[Request]] = {}
        together: dict[tuple[int, str], list[Request]] = {}
        for request in requests:
            together.setdefault((request.group_id, request.prompt.id), []).append(request)
        for group in together.values():
            least = loads.index(min(loads))
            loads[least] += sum(map(_tokens, group))
            parts.setdefault(least, []).extend(group)
        return parts

    def step(self) -> list[Rollout]:
        """Have all sample; what has finished anywhere, or after a moment nothing."""
        busy = [self.engines[number] for number in sorted(set(self._where.values()))] or self.engines[:1]
        for engine in busy:
            engine.go()
        found: list[Rollout] = []
        for engine in busy:
            found += engine.collect(0.0 if found else STEP_SECONDS / len(busy))
        return self._over(found)

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        mine = [id for id in dict.fromkeys(ids) if id in self._where]
        found: list[Rollout] = []
        for number, engine in enumerate(self.engines):
            if part := [id for id in mine if self._where[id] == number]:
                found += engine.abort(part)
        order = {id: at for at, id in enumerate(mine)}
        return self._over(sorted(found, key=lambda rollout: order[rollout.request_id]))

    def _over(self, rollouts: list[Rollout]) -> list[Rollout]:
        for rollout in rollouts:
            del self._where[rollout.request_id], self._left[rollout.request_id]
        return rollouts

    def pause(self, mode: str = "drain") -> None:
        if mode == "drain":  # the others do not wait until one has finished
            for number in set(self._where.values()):
                self.engines[number].go()
        self._each(lambda engine: engine.pause(mode))

    def resume(self) -> None:
        self._each(SamplerEngine.resume)

    # -- weights and device memory ------------------------------------------

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """As the contract says; the checksum is that of the first engine.

        A process that is lost meanwhile is given all anew.
        """
        processes = [engine.to_update() for engine in self.engines]
        found = self._weights.update(processes, stream, version)
        sums = [engine.updated(each, version) for engine, each in zip(self.engines, found, strict=True)]
        self.version = version
        return sums[0]

    def sleep(self, keep: Sequence[str] = ()) -> None:
        self._each(lambda engine: engine.sleep(keep))

    def wake(self, only: Sequence[str] | None = None) -> None:
        self._each(lambda engine: engine.wake(only))

    def close(self) -> None:
        self._each(SamplerEngine.close)
        if self.engines:
            self.engines.clear()
            self._weights.close()
            self._weights.host.close()
        self._where.clear()
        self._left.clear()

    def _each(self, do: Callable[[SamplerEngine], Any]) -> None:
        for engine in self.engines:
            do(engine)


def _tokens(request: Request) -> int:
    """That may still be sampled."""
    begun = 0 if request.begun is None else len(request.begun.token_ids) - len(request.prompt.token_ids)
    return max(1, request.sampling.max_response_tokens - begun)


def devices(own: torch.device, count: int, world_size: int) -> list[torch.device]:
    """One for each engine: the worker's own, and those behind it. A CPU serves all.

    Raises:
        ConfigError: there are not so many, or other ranks have them.
    """
    import torch

    if own.type == "cpu":
        return [own] * count
    first, there = own.index or 0, torch.accelerator.device_count()
    if world_size > 1:
        raise ConfigError(
            f"rollout.process.engines = {count}: each of the pool's {world_size} processes has one device, and an engine on "
            "it. Remove the key; a pool of its own for the sampler ([placement]) has as many engines as processes."
        )
    if first + count > there:
        raise ConfigError(
            f"rollout.process.engines = {count}: each needs a device of its own, and from {own} on there are {there - first}. "
            "Lower it."
        )
    return [torch.device(own.type, index) for index in range(first, first + count)]
