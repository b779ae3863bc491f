"""Rollouts of a trainer: sampling, scoring, metrics, recording, and weight updates of the sampler."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.requirements import GREEDY
from engine_core.contracts.runtime import REWARD_PHASE
from engine_core.data import tokenizer_hash
from engine_core.errors import TrainingFailed
from engine_core.rewards import RewardRunner
from engine_core.rewards.preflight import check_rewards, check_rows
from engine_core.runs.folders import writing
from engine_core.runs.rollout_files import read_rollouts, rollout_path, write_rollouts
from engine_core.tables import DISTRIBUTION, Distribution
from engine_core.train.models import model_length
from engine_core.train.stages import Rounds, Stages
from engine_core.types import CUT, TIMEOUT, Batch, Request, Sampling, sampled_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from engine_core.contracts.parts import EarlyScores, EarlyStop, Episodes, RewardModels
    from engine_core.rewards.models import Known, ModelReward
    from engine_core.train.sampled_run import SampledRun
    from engine_core.types import Prompt, Rollout


Seen = Callable[[Sequence["Rollout"]], None]
"""A callback that receives rollouts as they finish."""


class RolloutSource:
    """A source of scored rollouts for one run.

    Args:
        run: the trainer that uses this source; its worker groups exist when a method is called.
        scores: whether rollouts are scored; without it no rewards are built.

    Raises:
        PluginError: a stage cannot be called.
        ConfigError: the environment or a reward cannot be used.
        DataError: the data lacks a column that a reward needs.
    """

    def __init__(self, run: SampledRun, scores: bool = True) -> None:
        self.run = run
        self.stages = Stages(run.config.stage, run.plugins)  # refuses a stage that cannot be called
        columns = run.reward_columns() if scores else set()
        self.environment = environment_of(run, columns) if scores else None
        self.rewards = self._make_rewards(columns) if scores else RewardRunner([], run.plugins)
        self.recorded: Path | None = None  # a folder of stored rollouts, which steps read instead of sampling
        self._tokenizer = ""  # its hash, computed once
        self.version = 0  # number of weight updates sent to the sampler
        self.early_stop = self.make_early_stop() if run.config.rollout.over_sampling > 1 else None
        self._traded = 0.0  # the runtime's `traded_seconds` at the last sync
        self.timeouts = 0  # responses of the step that were stopped at their time limit
        self.tells_log_probs = True  # whether this step asks the sampler for log-probs

    def sync(self, updated: bool = True) -> dict[str, float]:
        """Send the actor's weights to the sampler and return ``sync/...`` metrics.

        Args:
            updated: whether the weights changed; they then get the next version number.
        """
        runtime = self.run.runtime
        result = runtime.push_weights("actor", "rollout", self.version + updated)
        traded, self._traded = runtime.traded_seconds - self._traded, runtime.traded_seconds
        self.version = result.version
        self.run.emit("weights_synced", {"version": result.version, "bytes": result.bytes})
        return {
            "sync/bytes": float(result.bytes),
            "sync/seconds": result.seconds,
            "policy_version": float(result.version),
            "time/offload_and_sync": traded + result.seconds,
            **runtime.loss_metrics(),
        }

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Sample, score and record the rollouts of a step.

        Returns:
            The rollouts after the stages; the metrics of sampling, rewards and stages.
        """
        if self.recorded is not None:
            return read_rollouts(rollout_path(self.recorded, step)), {}
        rounds = Rounds(self, step, self.run.samples_greedy)  # more than one where a stage refills
        while wanted := rounds.missing:
            prompts = self._take(self.early_stop.to_take(wanted) if self.early_stop else wanted)
            with self.run.phase("generate"):
                rounds.sample(prompts)  # G rollouts for each prompt
            with self.run.phase("reward"):
                rounds.score()  # handles failures by `on_error`
        rollouts, metrics = rounds.finish()
        self.keep(rollouts, step)
        return rollouts, metrics

    def make_early_stop(self) -> EarlyStop:
        """Return the installed ``EarlyStop``, which ends sampling as soon as enough groups are complete."""
        part: Callable[[RolloutSource], EarlyStop] = self.run.plugins.require("parts", "early_stop")
        return part(self)

    def _take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts of the data."""
        return self.run.source.take(count)

    def sample(
        self, prompts: Sequence[Prompt], step: int, first_group: int = 0, seen: Seen | None = None
    ) -> list[Rollout]:
        """Return G rollouts for each prompt, in order: prompt 0's group, prompt 1's group, ...; see ``sample_as``."""
        size, sampling = self.run.config_now.rollout.group_size, self._as_told(step)
        return self._sample(self._requests(prompts, step, size, sampling, first_group), seen)

    def _sample(self, requests: list[Request], seen: Seen | None) -> list[Rollout]:
        """Sample the requests, apply the timeout policy to rollouts as they finish, then pass them to ``seen``."""

        def settled(rollouts: Sequence[Rollout]) -> None:
            """Apply the timeout policy, then call ``seen``."""
            self._settle_late(rollouts)
            if seen is not None:
                seen(rollouts)

        timed = self.run.config_now.rollout.request_timeout_seconds
        return self._generate(requests, settled if seen is not None or timed else None)

    def _settle_late(self, rollouts: Sequence[Rollout]) -> None:
        """Apply `rollout.on_timeout` to the responses that reached their time limit.

        Raises:
            TrainingFailed: a response timed out and the policy is ``fail``.
        """
        if self.environment:
            return  # episodes have their own time limit
        policy = self.run.config_now.rollout.on_timeout
        for rollout in rollouts:
            if rollout.failure != TIMEOUT:
                continue
            self.timeouts += 1
            if policy == "fail":
                raise TrainingFailed(
                    f"Response {rollout.request_id} (prompt {rollout.prompt.id}) had {rollout.response_length} tokens after "
                    f"{self.run.config_now.rollout.request_timeout_seconds:g} s (rollout.request_timeout_seconds). The run ends "
                    'because rollout.on_timeout = "fail". The weights were left alone.'
                )
            rollout.valid = policy != "drop"
            if policy == "keep":
                rollout.failure = ""

    def _as_told(self, step: int) -> Sampling:
        """Return the sampling parameters of a step, and note whether it asks for log-probs."""
        config = self.run.config_now.rollout
        self.tells_log_probs = (step - 1) % config.log_probs_every_steps == 0
        return self.sampling_of(
            log_probs=self.tells_log_probs,
            max_support=config.max_support if self.run.replays_support else 0,
        )

    def sampling_of(self, *tables: Distribution, **request: Any) -> Sampling:
        """Return the sampling parameters of ``[rollout]`` at this step, overridden by the options of ``tables``."""
        config = self.run.config_now.rollout
        return Sampling.of(config, *tables, timeout_s=config.request_timeout_seconds, **request)

    def sample_and_score(
        self, prompts: Sequence[Prompt], step: int, first_group: int = 0
    ) -> tuple[list[Rollout], EarlyScores | Known | None]:
        """Return what ``sample`` returns, and score complete groups meanwhile if `rollout.overlap_rewards` is set.

        Returns:
            The rollouts, and the rewards in progress, which ``score`` finishes; None where none were started.
            If the sampling raises, the rewards in progress are canceled.
        """
        config = self.run.config_now.rollout
        if self.early_stop:
            request_of = partial(self._request, sampling=self._as_told(step))
            rollouts = self.early_stop.sample(prompts, step, first_group, request_of)
            self._settle_late(rollouts)
            return rollouts, None
        requests = self._requests(prompts, step, config.group_size, self._as_told(step), first_group)
        early = None
        if (
            config.overlap_rewards and config.group_size > 1
        ):  # groups of one would hide a reward that returns a wrong number of values
            early = self.rewards.early(requests, step)
        if early is None:
            return self._sample(requests, None), None
        try:
            rollouts = self._sample(requests, early.take)
        except BaseException:
            early.cancel()
            raise
        early.seal()
        return rollouts, early

    def sample_greedy(self, prompts: Sequence[Prompt], step: int, first_group: int = 0) -> list[Rollout]:
        """Return one greedy rollout for each prompt (temperature 0)."""
        greedy = self.sampling_of(Distribution(temperature=0.0), log_probs=False)
        return self.sample_as(prompts, step, 1, greedy, first_group)

    def score(
        self,
        rollouts: list[Rollout],
        step: int,
        training: bool = True,
        early: EarlyScores | Known | None = None,
    ) -> dict[str, float]:
        """Fill in the rewards of the rollouts; return the metrics of the rewards and of their failures."""
        with self.run.runtime.phase(REWARD_PHASE):  # also in an evaluation, which is outside the step
            return self.rewards.score(rollouts, step, early=early)

    def reward_terms(self) -> Iterator[tuple[str, float, Callable[[float], float]]]:
        """Return name, weight and clipping function of each reward with a nonzero weight."""
        return (term for term in self.rewards.terms() if term[1])

    def batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Pack the rollouts into a batch and add the columns that only the run knows.

        The added columns are float32: ``reward_term/NAME`` [B], the clipped value of each reward with a weight
        (NaN where the reward does not apply), ``reward_weight/NAME`` [B], and ``greedy_rewards`` [B] if greedy
        responses are sampled (NaN where one has no reward). With `algorithm.mask_truncated` the ``loss_mask`` of
        truncated rollouts is False; their rewards still count in their group. ``rollout_log_probs`` is left out
        if the step did not ask for it (`rollout.log_probs_every_steps`).
        """
        config = self.run.config_now
        replay = self.run.replays_support
        batch = Batch.from_rollouts(
            rollouts, config.rollout.temperature, replay, self.known_columns(rollouts)
        )
        columns: dict[str, torch.Tensor] = {}
        for name, weight, clipped in self.reward_terms():
            values = [r.rewards.get(name) for r in rollouts]
            terms = [math.nan if value is None else clipped(value) for value in values]
            columns[f"reward_term/{name}"] = torch.tensor(terms, dtype=torch.float32)
            columns[f"reward_weight/{name}"] = torch.full((len(rollouts),), weight)
        if self.run.samples_greedy:
            baselines = [math.nan if r.greedy_reward is None else r.greedy_reward for r in rollouts]
            columns[GREEDY] = torch.tensor(baselines, dtype=torch.float32)
        batch = batch.with_columns(tokens=self.fresh(batch), sequences=columns)
        if config.algorithm.mask_truncated:
            mask = batch["loss_mask"] & ~batch.to_tokens(batch["truncated"])
            batch = batch.with_columns(tokens={"loss_mask": mask})
        if not self.tells_log_probs:
            del batch.tokens["rollout_log_probs"]  # zeros, not log-probs
        return batch

    def known_columns(self, rollouts: Sequence[Rollout]) -> Mapping[str, torch.Tensor] | None:
        """Return the [T] columns that are already built for these rollouts, for ``Batch.from_rollouts``; else None."""
        return None

    def fresh(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return ``fresh`` [T] bool, True on tokens of the newest policy of the batch; {} if all tokens are."""
        sampled = batch["policy_versions"][batch["loss_mask"]]
        if not len(sampled) or bool((sampled == sampled.max()).all()):
            return {}
        return {"fresh": batch["policy_versions"] == sampled.max()}

    def describe(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return metrics of the rollouts: counts, lengths, timeouts, turns."""
        lengths = [r.response_length for r in rollouts] or [0]
        of_turns = self.environment.metrics() if self.environment else {}
        truncated = sum(r.finish_reason in CUT for r in rollouts)
        timeouts, self.timeouts = self.timeouts, 0
        limited = (
            {"sampling/timeouts": float(timeouts)} if self.run.config.rollout.request_timeout_seconds else {}
        )
        return {
            "rollouts": float(len(rollouts)),
            "tokens/total": float(sum(r.token_ids.numel() for r in rollouts)),
            "tokens/generated": float(self.sampled_tokens(rollouts)),
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            "response_length/truncated_share": truncated / len(lengths),
            **of_turns,
            **limited,
            **(self.early_stop.metrics() if self.early_stop else {}),
        }

    def sampled_tokens(self, rollouts: Sequence[Rollout]) -> int:
        """Return the number of tokens in these rollouts that the policy sampled."""
        return sampled_tokens(rollouts)

    def keep(self, rollouts: list[Rollout], step: int) -> None:
        """Write the rollouts to the run folder if it is time, and emit ``rollouts_finished``."""
        every = self.run.config.tracking.rollouts_every_steps
        if self.run.folder and every and step % every == 0:
            with writing(f"The rollouts of step {step}"):
                write_rollouts(self.run.folder.rollouts_dir, step, rollouts, self.about())
        self.run.emit("rollouts_finished", {"rollouts": rollouts})

    def about(self, sampling: Sampling | None = None) -> dict[str, Any]:
        """Return the tokenizer hash and the distribution parameters, for the metadata of a rollout file.

        Args:
            sampling: the parameters that the rollouts were sampled with; default: those of the step.
        """
        config = sampling or self.run.config_now.rollout
        if not self._tokenizer:
            self._tokenizer = tokenizer_hash(self.run.tokenizer)
        return {"tokenizer": self._tokenizer, **{name: getattr(config, name) for name in DISTRIBUTION}}

    def _make_rewards(self, columns: set[str]) -> RewardRunner:
        """Build the rewards of the run; refuse data that lacks a column they need."""
        run = self.run
        self._row_checks = check_rewards(run.config.reward, run.plugins)
        self.check_rows(run.reward_rows(), run.config.data.max_bad_rows)
        models: Mapping[str, ModelReward] = {}
        if any(reward.has_model for reward in run.config.reward):
            part: RewardModels = run.plugins.require("parts", "reward_models")
            models = part.rewards(
                run.config, run.plugins, lambda role: run.groups[role], run.tokenizer, columns
            )
        given = self.environment.reward_weights if self.environment else {}
        live = run.live.get("rewards") or ()
        rewards = RewardRunner(run.config.reward, run.plugins, run.tokenizer, live, models, given)
        try:
            rewards.check_columns(columns)
        except BaseException:
            rewards.close()
            raise
        return rewards

    def check_rows(self, rows: Iterable[tuple[str, Mapping[str, Any]]], most_bad: int) -> None:
        """Refuse rows that a reward cannot use; see ``preflight.check_rows``."""
        others = any(
            reward.weight for reward in self.run.config.reward if reward.name not in self._row_checks
        )
        others = others or bool(self.run.live.get("rewards")) or self.environment is not None
        check_rows(self._row_checks, rows, most_bad, alone=not others and len(self._row_checks) == 1)

    def close(self) -> None:
        """Stop the environment and the reward workers."""
        try:
            if self.environment:
                self.environment.close()
        finally:
            self.rewards.close()

    def sample_as(
        self,
        prompts: Sequence[Prompt],
        step: int,
        group_size: int,
        sampling: Sampling,
        first_group: int = 0,
        seen: Seen | None = None,
    ) -> list[Rollout]:
        """Return ``group_size`` rollouts for each prompt, in order, each sampled with its own seed.

        Args:
            prompts: P prompts; their groups are numbered from ``first_group``.
            step: step number, a part of the seeds.
            group_size: G.
            sampling: the result of ``sampling_of``.
            first_group: number of the first prompt's group.
            seen: called with rollouts as they finish, in any order; an error that it raises ends the sampling.
        """
        return self._generate(self._requests(prompts, step, group_size, sampling, first_group), seen)

    def _generate(self, requests: list[Request], seen: Seen | None) -> list[Rollout]:
        """Sample the requests, or run them as episodes of the environment; return rollouts in order of requests."""
        sampler = self.run.groups["rollout"]
        if self.environment:
            return self.environment.run(sampler, requests, *([seen] if seen else []))
        found: dict[str, Rollout] = {}
        with contextlib.closing(sampler.stream(requests)) as parts:
            for part in parts:
                found |= {rollout.request_id: rollout for rollout in part}
                if seen is not None:
                    seen(part)
        return [found[request.id] for request in requests]

    def _requests(
        self, prompts: Sequence[Prompt], step: int, group_size: int, sampling: Sampling, first_group: int
    ) -> list[Request]:
        """Return the requests for ``group_size`` responses to each prompt, group by group."""
        return [
            self._asked(prompt, (step, group, index), sampling)
            for group, prompt in enumerate(prompts, first_group)
            for index in range(group_size)
        ]

    def _request(self, prompt: Prompt, id: str, sampling: Sampling) -> Request:
        """Return the request for the response with the id ``STEP:GROUP:INDEX``."""
        step, group, index = map(int, id.split(":"))
        return self._asked(prompt, (step, group, index), sampling)

    def _asked(self, prompt: Prompt, place: tuple[int, int, int], sampling: Sampling) -> Request:
        """Return the request for the response at ``place`` = (step, group, index), with its own seed."""
        step, group, index = place
        own = dataclasses.replace(sampling, seed=sampling_seed(self.run.config.run.seed, step, group, index))
        return Request(f"{step}:{group}:{index}", prompt, own, group, index)


def environment_of(run: SampledRun, columns: Collection[str]) -> Episodes | None:
    """Build the environment that ``[environment]`` names, or refuse it; None without that table."""
    config = run.config.environment
    if config is None:
        return None
    known = {reward.name for reward in run.config.reward}
    make = run.plugins.require("parts", "episodes")
    control = run.config.data.control_tokens
    episodes: Episodes = make(config, run.plugins, run.tokenizer, model_length(run), columns, known, control)
    return episodes


def sampling_seed(seed: int, step: int, group: int, index: int) -> int:
    """Return the seed of one rollout (63 bits), independent of how requests are batched."""
    text = f"{seed}:{step}:{group}:{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
