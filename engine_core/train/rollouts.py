"""The way from prompts to the rollouts that a step learns from: requests to the sampler, rounds of sampling, stages.

A step has one round, unless a stage drops groups and has them replaced (``RefillOptions``): then each
further round samples prompts for the missing groups. Stages up to the last refilling stage run
on each round's rollouts; the stages after it run once, on all rollouts. The prompts of a step depend only on the
position in the data, so a resumed run takes the same prompts.

Left out: keeping surplus groups for the next step, where they would be rollouts of an older policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from engine_core.errors import PluginError, TrainingFailed
from engine_core.metrics import Sum, over_updates
from engine_core.rewards.runner import reward_statistics
from engine_core.runs.rollout_files import read_rollouts, write_rollouts
from engine_core.runs.state_files import plain_state
from engine_core.specs import RefillOptions
from engine_core.tables import Distribution
from engine_core.timeline import counting
from engine_core.types import TIMEOUT, Request, Sampling, StageState, sequences_of

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.config.models import StageConfig
    from engine_core.contracts.parts import Episodes
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.train.settings import Settings
    from engine_core.types import Prompt, Rollout

log = logging.getLogger("engine")

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
        """Return one greedy rollout for each prompt (temperature 0), after `rollout.on_timeout`."""
        sampling = self.sampling_of(GREEDY, log_probs=False)
        return self.sample(self.requests(prompts, step, first_group, 1, sampling))

    def respond(self, requests: list[Request], seen: Seen | None = None) -> list[Rollout]:
        """Sample the requests, or run them as episodes of the environment; return rollouts in order of requests."""
        found: dict[str, Rollout] = {}
        with contextlib.closing(self.stream(requests)) as parts, counting(len(requests)) as add:
            for part in parts:
                found |= {rollout.request_id: rollout for rollout in part}
                if seen is not None:
                    seen(part)
                add(len(part))
        rollouts = [found[request.id] for request in requests]
        if self.environment:
            self.environment.check_failures(rollouts)
        return rollouts

    def _stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        group = self.groups["rollout"]
        return self.environment.stream(group, requests) if self.environment else group.stream(requests)

    def settle(self, rollouts: Sequence[Rollout]) -> None:
        """Apply the policies for timeouts, or for failed episodes, to all rollouts of a round.

        Raises:
            TrainingFailed: a policy ends the run.
        """
        self.settle_timeouts(rollouts)
        if self.environment:
            self.environment.check_failures(rollouts)

    def settle_timeouts(self, rollouts: Sequence[Rollout]) -> None:
        """Apply `rollout.on_timeout` to the responses that reached their time limit.

        Raises:
            TrainingFailed: a response timed out and the policy is ``fail``.
        """
        if self.environment:
            return  # episodes follow `environment.on_timeout`
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


class Rounds:
    """The rounds of one step. While groups are ``missing``, sample and score them, then ``add``; at the end ``finish``.

    Args:
        config: settings of the step.
        stages: the stages of the run.
        step: step number.
    """

    def __init__(self, config: EngineConfig, stages: Stages, step: int) -> None:
        self.wanted, self.stages, self.step = config.data.prompts_per_step, stages, step
        refilling = [i for i, stage in enumerate(config.stage) if isinstance(stage.options, RefillOptions)]
        self.refill = [config.stage[i] for i in refilling]
        split = refilling[-1] + 1 if refilling else 0
        self.each_round, self.at_end = config.stage[:split], config.stage[split:]
        self.count = self.groups = 0  # number of rounds, of sampled groups
        self.closed = False  # the last round was added
        self.overlapped = 0.0  # seconds in which scoring overlapped sampling
        self.sampled: list[Rollout] = []  # of all rounds
        self.kept: list[Rollout] = []
        self.scored: list[tuple[int, dict[str, float]]] = []
        self.rewarded: dict[str, float] = {}  # statistics of the rewards of all rounds
        self.staged: list[Mapping[str, float]] = []  # metrics of the stages, by round
        self.greedy: dict[str, float] = {}  # metrics of greedy responses
        self.baselines: dict[int, float] = {}  # group -> reward of its greedy response

    @property
    def missing(self) -> int:
        """Number of groups that the next round must sample; 0: no round follows."""
        options = [stage.options for stage in self.refill]
        if self.closed or self.count >= min((each.max_rounds for each in options), default=1):
            return 0
        lacking = max(self.wanted - len(groups_of(self.kept)), 0)
        return math.ceil(lacking * max((each.oversample for each in options), default=1.0))

    def add(
        self,
        rollouts: list[Rollout],
        scored: dict[str, float],
        overlapped: float = 0.0,
        greedy: Sequence[Rollout] | None = None,
    ) -> None:
        """Add the scored rollouts of a round and apply the stages up to the last refilling one; at the end the others.

        Args:
            rollouts: whole groups, fewer than wanted if the step was stopped early.
            scored: metrics of their rewards.
            overlapped: seconds in which they were scored while others were sampled.
            greedy: scored greedy responses, one for each group, as baselines.
        """
        self.count, self.groups = self.count + 1, self.groups + len(groups_of(rollouts))
        self.scored.append((len(rollouts), scored))
        self.overlapped += overlapped
        self.sampled += rollouts
        self.rewarded = reward_statistics(self.sampled)  # before a stage changes rewards
        if greedy is not None:
            tokens = sum(rollout.response_length for rollout in greedy)
            self.baselines |= {r.group_id: r.reward for r in greedy if r.valid}
            rewards = self.baselines.values()
            self.greedy["greedy/tokens"] = self.greedy.get("greedy/tokens", 0.0) + float(tokens)
            self.greedy["greedy/reward_mean"] = sum(rewards) / max(len(rewards), 1)
            for rollout in rollouts:
                rollout.greedy_reward = self.baselines.get(rollout.group_id)
        kept, noted = self.stages.run(self.each_round, rollouts, self.step)
        self.kept += kept
        self.staged.append(noted)
        if self.missing == 0:
            self.closed = True  # groups that the remaining stages drop are not replaced
            if self.refill:
                self._close_refill(self.refill[-1].name)
            self.kept, noted = self.stages.run(self.at_end, self.kept, self.step)
            self.staged.append(noted)

    def finish(self, described: Mapping[str, float]) -> tuple[list[Rollout], dict[str, float]]:
        """Return the step's rollouts after all stages, and the metrics of rewards, rollouts and stages.

        Args:
            described: metrics of ``sampled``.
        """
        metrics = (
            combined(self.scored) | self.rewarded | dict(described) | over_updates(self.staged) | self.greedy
        )
        metrics["time/reward_overlap"] = self.overlapped
        metrics["tokens/total"] = float(sum(len(r.token_ids) for r in sequences_of(self.kept)))
        if self.greedy:
            metrics["tokens/generated"] += self.greedy["greedy/tokens"]
        return self.kept, metrics

    def _close_refill(self, name: str) -> None:
        """Drop surplus groups, the last ones first; note metrics of the rounds and log missing groups."""
        wanted = self.wanted
        groups = list(dict.fromkeys(r.group_id for r in self.kept))
        chosen = set(groups[:wanted])
        self.kept = [r for r in self.kept if r.group_id in chosen]
        missing = wanted - len(chosen)
        counts = {
            "rounds": self.count,
            "surplus_groups": len(groups) - len(chosen),
            "missing_groups": missing,
        }
        self.staged.append({f"stage/{name}/{key}": Sum(count) for key, count in counts.items()})
        if missing:
            log.warning(
                "Step %d: %d of %d groups are missing after %d rounds of sampling (stage.%s.max_rounds).",
                self.step, missing, wanted, self.count, name,
            )  # fmt: skip


def groups_of(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts by ``group_id``, in the order of each group's first rollout."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.group_id, []).append(rollout)
    return list(found.values())


def combined(scored: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Combine the reward metrics of several rounds: counts are summed, means weighed by the number of rollouts.

    Args:
        scored: number of rollouts and metrics of each round.
    """
    if len(scored) == 1:
        return dict(scored[0][1])
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for _, noted in scored for name in noted):
        parts = [(count, noted) for count, noted in scored if name in noted]
        total = sum(count for count, _ in parts)
        if isinstance(parts[0][1][name], Sum):
            metrics[name] = sum(noted[name] for _, noted in parts)
        else:
            metrics[name] = sum(count * noted[name] for count, noted in parts) / total
    return metrics


class Stages:
    """The functions and objects of every ``[[stage]]`` of a run.

    Args:
        configs: in the order of the run file.
        plugins: the plugins that offer the stages.

    Raises:
        PluginError: a stage cannot be called.
    """

    def __init__(self, configs: Sequence[StageConfig], plugins: PluginSet) -> None:
        self.plugins, self.calls = plugins, dict[str, Callable[..., Any]]()
        self.keeping: dict[str, Any] = {}  # stages with state: objects of a class
        for config in configs:
            own = set(RefillOptions.model_fields) if isinstance(config.options, RefillOptions) else set()
            options = config.options.model_dump(exclude=own) if config.options else {}
            found = plugins.function("stages", config.name)
            self.calls[config.name] = partial(found, **options)
            if isinstance(plugins.resolve("stages", config.name), type):
                made = self.keeping[config.name] = found(**options)
                self.calls[config.name] = plugins.guarded("stages", config.name, made)
        self.off_policy = any(plugins.spec("stages", config.name).off_policy for config in configs)  # type: ignore[attr-defined]

    def run(
        self, configs: Sequence[StageConfig], rollouts: list[Rollout], step: int
    ) -> tuple[list[Rollout], dict[str, float]]:
        """Apply these stages in order; return the remaining rollouts and ``stage/NAME/...`` metrics.

        Raises:
            PluginError: a stage did not return a pair of rollouts and metrics.
        """
        metrics: dict[str, float] = {}
        for name in (config.name for config in configs):
            made = self.calls[name](rollouts, step)
            if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
                raise PluginError(
                    f"Stage '{name}' must return (rollouts, metrics), a list and a dict; it returned {type(made).__name__}."
                )
            rollouts, noted = made
            if odd := [key for key, value in noted.items() if not hasattr(value, "__float__")]:
                raise PluginError(
                    f"Stage '{name}': metric '{odd[0]}' must be a number, got {noted[odd[0]]!r}."
                )
            metrics |= {f"stage/{name}/{key}": value for key, value in noted.items()}
        return rollouts, metrics

    def state(self) -> dict[str, Any]:
        """Return the plain values that the stages keep, by name."""
        return {name: plain_state(f"Stage '{name}'", self._state(name).values) for name in self.keeping}

    def files(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that write the rollouts that stages keep now, by file name."""
        held = {name: tuple(self._state(name).rollouts) for name in self.keeping}
        return {_file(name): partial(write_rollouts, step=0, rollouts=kept) for name, kept in held.items()}

    def load(self, values: Mapping[str, Any], folder: Path) -> None:
        """Restore the stages from a checkpoint; a stage that it does not hold begins empty.

        Args:
            values: the result of ``state``.
            folder: the checkpoint's folder, with the files of ``files``.
        """
        for name, stage in self.keeping.items():
            if name not in values:
                log.warning(
                    "Stage '%s' was not there when the checkpoint was written: it begins empty.", name
                )
                continue
            restore = self.plugins.guarded("stages", name, stage.load_state)
            restore(StageState(values[name], read_rollouts(folder / _file(name))))

    def _state(self, name: str) -> StageState:
        state = self.plugins.guarded("stages", name, self.keeping[name].state)()
        if not (isinstance(state, StageState) and isinstance(state.values, dict)):
            raise PluginError(
                f"Stage '{name}': state() must return a StageState with a dict of values, got {type(state).__name__}."
            )
        return state


def _file(name: str) -> str:
    return f"stages/{quote(name, safe='')}.parquet"
