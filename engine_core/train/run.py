"""Base class of every trainer: set-up, training from the start or from a checkpoint, export.

A trainer is a subclass with ``prepare`` (resolve what it needs, refuse what cannot work), ``roles``
(which workers to start), ``step`` (do one step, return its metrics) and its own state. ``train.loop`` drives the
steps, ``train.checkpointing`` writes checkpoints.
"""

from __future__ import annotations

import abc
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import faults
from engine_core.config.assemble import plugins_for
from engine_core.config.completeness import check_complete
from engine_core.config.evaluation import HeldOut, held_out_sets
from engine_core.data import check_tokenizer, load_tokenizer, tokenizer_hash
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.metrics import Max, Sum, declared, merge
from engine_core.model_config import load_hf_config
from engine_core.runs import machine
from engine_core.runs.logs import setup_logging
from engine_core.runs.tracking import RunFolder, TrackerHub
from engine_core.train.checkpointing import Resume, seed_random
from engine_core.train.clock import Clock
from engine_core.train.loop import train
from engine_core.train.models import start_groups, warn_of_random_weights
from engine_core.train.source_rows import place_of_rows
from engine_core.train.stopping import Stop, StopSignals, report_failure, report_stop
from engine_core.types import Batch, TrainOutput

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.parts import RewardModels
    from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
    from engine_core.runs.logs import Progress
    from engine_core.train.checkpointing import ResumePoint
    from engine_core.train.loop import Loop
    from engine_core.types import LossCall, StepOutput

log = logging.getLogger("engine")

PHASES_WITH_FAULTS = ("generate", "reward", "log_probs", "train", "sync")


class TrainingRun(abc.ABC):
    """A run of one trainer. No model is built before ``setup`` or ``train``.

    Args:
        config: from ``load_config``.
        model: a live module instead of ``[model] path`` (local runtime).
        tokenizer: a live tokenizer.
        rewards: functions, called in this process with weight 1, in addition to ``[[reward]]``.
        data: rows (dicts) instead of ``[data] train``.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: Any = None,
        tokenizer: Any = None,
        rewards: Sequence[Callable[..., Any]] | None = None,
        data: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        live = {"model": model, "tokenizer": tokenizer, "rewards": rewards, "data": data}
        check_live(live)
        self.live = {name: value for name, value in live.items() if value is not None}
        check_complete(config, self.live)
        self.config = self.config_now = config
        self.plugins = plugins_for(config)
        self.clock = Clock()
        self.folder: RunFolder | None = None
        self.verified: Path | None = None  # the newest good checkpoint, after a run that ended early
        self.groups: dict[str, WorkerGroup] = {}
        self.runtime: Runtime
        self.step_done = self.step_now = 0
        self.skipped_in_a_row: dict[str, int] = {}  # optimizer steps, by role
        self.signals = StopSignals()  # takes signals only within ``train``
        self.times: dict[str, float] = {}  # seconds in each phase of this step
        self.progress: Progress | None = None
        self._trains = self._trained = self._restores = False
        self._updated = False  # an optimizer step was done in this step, so the step must finish
        self._cleanup = ExitStack()  # workers and data
        self._attempt = ExitStack()  # run folder, logs, trackers

    # what a subclass overrides

    def prepare(self) -> None:
        """Resolve what the trainer needs; refuse what cannot work, before any model is built."""

    @abc.abstractmethod
    def roles(self, training: bool) -> dict[str, Role]:
        """Return the workers to start, by role; without ``training`` none has an optimizer."""

    @abc.abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Do step number ``step`` (from 1); return its metrics."""

    def start(self) -> None:
        """Do what is needed once after the workers have started."""

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps in one step."""
        return 1

    @abc.abstractmethod
    def make_source(self) -> Any:
        """Build the source of training rows, which may come from ``live``."""

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Score the held-out files; return ``eval/...`` metrics.

        Args:
            out: folder for the sampled rollouts, one file a set; read by trainers that sample.
        """
        return {}

    def state(self) -> dict[str, Any]:
        """Return the trainer's own JSON state, for checkpoints."""
        return {}

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        """Return the functions that write state that is not JSON, by file of the checkpoint; each holds a snapshot."""
        return {}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the result of ``state``, and read the files that ``files`` wrote below ``folder``."""

    # the run

    def setup(self, training: bool = False, resume: Resume | None = None) -> None:
        """Load tokenizer and data, then start the workers. Inputs are checked before models are built.

        Args:
            training: with optimizers, for ``train``; without, for evaluation, sampling and export.
            resume: the checkpoint to resume from, which must fit the data and the tokenizer.

        Raises:
            ConfigError: this trainer was closed after training, and its weights with it.
        """
        if self._trained and not self.groups:
            raise ConfigError(
                "This trainer was closed after training, and its weights with it. Make a new one: "
                "load_checkpoint(FOLDER) loads the weights of a run, train(resume=RUN) resumes a run."
            )
        if self.groups and (self._trains or not training):
            return
        self._cleanup.close()
        self._trains = training
        faults.point("run.setup")
        seed_random(self.config.run.seed)
        self.load_inputs()
        if resume is not None:
            resume.check_inputs(self)
        runtime = self.plugins.resolve("runtimes", self.config.runtime.backend)
        self.runtime = runtime(self.config, self.plugins, {**self.live, "tokenizer": self.tokenizer})
        self._cleanup.callback(self.runtime.close)
        steps = self.total_steps * self.optimizer_steps_per_step if training else 0
        roles = self.roles(training)
        if "rollout" in roles:
            roles |= self._reward_roles()
        self.groups = start_groups(self.runtime, self.config, roles, steps)
        if resume is None and not self._restores:
            warn_of_random_weights(self, roles)
        self.start()

    def _reward_roles(self) -> dict[str, Role]:
        """Return the models of the rewards as roles of the run."""
        if not any(reward.has_model for reward in self.config.reward):
            return {}
        part: RewardModels = self.plugins.require("parts", "reward_models")
        return part.roles(self.config)

    def load_inputs(self) -> None:
        """Do the part of ``setup`` before any model is built: tokenizer, data, ``prepare``."""
        self.tokenizer = self.live.get("tokenizer") or load_tokenizer(self.config.model)
        if "model" not in self.live and not self.plugins.overrides("engine_build_model"):
            for remark in check_tokenizer(self.tokenizer, load_hf_config(self.config.model)):
                log.info("%s", remark)
        self.source = self.make_source()
        self._cleanup.callback(self.source.close)
        self.prepare()

    @property
    def total_steps(self) -> int:
        """Number of steps of the run: `run.steps`, or `run.epochs` passes over the data.

        Raises:
            ConfigError: the data has too few rows for one step.
        """
        run = self.config.run
        if run.steps is not None:
            return run.steps
        steps = run.epochs * len(self.source) // self.config.data.prompts_per_step
        if steps == 0:
            raise ConfigError(
                f"{place_of_rows(self)} has {len(self.source)} usable rows and data.prompts_per_step = "
                f"{self.config.data.prompts_per_step}: not one step. Lower it, or set run.steps."
            )
        return steps

    def train(self, resume: Path | Resume | None = None) -> dict[str, float]:
        """Train to the end. ``evaluate``, ``generate`` and ``export`` then use the trained weights.

        A first SIGTERM, SIGUSR1 or Ctrl-C stops within the step, saves the last finished step and raises
        ``SystemExit(75)`` or ``KeyboardInterrupt``; a second signal ends the process at once.

        Args:
            resume: a run folder, resumed from its newest good checkpoint, or the result of ``Resume.find`` for it.

        Returns:
            The metrics of the last step, with those of the last evaluation.

        Raises:
            TrainingFailed: training cannot continue. Checkpoints and logs are kept; the trainer is closed.
            ConfigError: this trainer has trained already, or the checkpoint does not fit the config.
        """
        if self._trained:
            raise ConfigError(
                "This trainer has trained already. Make a new one; train(resume=RUN) resumes a run."
            )
        return train(self, resume)

    def export(self, folder: Path, adapter: bool = False) -> None:
        """Write the actor and the tokenizer as a Hugging Face folder.

        Args:
            folder: a new folder.
            adapter: write only the LoRA adapter, for peft; else base and adapter are merged.

        Raises:
            ConfigError: the run has no adapter.
        """
        if adapter and self.config.actor.lora is None:
            raise ConfigError(
                "The run trained the whole model: it has no [actor.lora], so there is no adapter."
            )
        self.setup()
        what: dict[str, Any] = {"adapter": True} if adapter else {}
        self.groups["actor"].call("export", folder=Path(folder), **what).result()
        self.tokenizer.save_pretrained(folder)

    def load_checkpoint(self, path: Path) -> None:
        """Load weights and state from a checkpoint folder; in training also optimizers and position in the data."""
        found, self._restores = Resume.at(path), True
        self.setup()
        if found.state["tokenizer"] != tokenizer_hash(self.tokenizer):
            log.warning(
                "The tokenizer is not the one of checkpoint %s: its tokens mean something else.", path.name
            )
        if self._trains:  # else no row is read, and the data files may differ
            self.source.load_state(found.state["data"])
        found.restore(self)

    def close(self) -> None:
        """Stop workers and trackers; safe to call twice."""
        self._attempt.close()
        self.end_workers()

    def end_workers(self) -> None:
        """Close workers and data; the run folder, its log and the trackers stay open."""
        self._cleanup.close()
        self.groups = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step, display it, and let the runtime hand device memory over.

        A stop may interrupt the phase at any point, except in ``train`` and ``sync`` and after an optimizer step.
        """
        start = self.clock.now()
        if self.progress:
            self.progress.phase(name)
        with self.runtime.phase(name), self._window(name not in ("train", "sync")):
            if name in PHASES_WITH_FAULTS:
                faults.point(f"step.{name}")
            yield
        self.times[name] = self.times.get(name, 0.0) + self.clock.now() - start

    def _window(self, wanted: bool = True) -> AbstractContextManager[None]:
        return self.signals.window() if wanted and not self._updated else nullcontext()

    @property
    def weights_changed(self) -> bool:
        """Whether an optimizer step was done in the current step."""
        return self._updated

    def end_attempt(self) -> None:
        """Close the run folder, its log and the trackers; workers and data stay for ``evaluate`` and ``export``."""
        self._attempt.close()

    def begin_step(self, step: int) -> None:
        """Begin step number ``step``: reset its phase times and its record of weight changes."""
        self.step_now, self._updated, self.times = step, False, {}

    def forward_backward(self, batch: Batch, loss: LossCall, role: str = "actor") -> TrainOutput:
        """Add the gradient of a mini-batch; a stop may interrupt this while no weight has changed in this step."""
        with self._window():
            output = self.groups[role].call("forward_backward", batch, loss=loss).result()
        faults.point("step.after_backward")
        return output

    def optimizer_step(self, role: str = "actor") -> StepOutput:
        """Update a role's weights; from here on a stop waits for the end of the step.

        Raises:
            TrainingFailed: too many optimizer steps in a row had gradients that are not finite; the weights are
                those before the first of them.
        """
        self._updated = True
        done = self.groups[role].call("optimizer_step").result()
        faults.point("step.after_update")
        self.count_skipped(done, role)
        return done

    def learn(
        self,
        batch: Batch | Iterable[Batch],
        loss: LossCall,
        role: str = "actor",
        check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Do one optimizer step of a role on a batch: forward, backward, check, step.

        Args:
            batch: with ``weights`` [T] and the columns of the loss; or an iterable of its parts, built lazily.
            loss: the loss by name, with plain values.
            role: the role to update.
            check: called with the metrics of the loss before the weights change; an error that it raises prevents that.

        Returns:
            The metrics of the loss, and ``ROLE/loss``, ``/grad_norm``, ``/lr``, ``/skipped_steps``, ``/micro_batches``.
        """
        output = TrainOutput(0.0)
        for part in [batch] if isinstance(batch, Batch) else batch:
            made = self.forward_backward(part, loss, role)
            output.loss += made.loss
            output.num_micro_batches += made.num_micro_batches
            merge(output.metrics, made.metrics)
        metrics = declared(output.metrics)
        if check is not None:
            check(metrics)
        done = self.optimizer_step(role)
        return metrics | {
            f"{role}/loss": output.loss,
            f"{role}/grad_norm": done.grad_norm,
            f"{role}/lr": Max(done.lr),
            f"{role}/skipped_steps": Sum(done.skipped),
            f"{role}/micro_batches": float(output.num_micro_batches),
        }

    @property
    def samples(self) -> bool:
        """Whether each step samples the rollouts that it learns from, and records them."""
        return False

    @property
    def training(self) -> bool:
        """Whether the trainer is set up with optimizers, or about to be."""
        return self._trains

    @property
    def running(self) -> bool:
        """Whether ``train`` is running, so that results belong in the run folder."""
        return self.progress is not None

    def emit(self, event: str, data: Mapping[str, Any]) -> None:
        """Send an event to the observers."""
        self.plugins.emit(event, self.step_now, data)

    def held_out(self) -> list[HeldOut]:
        """Return the sets to evaluate under the settings of this step.

        Raises:
            ConfigError: no held-out files are configured.
        """
        if sets := held_out_sets(self.config_now):
            return sets
        raise ConfigError("[eval] needs data.validation or [[eval.set]]: name the held-out files.")

    def count_skipped(self, done: StepOutput, role: str = "actor") -> None:
        """Count optimizer steps of a role that are skipped in a row.

        Raises:
            TrainingFailed: the count reached `max_skipped_steps`; the weights are those before the first of them.
        """
        in_a_row = self.skipped_in_a_row[role] = self.skipped_in_a_row.get(role, 0) + 1 if done.skipped else 0
        limit = self.config.role(role).optim.max_skipped_steps
        if done.skipped:
            log.warning(
                "Optimizer step skipped: the gradient norm of '%s' is %s (%d in a row).",
                role, done.grad_norm, in_a_row,
            )  # fmt: skip
        if in_a_row >= limit:
            raise TrainingFailed(
                f"{limit} optimizer steps in a row had gradients that are not finite ({role}.optim.max_skipped_steps). "
                f"The weights are those before the first of them. Lower {role}.optim.lr, or look at the rollouts of this step."
            )

    # parts of train

    def open(self, resume: Resume | None) -> ResumePoint | None:
        """Do everything before the first step; return the point to resume from, None in a new run."""
        if resume is None:
            self.folder = RunFolder.create(self.config, self.plugins)
        else:
            self.folder = resume.claim()
        self._attempt.callback(self.folder.close)
        self._attempt.enter_context(setup_logging(self.folder))
        if resume is not None:
            resume.compare(self)
        elif before := self.folder.attempt:
            said = "The run's folder was left by a start in which nothing was trained; its log is in logs/attempt_%d."
            log.info(said, before - 1)
        for message in machine.check_start(self.folder.path):
            log.warning("%s", message)
        for unread in self.config.unread:
            log.info("Not read: %s", unread)
        log.info("Plugins: %s", json.dumps(self.plugins.versions()))
        self.hub = TrackerHub(self.folder, self.config, self.plugins)
        self._attempt.callback(self.hub.close)
        self.setup(training=True, resume=resume)
        point = resume.go_on(self) if resume is not None else None
        self.hub.start()
        self._trained = True
        return point

    def stopped(self, stop: Stop, loop: Loop | None) -> BaseException:
        """Save the last finished step after a stop; return the exception that ``train`` raises."""
        try:
            if loop is not None:
                self.runtime.give_up()  # the stop may have come between a call and the wait for its result
            saved = loop is not None and loop.save_for(stop)
            if not saved:
                log.warning("Stopped by %s; nothing new was saved.", stop.name)
            if loop is not None:
                report_stop(self, saved)
            return stop.ending(saved)
        finally:
            self.close()

    def failed(self, error: BaseException, began: bool) -> None:
        """Report the step in which the run failed or was ended at once, and the state of its checkpoints."""
        try:
            self.emit("run_failed", {"error": f"{type(error).__name__}: {error}"})
            if self.folder is not None:
                report_failure(self, error, began=began)
        finally:
            self.close()

    def derived(self) -> list[str]:
        """Return the numbers derived from the run file, as parts of a line that is logged at the start."""
        data, group = self.config.data, self.config.rollout.group_size
        each = (
            f" x {group} responses = {data.prompts_per_step * group} rollouts"
            if "rollout" in self.roles(training=True)
            else ""
        )
        # counting usable rows reads them all, so it is done only where the number of steps depends on it
        rows = "" if self.config.run.steps else f" ({len(self.source)} rows in {place_of_rows(self)})"
        return [
            f"{self.total_steps} steps of {data.prompts_per_step} rows{each}{rows},",
            f"{self.optimizer_steps_per_step} optimizer step(s) each,",
            self.config.actor.micro_batch,
        ]


def check_live(live: Mapping[str, Any]) -> None:
    """Refuse names and paths given in place of Python objects; name the key where each belongs.

    Raises:
        ConfigError: a value is a text or a path, or ``rewards`` is not a list of functions.
    """
    keys = {
        "model": "model.path",
        "tokenizer": "model.tokenizer",
        "rewards": "[[reward]]",
        "data": "data.train",
    }
    problems = [
        f"{name}: got the text {value!r}; expected the object itself. A name or path belongs in {keys[name]}."
        for name, value in live.items()
        if isinstance(value, (str, Path))
    ]
    rewards = live.get("rewards")
    if rewards is not None and not problems and (callable(rewards) or not all(callable(r) for r in rewards)):
        problems.append("rewards: expected a list of functions. A reward by name belongs in [[reward]].")
    if problems:
        raise ConfigError(problems)
