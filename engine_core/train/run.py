"""Base class of every trainer: set-up, training from the start or from a checkpoint, export.

A trainer is a subclass with ``prepare`` (resolve what it needs, refuse what cannot work), ``roles``
(which workers to start), ``step`` (do one step, return its metrics) and its own state. ``train.loop`` drives the
steps, ``train.checkpointing`` writes checkpoints.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import faults, timeline
from engine_core.config.assemble import plugins_for
from engine_core.config.completeness import check_complete
from engine_core.config.evaluation import HeldOut, held_out_sets
from engine_core.config.schedule import changes
from engine_core.data import check_tokenizer, load_tokenizer, tokenizer_hash
from engine_core.errors import ConfigError, DataError, TrainingFailed
from engine_core.metrics import Max, Sum, declared, merge
from engine_core.model_config import load_hf_config
from engine_core.runs.state_files import STATE, plain_state, reading
from engine_core.timeline import Clock
from engine_core.train import checkpointing, models
from engine_core.train.checkpointing import Resume, ResumePoint
from engine_core.train.given import GivenRows, check_live
from engine_core.train.loop import train
from engine_core.train.settings import Settings
from engine_core.train.stopping import StopSignals
from engine_core.types import Batch, TrainOutput

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.config.models import DataConfig
    from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
    from engine_core.runs.logs import Progress
    from engine_core.runs.tracking import RunFolder
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

    samples = False  #: whether each step samples the rollouts that it learns from, and records them
    late_metrics: tuple[str, ...] = ()  #: prefixes of metrics that the first step may lack

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
        self.live = {name: value for name, value in live.items() if value is not None}  #: given from Python
        check_complete(config, self.live)
        self.config = config  #: as the run file has it; ``config_now`` is that of this step
        self.settings = Settings(config)  #: the config with the changes of ``[schedule]``
        self.plugins = plugins_for(config)  #: the plugins of the run
        self.guarded = functools.partial(self.plugins.guarded, "trainers", config.trainer)  # names the plugin
        self.given = GivenRows(config.data, self.plugins, self.live.get("data"))  #: rows that are in no file
        self.clock = Clock()  #: time and threads
        self.folder: RunFolder | None = None  #: the run folder, from the start of ``train``
        self.groups: dict[str, WorkerGroup] = {}  #: the workers by role, after ``setup``
        self.runtime: Runtime  #: starts and stops the workers; set by ``setup``
        self.rows_done = 0  # of the finished steps, for `run.epochs`
        self.step_done = self.step_now = 0  #: number of the last finished step, and of the step in work
        self.skipped_in_a_row: dict[str, int] = {}  # optimizer steps, by role
        self.signals = StopSignals()  # takes signals only within ``train``
        self.times: dict[str, float] = {}  #: seconds in each phase of this step
        self.progress: Progress | None = None  # while ``train`` does steps
        self._held_items: dict[str, list[Any]] = {}  # by held-out set
        self.trained = False  #: whether ``train`` has begun
        self.training = False  #: whether it is set up with optimizers, or about to be
        self._restores = False
        self.weights_changed = False  # by an optimizer step of the step in work, which must then finish
        self._cleanup = ExitStack()  # workers and data

    @property
    def config_now(self) -> EngineConfig:
        """The config at this step."""
        return self.settings.now

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
        """Maximum number of optimizer steps in one step."""
        return 1

    def optimizer_steps(self, steps: int) -> int:
        """Return the optimizer steps of the first ``steps`` steps."""
        return steps * self.optimizer_steps_per_step

    def make_source(self) -> Any:
        """Build the source of training rows."""
        return self.source_of("train", self.config.data, self.given.train())

    def source_of(self, split: str, data: DataConfig, rows: Any) -> Any:
        """Open a split as items to learn from or to evaluate; raise NotImplementedError if a trainer defines none.

        Args:
            split: ``train``, ``validation`` or ``validation/SET``; the first part of every id.
            data: ``[data]`` for that split.
            rows: rows of a program or of data sources; None: read the files of ``data``.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither source_of nor make_source.")

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Score the held-out files; return ``eval/...`` metrics.

        Args:
            out: folder for the sampled rollouts, one file a set; read by trainers that sample.
        """
        return {}

    def state(self) -> dict[str, Any]:
        """Return the trainer's own JSON state, for checkpoints; first called before step 1, after ``prepare``."""
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
        if self.trained and not self.groups:
            raise ConfigError(
                "This trainer was closed after training, and its weights with it. Make a new one: "
                "load_checkpoint(FOLDER) loads the weights of a run, train(resume=RUN) resumes a run."
            )
        if self.groups and (self.training or not training):
            return
        self._cleanup.close()
        self.training = training
        faults.point("run.setup")
        checkpointing.seed_random(self.config.run.seed)
        with timeline.span("load inputs"):
            self.load_inputs()
        if resume is not None:
            resume.check_inputs(self.tokenizer, self.roles(training=True))
            self.source.load_state(resume.state["data"])
            self.step_done, self.rows_done = resume.progress(self.config)
        runtime = self.plugins.resolve("runtimes", self.config.runtime.backend)
        self.runtime = runtime(self.config, self.plugins, {**self.live, "tokenizer": self.tokenizer})
        self._cleanup.callback(self.runtime.close)
        steps = self.optimizer_steps(self.total_steps) if training else 0
        roles = self.roles(training)
        if "rollout" in roles:
            roles |= models.reward_roles(self.config, self.plugins)
        self.groups |= models.start_groups(self.runtime, self.config, roles, steps)
        if resume is None and not self._restores and not self.builds_model:
            models.warn_of_random_weights(self.config, self.plugins, roles)
        self.start()

    @property
    def builds_model(self) -> bool:
        """Whether the model comes from Python or from a plugin, not from its folder alone."""
        return "model" in self.live or self.plugins.overrides("engine_build_model")

    @functools.cached_property
    def text_config(self) -> Any:
        """The transformers config of the text model; None for a model that a plugin builds."""
        return models.text_config(self.config.model, self.plugins, self.live.get("model"))

    def load_inputs(self) -> None:
        """Do the part of ``setup`` before any model is built: tokenizer, data, ``prepare``."""
        self.tokenizer = self.live.get("tokenizer") or load_tokenizer(self.config.model)
        if not self.builds_model:
            for remark in check_tokenizer(self.tokenizer, load_hf_config(self.config.model)):
                log.info("%s", remark)
        self.source = self.given.arrange(self.make_source())
        self._cleanup.callback(self.source.close)
        self.guarded(self.prepare)()
        reads = type(self).source_of is not TrainingRun.source_of
        if reads and self.config.eval.during_training and held_out_sets(self.config):
            for held_out in self.held_out():  # what cannot be used is refused before a model is built
                self.held_items(held_out)

    @property
    def total_steps(self) -> int:
        """Number of steps of the run: `run.steps`, or `run.epochs` passes over the data.

        Raises:
            ConfigError: the data has too few rows for one step.
        """
        run = self.config.run
        if run.steps is not None:
            return run.steps
        left = max(run.epochs * len(self.source) - self.rows_done, 0)
        steps = self.step_done + left // self.config.data.prompts_per_step
        if steps == 0:
            raise ConfigError(
                f"{self.given.place} has {len(self.source)} usable rows and data.prompts_per_step = "
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
        if self.trained:
            raise ConfigError(
                "This trainer has trained already. Make a new one; train(resume=RUN) resumes a run."
            )
        return train(self, resume)

    def export(self, folder: Path, adapter: bool = False, role: str = "actor") -> None:
        """Write the model of a role and the tokenizer as a Hugging Face folder.

        Args:
            folder: a new folder.
            adapter: write only the LoRA adapter, for peft; else base and adapter are merged.
            role: a trained role that is loaded; after ``load_checkpoint``, only the actor is.

        Raises:
            ConfigError: the role has no adapter, or is not loaded.
        """
        what = models.export_options(self.config, role, adapter)
        self.setup()
        models.loaded(self.groups, role).call("export", folder=Path(folder), **what).result()
        self.tokenizer.save_pretrained(folder)

    def load_checkpoint(self, path: Path) -> None:
        """Load weights and state from a checkpoint folder; in training also optimizers and position in the data."""
        found, self._restores = Resume.at(path), True
        self.setup()
        if found.state["tokenizer"] != tokenizer_hash(self.tokenizer):
            log.warning(
                "The tokenizer is not the one of checkpoint %s: its tokens mean something else.", path.name
            )
        if self.training:  # else no row is read, and the data files may differ
            self.source.load_state(found.state["data"])
        self.restore(found)

    def restore(self, resume: Resume) -> ResumePoint:
        """Load weights, optimizers, random states and the trainer's own state; the trainer must be set up."""
        for name in filter(self.groups.__contains__, self._saved_roles):
            self.groups[name].call("load", folder=resume.path / name).result()
        state = resume.state
        self.step_done, self.rows_done = resume.progress(self.config)
        self.step_now = self.step_done
        with reading(resume.path / STATE):
            self.load_state(state["trainer"], resume.path)
            self.skipped_in_a_row = dict(state["trainer"]["skipped_in_a_row"])
            checkpointing.set_random_state(state["random"])
        self.settings.begin(self.step_done)
        return self.resume_point(state["metrics"], state["unfinished"])

    def resume_point(
        self, metrics: Mapping[str, float], unfinished: Mapping[str, float] | None = None
    ) -> ResumePoint:
        """Return the controller's state now; trained workers note their random states.

        Args:
            metrics: of the step that was done last.
            unfinished: the same, if the step is not evaluated and recorded yet.
        """
        for name in filter(self.groups.__contains__, self.trained_roles):  # not all outside of training
            self.groups[name].call("mark").result()
        return ResumePoint(
            self.step_done,
            self.source.state(),
            plain_state(type(self).__name__, self.guarded(self.state)())
            | {"skipped_in_a_row": dict(self.skipped_in_a_row), "rows_done": self.rows_done},
            checkpointing.random_state(),
            checkpointing.plain_metrics(metrics),
            None if unfinished is None else checkpointing.plain_metrics(unfinished),
            self.files(),
        )

    def save_roles(self, folder: Path) -> None:
        """Write the roles that a checkpoint holds, each into a folder of its name."""
        for name in self._saved_roles:
            self.groups[name].call("save", folder=folder / name).result().result()
            faults.point("checkpoint.after_role")

    @property
    def trained_roles(self) -> list[str]:
        """Names of the roles that have an optimizer in training."""
        roles = self.roles(training=True).items()
        return [name for name, role in roles if role.kind == "train" and role.trainable]

    @property
    def _saved_roles(self) -> list[str]:
        return [name for name, role in self.roles(training=True).items() if role.saved]

    def close(self) -> None:
        """Stop workers and close the data; safe to call twice. Run folder, log and trackers of a training stay open."""
        self._cleanup.close()
        self.groups.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step, display it, and let the runtime hand device memory over.

        A stop may interrupt the phase at any point, except in ``train`` and ``sync`` and after an optimizer step.
        """
        start = self.clock.now()
        if self.progress:
            self.progress.phase(name)
        with timeline.span(name), self.runtime.phase(name), self._window(name not in ("train", "sync")):
            if name in PHASES_WITH_FAULTS:
                faults.point(f"step.{name}")
            yield
        self.times[name] = self.times.get(name, 0.0) + self.clock.now() - start

    def _window(self, wanted: bool = True) -> AbstractContextManager[None]:
        return self.signals.window() if wanted and not self.weights_changed else nullcontext()

    def begin_step(self, step: int) -> None:
        """Begin step number ``step``: reset its phase times and its record of weight changes; use its settings."""
        self.step_now, self.weights_changed, self.times = step, False, {}
        self.use_settings_of(step)

    def use_settings_of(self, step: int) -> None:
        """Use the settings of a step, and send the workers their learning rates and token budgets."""
        self.settings.begin(step)
        if changed := changes(self.config, step):
            said = ", ".join(f"{key} = {value}" for key, value in changed.items())
            log.info("Schedule, step %d: %s", step, said)
        for role in (name for name in ("actor", "critic") if name in self.groups):
            table = self.config_now.role(role)
            if f"{role}.optim.lr" in self.config.schedule:
                self.groups[role].call("set_lr", lr=table.optim.lr).result()
            if f"{role}.max_tokens_per_rank" in self.config.schedule:
                self.groups[role].call("set_token_budget", tokens=table.max_tokens_per_rank).result()

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
        self.weights_changed = True
        done = self.groups[role].call("optimizer_step").result()
        faults.point("step.after_update")
        before = self.skipped_in_a_row.get(role, 0)
        # an overflow in fp16 neither counts nor ends a count
        in_a_row = self.skipped_in_a_row[role] = before if done.rescaled else (before + 1) * done.skipped
        if done.skipped:
            words = "Optimizer step skipped: the gradient norm of '%s' is %s (%d in a row)."
            log.log(logging.INFO if done.rescaled else logging.WARNING, words, role, done.grad_norm, in_a_row)
        if in_a_row >= (limit := self.config.role(role).optim.max_skipped_steps):
            raise TrainingFailed(
                f"{limit} optimizer steps in a row had gradients that are not finite ({role}.optim.max_skipped_steps). "
                f"The weights are those before the first of them. Lower {role}.optim.lr, or look at the rollouts of this step."
            )
        return done

    def learn(
        self,
        batch: Batch | Iterable[Batch | TrainOutput],
        loss: LossCall,
        role: str = "actor",
        check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Do one optimizer step of a role on a batch: forward, backward, check, step.

        Args:
            batch: with ``weights`` [T] and the columns of the loss; or an iterable of its parts or their outputs, built lazily.
            loss: the loss by name, with plain values.
            role: the role to update.
            check: called with the metrics of the loss before the weights change; an error that it raises prevents that.

        Returns:
            The metrics of the loss, and ``ROLE/loss``, ``/grad_norm``, ``/lr``, ``/skipped_steps``, ``/micro_batches``.
        """
        output = TrainOutput(0.0)
        for part in [batch] if isinstance(batch, Batch) else batch:
            made = self.forward_backward(part, loss, role) if isinstance(part, Batch) else part
            output.loss += made.loss
            output.num_micro_batches += made.num_micro_batches
            merge(output.metrics, made.metrics)
        metrics = declared(output.metrics, role)
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

    def emit(self, event: str, data: Mapping[str, Any]) -> list[str]:
        """Send an event to the observers; return their answers, see ``engine_on_event``."""
        return self.plugins.emit(event, self.step_now, data)

    def held_out(self) -> list[HeldOut]:
        """Return the sets to evaluate under the settings of this step, without an empty one of a data source.

        Raises:
            ConfigError: no held-out files are configured.
            DataError: no set is left.
        """
        if not (sets := held_out_sets(self.config_now)):
            raise ConfigError("[eval] needs data.validation or [[eval.set]]: name the held-out files.")
        rows = [self.given.held_out(each) for each in sets]
        if kept := [each for each, given in zip(sets, rows, strict=True) if given is None or len(given)]:
            return kept
        at = f"data.source = '{self.config.data.source}' has no rows for the split 'validation'"
        raise DataError(f"{at}: name files in data.validation, or evaluate nothing (eval.every_steps = 0).")

    def held_items(self, held_out: HeldOut) -> list[Any]:
        """Return the items of a held-out set, which are read once."""
        if held_out.name not in self._held_items:
            data, split = held_out.data(self.config), f"validation/{held_out.name}".rstrip("/")
            with closing(self.source_of(split, data, self.given.held_out(held_out))) as source:
                self.check_held_out(source, data, held_out)
                self._held_items[held_out.name] = source.all(held_out.max_prompts)
        return self._held_items[held_out.name]

    def check_held_out(self, source: Any, data: DataConfig, held_out: HeldOut) -> None:
        """Refuse the opened source of a held-out set that cannot be evaluated, because none of its rows is usable."""
        source.columns()

    def derived(self) -> list[str]:
        """Return the numbers derived from the run file, as parts of a line that is logged at the start."""
        data, group = self.config.data, self.config.rollout.group_size
        samples = "rollout" in self.roles(training=True)
        each = f" x {group} responses = {data.prompts_per_step * group} rollouts" if samples else ""
        # counting usable rows reads them all, so it is done only where the number of steps depends on it
        rows = "" if self.config.run.steps else f" ({len(self.source)} rows in {self.given.place})"
        return [
            f"{self.total_steps} steps of {data.prompts_per_step} rows{each}{rows},",
            f"{self.optimizer_steps_per_step} optimizer step(s) each, {self.optimizer_steps(self.total_steps)} in all,",
            self.config.actor.micro_batch,
        ]
