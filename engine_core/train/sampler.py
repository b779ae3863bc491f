"""Requests of a trainer to its sampler: sampling parameters, seeds, time limits, episodes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import TrainingFailed
from engine_core.tables import Distribution
from engine_core.types import TIMEOUT, Request, Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.contracts.parts import Episodes
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.train.settings import Settings
    from engine_core.types import Prompt, Rollout

Seen = Callable[[Sequence["Rollout"]], None]
"""A callback that receives rollouts as they finish."""

GREEDY = Distribution(temperature=0.0)


class Sampler:
    """The sampler of one run, as its trainer uses it.

    Args:
        settings: of the run.
        groups: worker groups by role; ``rollout`` is in it when a response is sampled.
        environment: plays an episode for each request; None: a request gives one response.
        replays_support: whether rollouts record the support that top-p and top-k left.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Mapping[str, WorkerGroup],
        environment: Episodes | None = None,
        replays_support: bool = False,
    ) -> None:
        self.settings, self.groups, self.environment = settings, groups, environment
        self.replays_support = replays_support
        self.timeouts = 0  # responses of the step that were stopped at their time limit
        self.stream: Callable[[Sequence[Request]], Generator[list[Rollout], None, None]] = self._stream

    def asks_log_probs(self, step: int) -> bool:
        """Return whether a step asks the sampler for log-probs (`rollout.log_probs_every_steps`)."""
        return (step - 1) % self.settings.now.rollout.log_probs_every_steps == 0

    def sampling_at(self, step: int) -> Sampling:
        """Return the sampling parameters of a step."""
        max_support = self.settings.now.rollout.max_support if self.replays_support else 0
        return self.sampling_of(log_probs=self.asks_log_probs(step), max_support=max_support)

    def sampling_of(self, *tables: Distribution, **request: Any) -> Sampling:
        """Return the sampling parameters of ``[rollout]`` at this step, overridden by the options of ``tables``."""
        config = self.settings.now.rollout
        return Sampling.of(config, *tables, timeout_s=config.request_timeout_seconds, **request)

    def requests(
        self,
        prompts: Sequence[Prompt],
        step: int,
        first_group: int = 0,
        size: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[Request]:
        """Return the requests for responses to each prompt, group by group, each with its own seed.

        Args:
            prompts: P prompts; their groups are numbered from ``first_group``.
            step: step number, a part of the seeds.
            first_group: number of the first prompt's group.
            size: G, responses for each prompt; default: `rollout.group_size`.
            sampling: result of ``sampling_of``; default: the parameters of the step.
        """
        sampling = sampling or self.sampling_at(step)
        return [
            self.request(prompt, f"{step}:{group}:{index}", sampling)
            for group, prompt in enumerate(prompts, first_group)
            for index in range(size or self.settings.now.rollout.group_size)
        ]

    def request(self, prompt: Prompt, id: str, sampling: Sampling) -> Request:
        """Return the request for the response with the id ``STEP:GROUP:INDEX``."""
        step, group, index = map(int, id.split(":"))
        seed = sampling_seed(self.settings.config.run.seed, step, group, index)
        return Request(id, prompt, dataclasses.replace(sampling, seed=seed), group, index)

    def sample(self, requests: list[Request], seen: Seen | None = None) -> list[Rollout]:
        """Sample the requests of a step and apply `rollout.on_timeout`.

        Args:
            requests: result of ``requests``.
            seen: called with rollouts as they finish, in any order; an error that it raises ends the sampling.

        Returns:
            One rollout per request, in the order of the requests.
        """

        def settled(rollouts: Sequence[Rollout]) -> None:
            """Apply the timeout policy, then call ``seen``."""
            self.settle_timeouts(rollouts)
            if seen is not None:
                seen(rollouts)

        return self.respond(requests, settled)

    def sample_greedy(self, prompts: Sequence[Prompt], step: int, first_group: int = 0) -> list[Rollout]:
        """Return one greedy rollout for each prompt (temperature 0)."""
        sampling = self.sampling_of(GREEDY, log_probs=False)
        return self.respond(self.requests(prompts, step, first_group, 1, sampling))

    def respond(self, requests: list[Request], seen: Seen | None = None) -> list[Rollout]:
        """Sample the requests, or run them as episodes of the environment; return rollouts in order of requests."""
        if self.environment:
            return self.environment.run(self.groups["rollout"], requests, *([seen] if seen else []))
        found: dict[str, Rollout] = {}
        with contextlib.closing(self.stream(requests)) as parts:
            for part in parts:
                found |= {rollout.request_id: rollout for rollout in part}
                if seen is not None:
                    seen(part)
        return [found[request.id] for request in requests]

    def _stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        return self.groups["rollout"].stream(requests)

    def settle_timeouts(self, rollouts: Sequence[Rollout]) -> None:
        """Apply `rollout.on_timeout` to the responses that reached their time limit.

        Raises:
            TrainingFailed: a response timed out and the policy is ``fail``.
        """
        if self.environment:
            return  # episodes have their own time limit
        config = self.settings.now.rollout
        for rollout in (rollout for rollout in rollouts if rollout.failure == TIMEOUT):
            self.timeouts += 1
            if config.on_timeout == "fail":
                raise TrainingFailed(
                    f"Response {rollout.request_id} (prompt {rollout.prompt.id}) had {rollout.response_length} tokens after "
                    f"{config.request_timeout_seconds:g} s (rollout.request_timeout_seconds). The run ends "
                    'because rollout.on_timeout = "fail". The weights were left alone.'
                )
            rollout.valid = config.on_timeout != "drop"
            if config.on_timeout == "keep":
                rollout.failure = ""


def sampling_seed(seed: int, step: int, group: int, index: int) -> int:
    """Return the seed of one rollout (63 bits), independent of how requests are batched."""
    text = f"{seed}:{step}:{group}:{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
