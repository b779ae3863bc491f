"""The reward runner: it runs every ``[[reward]]`` on rollouts, applies its failure policies, and sums by weight.

``rollout.rewards`` holds the values of the functions (``rollout.answers`` the answers that they read).
``rollout.reward`` is the sum of ``weight * clip(value)`` over the rewards that
apply. A failed sample has None in ``rollout.rewards`` (0 under ``zero``). Under ``drop`` its rollout is no longer
``valid``, unless the reward's weight is 0.
"""

from __future__ import annotations

import copy
import logging
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core import timeline
from engine_core.errors import ConfigError, DataError, TrainingFailed, did_you_mean
from engine_core.metrics import Sum
from engine_core.rewards.models import ByModel, Known, ModelReward
from engine_core.rewards.preflight import with_defaults
from engine_core.rewards.signatures import (
    InProcess,
    OnFailure,
    Outcome,
    RewardFunction,
    arguments,
    check_columns,
    load_reward,
)
from engine_core.types import decode_texts

if TYPE_CHECKING:
    from engine_core.config.rewards import RewardConfig
    from engine_core.contracts.parts import EarlyScores, RewardPool, RewardWorkers
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Request, Rollout


def reward_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return ``reward/mean`` and ``/std`` over valid rollouts, and ``reward/zero_variance_groups``."""
    rewards = [r.reward for r in rollouts if r.valid]
    groups: dict[int, set[float]] = {r.group_id: set() for r in rollouts}
    for rollout in rollouts:
        if rollout.valid:
            groups[rollout.group_id].add(rollout.reward)
    flat = sum(len(values) < 2 for values in groups.values())
    return {
        "reward/mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "reward/zero_variance_groups": flat / len(groups) if len(groups) < len(rollouts) else 0.0,
    }


METRIC_NAMES = frozenset(
    {"mean", "std", "failures", "timeouts", "zero_variance_groups", "unrewarded", "kl_penalty"}
)
TRACES_LOGGED = 20  # different tracebacks of one reward; after that only counts

logger = logging.getLogger("engine")


class Scorer:
    """A reward of a run: its settings, its runner, and its failures in the current step."""

    def __init__(self, config: RewardConfig, runner: RewardPool | InProcess | ByModel) -> None:
        self.config, self.runner = config, runner
        self.failures = {"error": 0, "timeout": 0}
        self.restarts = 0  # restarts that metrics have reported
        self.first_failure = ""
        self.logged: set[str] = set()
        self.told_nothing = False

    @property
    def failed(self) -> int:
        """Number of failed samples in this step."""
        return sum(self.failures.values())

    def value(self, outcome: Outcome) -> float | None:
        """Return the value for ``rollout.rewards``: 0 for a failure under the policy ``zero``."""
        return 0.0 if self.policy(outcome) == "zero" else outcome.value

    def policy(self, outcome: Outcome) -> str:
        """Return the policy for a failed outcome, ``drop``, ``zero`` or ``fail``; "" for others."""
        if not outcome.failure:
            return ""
        policies = {"error": self.config.on_error, "timeout": self.config.on_timeout or "drop"}
        return policies.get(outcome.failure, "")

    def note(self, outcome: Outcome, sample: str, step: int, count: int) -> None:
        """Count and log a failure.

        Args:
            outcome: the failure.
            sample: name of the sample, for messages.
            step: step number, for messages.
            count: samples of the step.

        Raises:
            TrainingFailed: the policy is ``fail``, or more than `max_failure_share` of the samples failed.
        """
        self.failures[outcome.failure] += 1
        self.first_failure = self.first_failure or f"sample {sample}: {outcome.message}"
        if outcome.message not in self.logged and len(self.logged) < TRACES_LOGGED:
            self.logged.add(outcome.message)
            text = f"{outcome.message}\n{outcome.trace}".strip()
            logger.warning(
                "Reward '%s' failed on sample %s in step %d: %s", self.config.name, sample, step, text
            )
        name, share = self.config.name, self.config.max_failure_share
        if self.policy(outcome) == "fail":
            key = "on_timeout" if outcome.failure == "timeout" else "on_error"
            raise TrainingFailed(
                f"Reward '{name}' failed in step {step} on sample {sample}: {outcome.message}. "
                f'The run ends because {key} = "fail". The weights were left alone.'
            )
        if self.failed > share * count:
            least = "at least " if self.failed < count else ""  # the other samples are not done yet
            raise TrainingFailed(
                f"Reward '{name}' failed on {least}{self.failed} of the {count} samples of step {step}, more than "
                f"max_failure_share = {share:g} allows. First: {self.first_failure}. The weights were left alone."
            )

    def warn_nothing_applies(self) -> None:
        """Log a warning, once, if the function returned None for every sample of a step."""
        count = len(self.runner.outcomes)
        applies = any(o.failure or o.value is not None for o in self.runner.outcomes if o)
        if count and not applies and not self.told_nothing:
            self.told_nothing = True
            logger.warning(
                "Reward '%s' gave None (not applicable) for all %d samples: nothing is learned from it. "
                "Does the function return its value, and have the rows the columns that it reads?",
                self.config.name,
                count,
            )


class RewardRunner:
    """All rewards of a run.

    Args:
        configs: the ``[[reward]]`` tables.
        plugins: offers their functions; a worker loads its own copy by name.
        tokenizer: decodes responses that have no text.
        live: functions to run in the controller, with weight 1, named by their ``__name__``.
        models: the ``ModelReward`` of each reward that has a model, by reward name.
        given: weights of the rewards that the environment sets on rollouts, by name.

    Raises:
        EngineError: two rewards have one name, or a reward does not load. No process is left running.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        plugins: PluginSet,
        tokenizer: Any = None,
        live: Sequence[Callable[..., Any]] = (),
        models: Mapping[str, ModelReward] | None = None,
        given: Mapping[str, float] | None = None,
    ) -> None:
        self.tokenizer, self.given = tokenizer, dict(given or {})
        self.columns: dict[str, None] = {}  # names of those of the data, after ``check_columns``
        complete = [with_defaults(config, plugins) for config in configs]
        self.pools: list[RewardPool] = []
        self._workers: RewardWorkers | None = None
        self.scorers = [Scorer(config, self._runner(config, plugins, models or {})) for config in complete]
        self.scorers += [_live(function) for function in live]
        names = [*(scorer.config.name for scorer in self.scorers), *self.given]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"Reward '{name}' is given {names.count(name)} times. Each name may stand once."
                )
            if name in METRIC_NAMES:
                raise ConfigError(
                    f"Reward '{name}' has the name of the metric 'reward/{name}'. Choose another."
                )
        self._start()

    def only(self, names: Collection[str]) -> RewardRunner:
        """Return a runner for other data, which shares the workers: of these rewards, or of all if there are no names.

        Raises:
            ConfigError: the run has no reward of one of the names.
        """
        part = copy.copy(self)
        part.columns = {}
        if not names:
            return part
        known = [*(scorer.config.name for scorer in self.scorers), *self.given]
        for name in set(names) - {*known}:
            raise ConfigError(
                f"eval: rewards: got '{name}', which is no reward of the run.{did_you_mean(name, known)}"
            )
        part.scorers = [scorer for scorer in self.scorers if scorer.config.name in names]
        part.pools = [pool for pool in self.pools if pool.name in names]
        part.given = {name: weight for name, weight in self.given.items() if name in names}
        return part

    def early(self, requests: Sequence[Request], step: int) -> EarlyScores | None:
        """Prepare to score rollouts while others are sampled; return None if every reward waits for all samples.

        Args:
            requests: in groups of at least 2; ``score`` must get their rollouts in this order.
            step: step number, for messages.
        """
        pools = self.in_parts()
        if not pools:
            return None
        rollouts: list[Any] = [None] * len(requests)
        assert self._workers is not None
        scoring = self._workers.early(pools, self._begin(rollouts, step), rollouts, self._arguments)
        scoring.expect(requests)
        return scoring

    def in_parts(self) -> list[RewardPool]:
        """Start the worker pools; return those of rewards whose samples may be scored in any parts."""
        self._start()  # a worker reports the signature
        return [pool for pool in self.pools if pool.signature and not pool.signature.whole_batch]

    def outcomes(
        self, rollouts: Sequence[Rollout], pools: Sequence[RewardPool] | None = None
    ) -> dict[str, list[Outcome]]:
        """Score complete groups with the rewards of ``in_parts``; return outcomes by reward, without counting failures.

        Args:
            rollouts: in groups.
            pools: the started worker pools of other rewards, which to use instead.
        """
        pools = self.in_parts() if pools is None else pools
        for pool in pools:
            pool.begin(self._arguments(pool, rollouts), len(rollouts))
        self._drive(pools, lambda name, place, outcome: None)
        return {pool.name: [outcome for outcome in pool.outcomes if outcome] for pool in pools}

    def score_part(self, rollouts: Sequence[Rollout]) -> dict[str, list[Outcome]]:
        """Fill in the rewards of complete groups, a part of a step, without metrics and failure policies.

        Returns:
            The outcomes by reward, for ``Known``; ``score`` gets those of the whole step.
        """
        columns = {s.config.name: self._arguments(s.runner, rollouts) for s in self.scorers}
        self.ask(columns, len(rollouts), lambda name, place, outcome: None)
        self._sum(rollouts)
        return {s.config.name: [each for each in s.runner.outcomes if each] for s in self.scorers}

    def score(
        self,
        rollouts: list[Rollout],
        step: int,
        early: EarlyScores | Known | None = None,
    ) -> dict[str, float]:
        """Fill in ``rewards``, ``reward`` and ``valid`` of each rollout.

        Args:
            rollouts: any number; an invalid rollout is scored and stays invalid.
            step: step number, for messages.
            early: results of an earlier scoring of these rollouts, by ``early`` (after ``seal``) or ``outcomes``.

        Returns:
            Metrics ``reward/...``: ``mean`` and ``std`` over valid rollouts, ``NAME`` (mean of the raw
            values where the reward applied), ``NAME/errors``, ``/timeouts``, ``/restarts``, their totals
            ``failures`` and ``timeouts``, ``unrewarded`` (rollouts to which no reward applied, made
            invalid), ``zero_variance_groups`` (share of groups whose valid rewards are all equal).

        Raises:
            TrainingFailed: a failure policy ends the run. The rollouts are unchanged; the runner can be used again.
            DataError: a reward needs a column that the data lacks.
            ValueError: ``early`` has scored other rollouts.
        """
        self._decode(rollouts)
        scored = getattr(early, "rollouts", rollouts)
        if [id(each) for each in scored] != [id(each) for each in rollouts]:
            raise ValueError("early: it has scored other rollouts than these.")
        self._run(rollouts, step, early)
        for scorer in self.scorers:
            scorer.warn_nothing_applies()
        return self._sum(rollouts) | self._failures(step) | reward_statistics(rollouts)

    def _decode(self, rollouts: Sequence[Rollout]) -> None:
        """Decode the text of rollouts that have none."""
        if self.tokenizer is not None:
            decode_texts(rollouts, self.tokenizer)

    def _arguments(self, runner: Any, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
        """Return the arguments of a reward's function, after decoding the text of rollouts."""
        self._decode(rollouts)
        return arguments(runner.name, runner.signature, rollouts, self.columns)

    def _begin(self, rollouts: Sequence[Rollout], step: int) -> OnFailure:
        """Reset the failure counts; return the function to call with each failed sample."""
        scorers = {scorer.config.name: scorer for scorer in self.scorers}
        for scorer in self.scorers:
            scorer.failures, scorer.first_failure = {"error": 0, "timeout": 0}, ""

        def on_failure(reward: str, position: int, outcome: Outcome) -> None:
            """Count a failed sample of a reward."""
            rollout = rollouts[position]
            sample = f"{rollout.prompt.id} ({rollout.request_id})"
            scorers[reward].note(outcome, sample, step, len(rollouts))

        return on_failure

    def _run(self, rollouts: Sequence[Rollout], step: int, early: EarlyScores | Known | None) -> None:
        """Fill in every runner's ``outcomes`` for these rollouts; the workers of all rewards run at the same time."""
        self._start()  # a worker reports the signature
        under_way: Sequence[Any] = ()
        if early is not None and not isinstance(early, Known):
            on_failure, under_way = early.on_failure, early.pools
        else:
            on_failure = self._begin(rollouts, step)
            under_way = self._known(early.outcomes, len(rollouts), on_failure) if early else ()
        columns = {}
        for scorer in self.scorers:
            if scorer.runner not in under_way:
                columns[scorer.config.name] = self._arguments(scorer.runner, rollouts)
        self.ask(columns, len(rollouts), on_failure, under_way)

    def _known(
        self, outcomes: Mapping[str, Sequence[Outcome]], count: int, on_failure: OnFailure
    ) -> list[Any]:
        """Set known outcomes in the runners of their rewards; return those runners."""
        runners = [s.runner for s in self.scorers if s.config.name in outcomes]
        for runner in runners:
            if not isinstance(runner, InProcess | ByModel):
                runner.expect(count)
            runner.outcomes = list(outcomes[runner.name])
            for place, outcome in enumerate(outcomes[runner.name]):
                if outcome.failure:
                    on_failure(runner.name, place, outcome)
        return runners

    def ask(
        self,
        columns: Mapping[str, Mapping[str, Sequence[Any]]],
        count: int,
        on_failure: OnFailure,
        under_way: Sequence[Any] = (),
    ) -> None:
        """Fill in the ``outcomes`` of every reward's runner.

        Args:
            columns: by reward, the arguments that its signature names, each with ``count`` values.
            count: number of samples.
            on_failure: called with each failed sample; an error that it raises ends the scoring.
            under_way: runners that already have their samples or outcomes and need no ``columns``.
        """
        self._start()
        for pool in self.pools:
            if pool not in under_way:
                pool.begin(columns[pool.name], count)
        self._drive(self.pools, on_failure)
        for scorer in self.scorers:
            if isinstance(scorer.runner, InProcess | ByModel) and scorer.runner not in under_way:
                with timeline.span(f"{count} samples", "rewards", scorer.config.name):
                    scorer.runner.run(columns[scorer.config.name], count, on_failure)

    def _sum(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        totals: list[float] = [0.0] * len(rollouts)
        applied, dropped = [False] * len(rollouts), [False] * len(rollouts)
        values = {name: [r.rewards.get(name) for r in rollouts] for name in self.given}
        for scorer in self.scorers:
            config, outcomes = scorer.config, [o for o in scorer.runner.outcomes if o is not None]
            values[config.name] = [scorer.value(outcome) for outcome in outcomes]
            for i, outcome in enumerate(outcomes):
                if outcome.answer is not None:
                    rollouts[i].answers[config.name] = outcome.answer
                dropped[i] |= scorer.policy(outcome) == "drop" and config.weight != 0
        for name, weight, clipped in self.terms():
            for i, value in enumerate(values[name]):
                rollouts[i].rewards[name] = value
                if value is not None and weight != 0:
                    applied[i] = True
                    totals[i] += weight * clipped(value)
        weighed = any(weight for _, weight, _ in self.terms())
        for i, rollout in enumerate(rollouts):
            if rollout.failure:  # a failed episode: already dropped, or its reward is 0
                totals[i], applied[i] = 0.0, True
                rollout.rewards = dict.fromkeys(rollout.rewards, 0.0 if rollout.valid else None)
            rollout.reward = totals[i]
            rollout.valid = rollout.valid and not dropped[i] and (applied[i] or not weighed)
        metrics: dict[str, float] = {}
        for name, _, _ in self.terms():
            counted = [value for r in rollouts if r.valid and (value := r.rewards[name]) is not None]
            if counted:
                metrics[f"reward/{name}"] = statistics.fmean(counted)
        unrewarded = sum(not a and not d for a, d in zip(applied, dropped, strict=True)) if weighed else 0
        return metrics | {"reward/unrewarded": Sum(unrewarded)}

    def terms(self) -> Iterator[tuple[str, float, Callable[[float], float]]]:
        """Yield name, weight and clipping function of each reward, including the environment's rewards."""
        for scorer in self.scorers:
            yield scorer.config.name, scorer.config.weight, scorer.config.clipped
        for name, weight in self.given.items():
            yield name, weight, lambda value: value

    def _failures(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {
            "reward/failures": Sum(sum(scorer.failed for scorer in self.scorers)),
            "reward/timeouts": Sum(sum(scorer.failures["timeout"] for scorer in self.scorers)),
        }
        for scorer in self.scorers:
            name, failures = scorer.config.name, scorer.failures
            restarts, scorer.restarts = scorer.runner.restarts - scorer.restarts, scorer.runner.restarts
            metrics[f"reward/{name}/errors"] = Sum(failures["error"])
            metrics[f"reward/{name}/timeouts"] = Sum(failures["timeout"])
            metrics[f"reward/{name}/restarts"] = Sum(restarts)
            if isinstance(scorer.runner, ByModel):
                metrics |= {f"reward/{name}/{key}": v for key, v in scorer.runner.model.metrics().items()}
            if scorer.failed:
                logger.warning(
                    "Reward '%s' failed on %d of %d samples of step %d (%d errors, %d time-outs). First: %s",
                    name, scorer.failed, len(scorer.runner.outcomes), step, failures["error"], failures["timeout"], scorer.first_failure,
                )  # fmt: skip
        return metrics

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse rewards that need a column that the data lacks, before ``score`` would fail in step 1.

        From then on rows that lack a column of the data give rewards None for it.

        Raises:
            DataError: names every such reward.
        """
        problems = []
        self.columns |= dict.fromkeys(sorted(columns))
        for scorer in self.scorers:
            assert scorer.runner.signature is not None
            try:
                check_columns(scorer.config.name, scorer.runner.signature, columns)
            except DataError as error:
                problems.append(f"reward.{scorer.config.name}: {error}")
        if problems:
            raise DataError("\n".join(problems))

    def _runner(
        self, config: RewardConfig, plugins: PluginSet, models: Mapping[str, ModelReward]
    ) -> RewardPool | InProcess | ByModel:
        """Return the runner of a reward: its model, this process, or a worker pool."""
        if config.has_model:
            return ByModel(config.name, models[config.name])
        options = config.options.model_dump(mode="json") if config.options is not None else None
        if config.workers == 0:
            timeout = config.timeout_seconds
            return InProcess(load_reward(config.name, plugins, options, timeout), timeout)
        order = {
            "reward": config.name,
            "options": options,
            "modules": list(plugins.modules),
            "root": str(plugins.root),
            "allow_code": plugins.allow_code,
            "timeout": config.timeout_seconds,
            "max_memory_gb": config.max_memory_gb,
        }
        assert config.workers is not None
        self._workers = self._workers or plugins.require("parts", "reward_workers")
        assert self._workers is not None
        pool = self._workers.pool(config.name, order, config.workers)
        self.pools.append(pool)
        return pool

    def _start(self) -> None:
        """Start the workers that are not running yet."""
        if self._workers is not None:
            self._workers.start(self.pools)

    def _drive(self, pools: Sequence[RewardPool], on_failure: OnFailure) -> None:
        """Run the workers until each sample that the pools have taken has an outcome."""
        if self._workers is not None:
            self._workers.drive(pools, on_failure)

    def close(self) -> None:
        """End the workers; a later ``score`` starts new ones."""
        for pool in self.pools:
            pool.close()


def _live(function: Callable[..., Any]) -> Scorer:
    # Not at the top: workers import this module and do not need the config.
    from engine_core.config.rewards import RewardConfig

    plain = getattr(function, "func", function)  # functools.partial
    name = getattr(plain, "__name__", type(plain).__name__)
    config = RewardConfig(name=name, workers=0)
    return Scorer(config, InProcess(RewardFunction(name, function, {}), config.timeout_seconds))
