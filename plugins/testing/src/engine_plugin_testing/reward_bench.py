"""The bench of rewards: samples become rollouts, and are scored as a run scores them."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine_core.config.rewards import RewardConfig
from engine_core.rewards import RewardRunner
from engine_core.rewards.signatures import Outcome, RewardFunction, arguments, evaluate, load_reward
from engine_core.types import Prompt, Rollout
from engine_plugin_testing.bench import Bench

OF_RESPONSE = ("completion", "completion_ids", "response_length", "finish_reason")
OWN_KEYS = ("prompt", *OF_RESPONSE)

Sample = Mapping[str, Any]


class RewardBench(Bench):
    """A bench that scores samples by a reward."""

    kind = "rewards"

    @property
    def name(self) -> str:
        """The name of the reward."""
        return str(self.settings["name"])

    @property
    def examples(self) -> list[tuple[list[Sample], list[float | None]]]:
        """The groups of samples with their values; a single sample is a group of one."""
        found = []
        for sample, value, *_ in self.settings["examples"]:
            group = sample if isinstance(sample, list) else [sample]
            values = value if isinstance(sample, list) else [value]
            found.append(([{"completion": s} if isinstance(s, str) else s for s in group], values))
        assert found, "The suite has no `examples`; give pairs of a sample and its value."
        return found

    @property
    def answers(self) -> list[tuple[list[Sample], list[str | None], list[str | None]]]:
        """The groups of the examples that name answers: samples, the answers that the reward must read, those that it reads."""
        asked = [(at, entry[2]) for at, entry in enumerate(self.settings["examples"]) if len(entry) > 2]
        found: list[tuple[list[Sample], list[str | None], list[str | None]]] = []
        with contextlib.closing(self.runner()) as runner:
            for at, answer in asked:
                group, values = self.examples[at]
                runner.score(self.rollouts(group, [0] * len(group)), step=1)
                read = [outcome.answer if outcome else None for outcome in runner.scorers[0].runner.outcomes]
                found.append((group, answer if len(values) > 1 else [answer], read))
        return found

    def samples(self) -> tuple[list[Sample], list[int]]:
        """Return all samples of the examples, and the group of each."""
        groups = [group for group, _ in self.examples]
        return [s for group in groups for s in group], [i for i, group in enumerate(groups) for _ in group]

    def rollouts(self, samples: Sequence[Sample], groups: Sequence[int] | None = None) -> list[Rollout]:
        """Make one rollout per sample; a sample without token ids gets one token per character."""
        made = []
        for i, sample in enumerate(samples):
            text = sample.get("completion", "")
            count = sample.get("response_length", len(text))
            ids = [5, 6, *sample.get("completion_ids", [7] * count)]
            columns = {key: copy.deepcopy(value) for key, value in sample.items() if key not in OWN_KEYS}
            size = len(ids)
            made.append(
                Rollout(
                    request_id=f"r{i}",
                    prompt=Prompt(f"train:{i}", ids[:2], sample.get("prompt", "a prompt"), columns),
                    token_ids=torch.tensor(ids),
                    loss_mask=torch.arange(size) >= 2,
                    rollout_log_probs=torch.zeros(size),
                    policy_versions=torch.zeros(size, dtype=torch.int32),
                    finish_reason=sample.get("finish_reason", "stop"),
                    group_id=groups[i] if groups else i,
                    text=text,
                )
            )
        return made

    def score(
        self, samples: Sequence[Sample], groups: Sequence[int] | None = None, workers: int = 0
    ) -> list[float | None]:
        """Score samples by the core's ``RewardRunner``; a failed sample is an assertion that shows its traceback."""
        return self.score_each([(samples, groups)], workers)[0]

    def score_each(
        self,
        calls: Sequence[tuple[Sequence[Sample], Sequence[int] | None]],
        workers: int = 0,
        after_first: Callable[[], None] | None = None,
    ) -> list[list[float | None]]:
        """Score several calls by one runner, each as in ``score``.

        Args:
            calls: samples, and the group of each.
            workers: number of worker processes; 0: none.
            after_first: called after the first call; samples of the second one may fail then.
        """
        runner = self.runner(workers)
        try:
            found = []
            for number, (samples, groups) in enumerate(calls):
                rollouts = self.rollouts(samples, groups)
                runner.score(rollouts, step=1)
                for sample, outcome in zip(samples, runner.scorers[0].runner.outcomes, strict=True):
                    if number != 1 or after_first is None:
                        _check(sample, outcome)
                found.append([rollout.rewards[self.name] for rollout in rollouts])
                self._check_bounds(samples, found[-1])
                if number == 0 and after_first is not None:
                    after_first()
            return found
        finally:
            runner.close()

    def runner(
        self,
        workers: int = 0,
        weight: float = 1.0,
        live: Sequence[Callable[..., Any]] = (),
        given: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> RewardRunner:
        """Build the core's runner with this reward; a failure drops its rollout, unless ``settings`` has another policy.

        Args:
            workers: number of worker processes; 0: none.
            weight: of the reward.
            live: further rewards, functions in this process.
            given: weights of the rewards that the rollouts have already, by name.
            settings: other keys of ``[[reward]]``.
        """
        plugins = self.load_plugins()
        config = RewardConfig(
            name=self.name,
            workers=workers,
            weight=weight,
            options=self.checked_options(plugins),
            timeout_seconds=self.settings["timeout_seconds"],
            max_failure_share=1.0,
            **{"on_error": "drop", "on_timeout": "drop", **settings},
        )
        return RewardRunner([config], plugins, live=live, given=given)

    def _check_bounds(self, samples: Sequence[Sample], values: Sequence[float | None]) -> None:
        """Assert that values are within the suite's ``bounds``."""
        low, high = self.settings["bounds"] or (-math.inf, math.inf)
        for sample, value in zip(samples, values, strict=True):
            assert value is None or low - 1e-9 <= value <= high + 1e-9, (
                f"{str(sample)[:80]} got {value}; `bounds` are {low} to {high}."
            )

    def failing(
        self, weight: float = 1.0, workers: int = 0
    ) -> list[tuple[Sample, str, Outcome | None, Rollout]]:
        """Score each sample of the suite's ``failing`` in a call, with the policy ``drop``.

        Returns:
            The sample, the kind of failure that the suite names (or ""), its outcome and its scored rollout.
        """
        found: list[tuple[Sample, str, Outcome | None, Rollout]] = []
        with contextlib.closing(self.runner(workers, weight)) as runner:
            for given in self.settings["failing"]:
                sample, kind = given if isinstance(given, tuple | list) else (given, "")
                sample = {"completion": sample} if isinstance(sample, str) else sample
                (rollout,) = rollouts = self.rollouts([sample])
                runner.score(rollouts, step=1)
                found.append((sample, kind, runner.scorers[0].runner.outcomes[0], rollout))
        return found

    def function(self) -> RewardFunction:
        """Load the reward function with its options."""
        plugins = self.load_plugins()
        options = self.checked_options(plugins).model_dump(mode="json")
        return load_reward(self.name, plugins, options, float(self.settings["timeout_seconds"]))

    def columns(
        self, reward: RewardFunction, samples: Sequence[Sample], groups: Sequence[int]
    ) -> dict[str, list[Any]]:
        """Return the arguments of the function for these samples."""
        found = arguments(self.name, reward.signature, self.rollouts(samples, groups))
        return {name: list(values) for name, values in found.items()}

    def call(
        self, reward: RewardFunction, columns: Mapping[str, list[Any]], count: int
    ) -> list[Outcome | None]:
        """Call the function with these objects, without copies."""
        outcomes: list[Outcome | None] = [None] * count
        timeout = float(self.settings["timeout_seconds"])
        for position, outcome in evaluate(
            reward, columns, count, timeout, lambda _: contextlib.nullcontext()
        ):
            for at in range(count) if position is None else (position,):
                outcomes[at] = outcome
        return outcomes


def _check(sample: Sample, outcome: Outcome | None) -> None:
    shown = f"completion {str(sample.get('completion', ''))[:60]!r}"
    assert outcome is not None, f"The sample with {shown} got no outcome."
    assert not outcome.failure, f"The sample with {shown} failed: {outcome.message}\n{outcome.trace}".strip()
