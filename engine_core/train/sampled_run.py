"""Base class of every trainer that samples: a sampler next to the actor, rewards, stages, evaluation by sampling.

A custom data flow is a subclass with a ``step`` like this one::

    def step(self, step):
        rollouts, metrics = self.rollouts(step)  # sampled, scored, after the stages
        batch = self.batch(rollouts)
        ...  # weights of the tokens to learn
        return metrics | self.learn(batch, LossCall("nll")) | self.sync()
"""

from __future__ import annotations

import functools
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine_core import timeline
from engine_core.config.evaluation import UNNAMED
from engine_core.config.requirements import GREEDY
from engine_core.contracts.parts import CARRIED
from engine_core.contracts.runtime import REWARD_PHASE, Role
from engine_core.data import PromptSource, tokenizer_hash
from engine_core.errors import ConfigError, PluginError
from engine_core.rewards import RewardRunner
from engine_core.rewards.preflight import ROWS, check_rewards, check_rows
from engine_core.runs.folders import writing
from engine_core.runs.rollout_files import read_rollouts, rollout_path, write_rollouts
from engine_core.tables import DISTRIBUTION
from engine_core.train.capabilities import check_adapter, check_partial
from engine_core.train.models import held_tokens, model_length
from engine_core.train.rollouts import Rounds, Sampler, Stages
from engine_core.train.run import TrainingRun
from engine_core.types import BRANCH, CUT, Batch, sampled_tokens, sequences_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from engine_core.config.evaluation import HeldOut
    from engine_core.config.models import DataConfig
    from engine_core.contracts.parts import EarlyScores, EarlyStop, Episodes, RewardModels, StreamUpdate
    from engine_core.rewards.models import Known, ModelReward
    from engine_core.types import Prompt, Rollout, Sampling

log = logging.getLogger("engine")


class SampledRun(TrainingRun):
    """A run that samples the rollouts it learns from; a subclass defines in ``step`` how it learns.

    Attributes:
        stages: the stages of the run file.
        environment: the environment; None without one.
        rewards: computes the rewards of rollouts.
        sampler: samples rollouts.
        version: number of weight updates sent to the sampler.
    """

    samples = True  #: whether each step samples its rollouts
    samples_greedy = False  #: whether each prompt gets a greedy response too, for ``Rollout.greedy_reward``
    scores = True  #: whether rewards are computed here
    streams = False  #: whether the update may be the sum of parts (`rollout.stream_update`)
    stream_update: StreamUpdate | None = None
    """Learns from complete groups while others are sampled; None: the update begins when all are sampled."""
    replays_support = False
    """Whether rollouts record the support that top-p and top-k left, and log-probs are computed over it."""

    # set-up

    def prepare(self) -> None:
        """Build stages, environment, rewards and sampler; refuse what cannot work.

        Raises:
            PluginError: a stage cannot be called.
            ConfigError: the sampler, the environment or a reward cannot be used.
            DataError: the data lacks a column that a reward needs.
        """
        config = self.config
        if config.rollout.stream_update is True and not self.streams:
            raise ConfigError(
                f"rollout.stream_update: got true, but trainer = '{config.trainer}' learns from whole batches. Remove the key."
            )
        if self.samples:
            check_adapter(config)
            check_partial(config, self.plugins)
        self.stages = Stages(config.stage, self.plugins)
        columns = self.reward_columns() if self.scores else set()
        self.environment = self._make_environment(columns) if self.scores else None
        if self.environment:
            self._cleanup.callback(self.environment.close)
        self.rewards = self.make_rewards(columns) if self.scores else RewardRunner([], self.plugins)
        self._cleanup.callback(self.rewards.close)
        self.rewards.check_columns(columns)
        self.sampler = Sampler(self.settings, self.groups, self.environment, self.replays_support)
        self.early_stop: EarlyStop | None = None
        if config.rollout.over_sampling > 1:
            part = self.plugins.require("parts", "early_stop")
            self.early_stop = part(self.settings, self.groups, self.clock, self.environment)
        self._cut_is_noted = False
        self.version = 0  # number of weight updates sent to the sampler
        self.recorded: Path | None = None  # a folder of stored rollouts, which steps read instead of sampling
        self._traded = 0.0  # the runtime's `traded_seconds` at the last update of the sampler

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the roles ``actor`` and ``rollout``."""
        return {"actor": Role("train", trainable=training), "rollout": Role("rollout")}

    def start(self) -> None:
        """Send the actor's weights to the sampler."""
        self.push_weights(updated=False)  # a broken transport ends the run here, not after an hour

    def source_of(self, split: str, data: DataConfig, rows: Any) -> Any:
        """Open a split as prompts; ``[data] over_long`` applies to prompts that are too long to continue."""
        held = held_tokens(self.text_config, self.config.rollout.options)
        environment = self.config.environment
        spec: Any = environment and self.plugins.spec("environments", environment.name)
        tools = spec.tools if spec and data.columns.tools else ()
        tools = tools(environment.options) if environment and callable(tools) else tools
        return PromptSource(data, self.tokenizer, self.config.run.seed, split, rows, held, tools)

    def reward_columns(self) -> set[str]:
        """Return the columns of the rows that are scored."""
        columns: set[str] = self.source.columns()
        return columns

    def reward_rows(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return place and columns of some rows that are scored, for the check of rewards before the run begins."""
        rows: Iterable[tuple[str, Mapping[str, Any]]] = self.source.spread(ROWS)
        return rows

    def make_rewards(self, columns: Collection[str]) -> RewardRunner:
        """Build the rewards of the run and check some rows.

        Args:
            columns: names of the data's columns.
        """
        config, plugins = self.config, self.plugins
        self._row_checks = check_rewards(config.reward, plugins)
        self._check_rows(self.reward_rows(), config.data.max_bad_rows)
        models: Mapping[str, ModelReward] = {}
        if any(reward.has_model for reward in config.reward):
            part: RewardModels = plugins.require("parts", "reward_models")
            models = part.rewards(config, plugins, self.groups.__getitem__, self.tokenizer, columns)
        given = self.environment.reward_weights if self.environment else {}
        live = self.live.get("rewards") or ()
        return RewardRunner(config.reward, plugins, self.tokenizer, live, models, given)

    def _make_environment(self, columns: Collection[str]) -> Episodes | None:
        """Build the environment that ``[environment]`` names, or refuse it; None without that table."""
        config = self.config.environment
        if config is None:
            return None
        length, known = model_length(self.text_config), {reward.name for reward in self.config.reward}
        make, data = self.plugins.require("parts", "episodes"), self.config.data
        episodes: Episodes = make(config, self.plugins, self.tokenizer, length, columns, known, data)
        return episodes

    def _check_rows(
        self, rows: Iterable[tuple[str, Mapping[str, Any]]], most_bad: int, names: Collection[str] = ()
    ) -> None:
        """Refuse rows that one of these rewards cannot use, or any reward; see ``preflight.check_rows``."""
        checks = {name: check for name, check in self._row_checks.items() if not names or name in names}
        scored = [reward for reward in self.config.reward if not names or reward.name in names]
        others = any(reward.weight for reward in scored if reward.name not in checks)
        others = others or (not names and (bool(self.live.get("rewards")) or self.environment is not None))
        check_rows(checks, rows, most_bad, alone=not others and len(checks) == 1)

    def check_held_out(self, source: Any, data: DataConfig, held_out: HeldOut) -> None:
        """Refuse a held-out set that lacks a column, or whose rows one of its rewards cannot use."""
        columns = source.columns()
        if self.environment:
            self.environment.check_columns(columns)
        self.rewards.only(held_out.rewards).check_columns(columns)
        self._check_rows(source.spread(ROWS), data.max_bad_rows, held_out.rewards)

    # a step

    @property
    def off_policy(self) -> bool:
        """Whether the run learns from tokens that older policies sampled."""
        return self.stages.off_policy or (self.early_stop is not None and self.early_stop.off_policy)

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Sample and score the rollouts of a step, apply the stages of the run file, and record the rollouts.

        Returns:
            B rollouts, groups together; the metrics of sampling, rewards and stages.
        """
        if self.recorded is not None:
            return read_rollouts(rollout_path(self.recorded, step)), {}
        rounds = Rounds(self.config_now, self.stages, step)
        while wanted := rounds.missing:  # more than one round where a stage refills
            greedy = None
            with self.phase("generate"):
                sampled, early = self.draw(wanted, step, rounds.groups)
                if self.samples_greedy:
                    prompts = {rollout.group_id: rollout.prompt for rollout in sampled}
                    greedy = self.sampler.sample_greedy(list(prompts.values()), step, rounds.groups)
            with self.phase("reward"):
                overlapped = early.busy_seconds if early else 0.0
                scored = self.score(sampled, step, early=early)  # handles failures by `on_error`
                if greedy is not None:
                    self.score(greedy, step)
                rounds.add(sampled, scored, overlapped, greedy)
        rollouts, metrics = rounds.finish(self.describe(rounds.sampled))
        if self.config.data.curriculum:
            self.source.curriculum.report(rounds.sampled)
        every = self.config.tracking.rollouts_every_steps
        if self.folder and every and step % every == 0:
            self._record(
                self.folder.rollouts_dir, step, rollouts, self.about(), f"The rollouts of step {step}"
            )
        self.emit("rollouts_finished", {"rollouts": rollouts})
        return rollouts, metrics

    def draw(
        self, wanted: int, step: int, first_group: int
    ) -> tuple[list[Rollout], EarlyScores | Known | None]:
        """Sample the groups of a round, and score complete ones meanwhile if `rollout.overlap_rewards` is set.

        Args:
            wanted: number of groups.
            step: step number.
            first_group: number of the first group.

        Returns:
            The rollouts, group by group; the rewards in progress, which ``score`` finishes, None where none were
            started. If the sampling raises, the rewards in progress are canceled.
        """
        if self.early_stop is not None:
            prompts = self.take_prompts(self.early_stop.to_take(wanted, self.version))
            request_of = partial(self.sampler.request, sampling=self.sampler.sampling_at(step))
            rollouts = self.early_stop.sample(prompts, step, first_group, request_of)
            self.sampler.settle(rollouts)
            return rollouts, None
        requests = self.sampler.requests(self.take_prompts(wanted), step, first_group)
        if self.stream_update is not None and self.stream_update.streams:
            return self.stream_update.draw(requests, step)
        config, early = self.config_now.rollout, None
        # groups of one would hide a reward that returns a wrong number of values
        if config.overlap_rewards and config.group_size > 1:
            early = self.rewards.early(requests, step)
        if early is None:
            return self.sampler.sample(requests), None
        try:
            rollouts = self.sampler.sample(requests, early.take)
        except BaseException:
            early.cancel()
            raise
        early.seal()
        return rollouts, early

    def take_prompts(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts of the data."""
        prompts: list[Prompt] = self.source.take(count)
        return prompts

    def score(
        self,
        rollouts: list[Rollout],
        step: int,
        training: bool = True,
        early: EarlyScores | Known | None = None,
        names: Collection[str] = (),
    ) -> dict[str, float]:
        """Fill in the rewards of rollouts, of rows of the training data or of others; return metrics and failures.

        Args:
            rollouts: to score.
            step: for messages.
            training: the prompts are rows of the training data, whose columns are known.
            early: what was scored before.
            names: of the only rewards to use, for other data.
        """
        with self.runtime.phase(REWARD_PHASE):  # also in an evaluation, which is outside the step
            rewards = self.rewards if training else self.rewards.only(names)
            return rewards.score(rollouts, step, early=early)

    def describe(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return metrics of a step's rollouts: counts, lengths, timeouts, turns."""
        sequences = sequences_of(rollouts)
        lengths = [r.response_length for r in rollouts] or [0]
        self._note_cut(rollouts)
        timeouts, self.sampler.timeouts = self.sampler.timeouts, 0
        limited = self.config.rollout.request_timeout_seconds and not self.environment
        return {
            "rollouts": float(len(rollouts)),
            "tokens/total": float(sum(r.token_ids.numel() for r in sequences)),
            "tokens/generated": float(sampled_tokens(sequences)),
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            "response_length/truncated_share": sum(r.finish_reason in CUT for r in rollouts) / len(lengths),
            **(self.environment.metrics() if self.environment else {}),
            **({"sampling/timeouts": float(timeouts)} if limited else {}),
            **(self.early_stop.metrics() if self.early_stop else {}),
        }

    def _note_cut(self, rollouts: Sequence[Rollout]) -> None:
        """Log once that a response ended because the model has no further positions."""
        if self._cut_is_noted or not self.samples:
            return
        held = held_tokens(self.text_config, self.config.rollout.options)
        most = self.config_now.rollout.max_response_tokens
        cut = (r for r in rollouts if r.finish_reason == "length" and r.response_length < most)
        if any(len(r.token_ids) >= held for r in cut):
            self._cut_is_noted = True
            log.warning(
                "A response ended before rollout.max_response_tokens (%d): with its prompt it fills the %d positions of the "
                "model. Lower data.max_prompt_tokens or rollout.max_response_tokens to sample without this limit.",
                most, held,
            )  # fmt: skip

    def batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Pack rollouts and their branches into a batch and add the columns that only the run knows.

        The added columns are float32: ``reward_term/NAME`` [B], the clipped value of each reward with a weight
        (NaN where the reward does not apply), ``reward_weight/NAME`` [B], and ``greedy_rewards`` [B] if greedy
        responses are sampled (NaN where one has no reward). ``branch`` [B] bool exists if a rollout has branches.
        With `algorithm.mask_truncated` the ``loss_mask`` of truncated rollouts is False; their rewards still count
        in their group. ``rollout_log_probs`` is left out if the step did not ask for it
        (`rollout.log_probs_every_steps`).
        """
        config = self.config_now
        is_branch = [flag for r in rollouts for flag in (False, *(True for _ in r.branches))]
        rollouts = sequences_of(rollouts)
        batch = Batch.from_rollouts(rollouts, config.rollout.temperature, self.replays_support)
        self._check_ids(batch)
        columns = {BRANCH: torch.tensor(is_branch)} if any(is_branch) else {}
        for name, weight, clipped in (term for term in self.reward_terms() if term[1]):
            values = [r.rewards.get(name) for r in rollouts]
            terms = [math.nan if value is None else clipped(value) for value in values]
            columns[f"reward_term/{name}"] = torch.tensor(terms, dtype=torch.float32)
            columns[f"reward_weight/{name}"] = torch.full((len(rollouts),), weight)
        if self.samples_greedy:
            baselines = [math.nan if r.greedy_reward is None else r.greedy_reward for r in rollouts]
            columns[GREEDY] = torch.tensor(baselines, dtype=torch.float32)
        batch = batch.with_columns(tokens=self.fresh(batch), sequences=columns)
        if config.algorithm.mask_truncated:
            mask = batch["loss_mask"] & ~batch.to_tokens(batch["truncated"])
            batch = batch.with_columns(tokens={"loss_mask": mask})
        if self.samples and not self.sampler.asks_log_probs(self.step_now):
            del batch.tokens["rollout_log_probs"]  # zeros, not log-probs
        return batch

    def _check_ids(self, batch: Batch) -> None:
        vocabulary = getattr(self.text_config, "vocab_size", None)
        if vocabulary and len(batch.token_ids) and (highest := int(batch.token_ids.max())) >= vocabulary:
            raise PluginError(
                f"The rollouts of '{self.config.rollout.backend}' have the token {highest}, but the model has "
                f"{vocabulary} tokens (vocab_size). The weights were left alone."
            )

    def reward_terms(self) -> Iterable[tuple[str, float, Callable[[float], float]]]:
        """Return name, weight and clipping function of each reward."""
        return self.rewards.terms()

    def fresh(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return ``fresh`` [T] bool, True on tokens of the newest policy of the batch; {} if all tokens are."""
        sampled = batch["policy_versions"][batch["loss_mask"]]
        if not len(sampled) or bool((sampled == sampled.max()).all()):
            return {}
        return {"fresh": batch["policy_versions"] == sampled.max()}

    def sync(self, updated: bool = True) -> dict[str, float]:
        """Send the actor's weights to the sampler; return metrics of it.

        Args:
            updated: whether the weights have changed since the last call.
        """
        with self.phase("sync"):
            return self.push_weights(updated)

    def push_weights(self, updated: bool) -> dict[str, float]:
        """Do ``sync`` within a phase; updated weights get the next version number."""
        runtime = self.runtime
        with timeline.span(f"weights {self.version + updated}", "transfers", "actor to rollout"):
            result = runtime.push_weights("actor", "rollout", self.version + updated)
        traded, self._traded = runtime.traded_seconds - self._traded, runtime.traded_seconds
        self.version = result.version
        self.emit("weights_synced", {"version": result.version, "bytes": result.bytes})
        return {
            "sync/bytes": float(result.bytes),
            "sync/seconds": result.seconds,
            "policy_version": float(result.version),
            "time/offload_and_sync": traded + result.seconds,
            **runtime.loss_metrics(),
        }

    # outside of a step

    def generate(self, prompts: list[Prompt]) -> list[Rollout]:
        """Sample and score `group_size` responses a prompt with the current weights, outside of training."""
        self.setup()
        with self.runtime.phase("generate"):
            rollouts = self.sampler.sample(self.sampler.requests(prompts, step=0))
        self.score(rollouts, step=0, training=False)
        return rollouts

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Sample the held-out prompts as ``[eval]`` says and score them.

        Args:
            out: folder for the rollouts, one file a set; default: the run folder, during training.

        Returns:
            ``eval/...`` of ``data.validation`` and ``eval/SET/...`` of each ``[[eval.set]]``, see the part ``set_metrics``.

        Raises:
            PluginError: no installed plugin offers that part.
        """
        self.setup()
        metrics: dict[str, float] = {}
        set_metrics = self.plugins.require("parts", "set_metrics")
        for held_out in self.held_out():
            prompts, sampling = self.held_items(held_out), self.sampler.sampling_of(held_out)
            size, step = held_out.samples_per_prompt, self.step_done
            with self.runtime.phase("generate"):
                rollouts = self.sampler.respond(
                    self.sampler.requests(prompts, 0, size=size, sampling=sampling)
                )
            self.score(rollouts, 0, training=False, names=held_out.rewards)
            found = set_metrics(rollouts, held_out) | self.measured(rollouts)
            found |= self.environment.metrics(held_out=True) if self.environment else {}
            metrics |= {held_out.prefix + name: value for name, value in found.items()}
            if out is not None:
                file = out / f"{held_out.name or UNNAMED}.parquet"
                write_rollouts(file, step, rollouts, self.about(sampling))
            elif self.folder and self.progress:
                folder = self.folder.rollouts_dir / "eval" / held_out.name
                self._record(folder, step, rollouts, self.about(sampling), f"The evaluation of step {step}")
        return metrics

    def measured(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Return a trainer's own metrics of the rollouts of a held-out set, in addition to their rewards."""
        return {}

    def about(self, sampling: Sampling | None = None) -> dict[str, Any]:
        """Return the tokenizer hash and the distribution parameters, for the metadata of a rollout file.

        Args:
            sampling: the parameters that the rollouts were sampled with; default: those of the step.
        """
        config = sampling or self.config_now.rollout
        return {"tokenizer": self._tokenizer_hash, **{name: getattr(config, name) for name in DISTRIBUTION}}

    @functools.cached_property
    def _tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer)

    def _record(
        self, folder: Path, step: int, rollouts: list[Rollout], about: Mapping[str, Any], what: str
    ) -> None:
        """Write rollouts into the run folder.

        Raises:
            EnvironmentProblem: they cannot be written; the disk may be full.
        """
        with writing(what):
            write_rollouts(folder, step, rollouts, about)

    # checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state of stages, and the version of the weights."""
        return {"stages": self.stages.state(), "version": self.version}

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        """Return the writers of rollouts that stages and early stopping keep, by file."""
        return {**self.stages.files(), **(self.early_stop.files() if self.early_stop else {})}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the version, in training also kept rollouts; then send the weights to the sampler."""
        self.version = state["version"]
        if self.training:
            self.stages.load(state.get("stages", {}), folder)
            if self.early_stop is not None:
                self.early_stop.load(folder)
            elif (folder / CARRIED).is_file():
                log.warning(
                    "Groups that an earlier attempt had carried over are dropped: nothing is stopped now."
                )
        self.push_weights(updated=False)  # for a sampler with its own copy of the weights
