"""What every trainer shares: set-up in order, the step loop, schedule, progress, checkpoints, the end.

A trainer is a subclass with ``prepare`` (resolve what it needs, refuse what cannot work), ``roles``
(which workers), ``step`` (one step, metrics out) and its own state.
"""

from __future__ import annotations

import abc
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import machine
from engine_core.assemble import check_complete, plugins_for
from engine_core.checkpoint import Checkpoints, read_state
from engine_core.config.schedule import changes, config_at
from engine_core.data import PromptSource, check_tokenizer, load_tokenizer, tokenizer_hash
from engine_core.engines.model_loading import load_hf_config
from engine_core.errors import ConfigError, TrainingFailed, did_you_mean
from engine_core.logs import setup_logging
from engine_core.progress import Progress
from engine_core.tracking import RunFolder, TrackerHub

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.runtime.base import Role, Runtime, WorkerGroup
    from engine_core.types import Prompt, StepOutput

log = logging.getLogger("engine")


class TrainingRun(abc.ABC):
    """One run of one trainer. Nothing heavy happens before ``setup`` or ``train``.

    Args:
        config: from ``load_config``.
        model: a live module instead of ``[model] path`` (local runtime).
        tokenizer: a live tokenizer.
        rewards: functions, scored in this process with weight 1, besides ``[[reward]]``.
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
        self.folder: RunFolder | None = None
        self.groups: dict[str, WorkerGroup] = {}
        self.runtime: Runtime
        self.step_done = self._step_now = 0
        self._trains = self._trained = False
        self._measured: set[str] = set()
        self._skipped_in_a_row = 0
        self._times: dict[str, float] = {}
        self._progress: Progress | None = None
        self._cleanup = ExitStack()  # workers and data
        self._attempt = ExitStack()  # run folder, logs, trackers

    # what a trainer brings

    def prepare(self) -> None:
        """Resolve what the trainer needs; refuse what cannot work, before any model is built."""

    @abc.abstractmethod
    def roles(self, training: bool) -> dict[str, Role]:
        """The workers to start, by role; without ``training`` none has an optimizer."""

    @abc.abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Do step number ``step`` (from 1); returns its metrics."""

    def start(self) -> None:
        """Called once when the workers are there."""

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps in one step."""
        return 1

    def make_source(self) -> Any:
        """Where training rows come from."""
        return PromptSource(
            self.config.data, self.tokenizer, self.config.run.seed, rows=self.live.get("data")
        )

    def evaluate(self) -> dict[str, float]:
        """Scores on the validation files; ``eval/...`` metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """JSON state of the trainer itself, for checkpoints."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what ``state`` gave."""

    # the run

    def setup(self, training: bool = False) -> None:
        """Tokenizer, data, workers. Everything that can be refused is refused before models are built.

        Args:
            training: with optimizers, for ``train``; without, for evaluation, sampling and export.

        Raises:
            ConfigError: what this trainer had trained was closed with it.
        """
        if self._trained and not self.groups:
            raise ConfigError(
                "This trainer was closed after training, and its weights with it. Make a new one: "
                "load_checkpoint(FOLDER) takes the weights of a run, train(resume=RUN) goes on with it."
            )
        if self.groups and (self._trains or not training):
            return
        self._cleanup.close()
        self._trains = training
        self.load_inputs()
        runtime = self.plugins.resolve("runtimes", self.config.runtime.backend)
        self.runtime = runtime(self.config, self.plugins, {**self.live, "tokenizer": self.tokenizer})
        self._cleanup.callback(self.runtime.close)
        steps = self.total_steps * self.optimizer_steps_per_step if training else 0
        self.groups = self.runtime.start(self.roles(training), steps)
        self.start()

    def load_inputs(self) -> None:
        """The part of ``setup`` before any model: tokenizer, data, what the algorithm needs."""
        self.tokenizer = self.live.get("tokenizer") or load_tokenizer(self.config.model)
        if "model" not in self.live and not self.plugins.overrides("engine_build_model"):
            for remark in check_tokenizer(self.tokenizer, load_hf_config(self.config.model)):
                log.info("%s", remark)
        self.source = self.make_source()
        self._cleanup.callback(self.source.close)
        self.prepare()
        if getattr(self, "sampling", None) is not None:
            self._cleanup.callback(self.sampling.close)  # type: ignore[attr-defined]

    @property
    def total_steps(self) -> int:
        """Steps of the run: `run.steps`, or `run.epochs` passes over the data."""
        run = self.config.run
        if run.steps is not None:
            return run.steps
        steps = run.epochs * len(self.source) // self.config.data.prompts_per_step
        if steps == 0:
            raise ConfigError(
                f"data.train has {len(self.source)} usable rows and data.prompts_per_step = "
                f"{self.config.data.prompts_per_step}: not one step. Lower it, or set run.steps."
            )
        return steps

    def train(self, resume: Path | None = None) -> dict[str, float]:
        """Run to the end. ``evaluate``, ``generate`` and ``export`` then work on what was trained.

        Args:
            resume: a run folder to go on with, from its newest good checkpoint.

        Returns:
            The metrics of the last step, with those of the last evaluation.

        Raises:
            TrainingFailed: training cannot go on. Checkpoints and logs are kept; the trainer is closed.
            ConfigError: this trainer has trained already.
        """
        if self._trained:
            raise ConfigError(
                "This trainer has trained already. Make a new one; train(resume=RUN) goes on with a run."
            )
        try:
            self._open(resume)
            self._trained = True
            return self._loop()
        except BaseException as error:
            self.emit("run_failed", {"error": f"{type(error).__name__}: {error}"})
            if self.folder is not None and isinstance(error, Exception):
                log.error("Run failed in step %d: %s", self.step_done + 1, error)
            elif self.folder is not None:
                by = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else "a signal"
                log.warning("Run stopped in step %d by %s. %s", self.step_done + 1, by, self._way_on())
            self.close()
            raise
        finally:
            self._attempt.close()

    def export(self, folder: Path) -> None:
        """Write the actor and the tokenizer as a Hugging Face folder."""
        self.setup()
        self.groups["actor"].call("export", folder=Path(folder)).result()
        self.tokenizer.save_pretrained(folder)

    def load_checkpoint(self, path: Path) -> None:
        """Take weights, optimizer, position and state from a checkpoint folder."""
        self.setup()
        state = read_state(path)
        self.groups["actor"].call("load", folder=path / "actor").result()
        self.source.load_state(state["data"])
        self.load_state(state["trainer"])
        self.step_done = self._step_now = state["step"]
        if state["tokenizer"] != tokenizer_hash(self.tokenizer):
            log.warning(
                "The tokenizer is not the one of checkpoint %s: its tokens mean something else.", path.name
            )

    def close(self) -> None:
        """Stop workers and trackers; safe to call twice."""
        self._attempt.close()
        self._cleanup.close()
        self.groups = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step, show it, and let the runtime hand device memory over."""
        start = time.perf_counter()
        if self._progress:
            self._progress.phase(name)
        with self.runtime.phase(name):
            yield
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - start

    @property
    def running(self) -> bool:
        """Inside ``train``: what happens belongs to the run folder."""
        return self._progress is not None

    def emit(self, event: str, data: Mapping[str, Any]) -> None:
        """Tell the observers."""
        self.plugins.emit(event, self._step_now, data)

    def validation_prompts(self) -> list[Prompt]:
        """The prompts of ``[eval]``."""
        if not self.config.data.validation:
            raise ConfigError("[eval] needs data.validation: name the held-out files.")
        if not hasattr(self, "_validation"):
            source = PromptSource(self.config.data, self.tokenizer, self.config.run.seed, split="validation")
            self._validation = source.all(self.config.eval.max_prompts)
            source.close()
        return self._validation

    def count_skipped(self, done: StepOutput) -> None:
        """End the run when optimizer steps are skipped in a row: the weights are those before the first."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if done.skipped else 0
        limit = self.config.actor.optim.max_skipped_steps
        if done.skipped:
            log.warning(
                "Optimizer step skipped: the gradient norm is %s (%d in a row).",
                done.grad_norm,
                self._skipped_in_a_row,
            )
        if self._skipped_in_a_row >= limit:
            raise TrainingFailed(
                f"{limit} optimizer steps in a row had gradients that are not finite (actor.optim.max_skipped_steps). "
                "The weights are those before the first of them. Lower actor.optim.lr, or look at the rollouts of this step."
            )

    # parts of train

    def _open(self, resume: Path | None) -> None:
        checkpoint = None
        if resume is not None:
            checkpoint = Checkpoints(Path(resume) / "checkpoints").latest()
            step = read_state(checkpoint)["step"]
            self.folder = RunFolder.open(resume, step, self.config, self.plugins)
        else:
            self.folder = RunFolder.create(self.config, self.plugins)
        self._attempt.callback(self.folder.close)
        self._attempt.enter_context(setup_logging(self.folder))
        for message in machine.check_start(self.folder.path):
            log.warning("%s", message)
        for unread in self.config.unread:
            log.info("Not read: %s", unread)
        log.info("Plugins: %s", json.dumps(self.plugins.versions()))
        self.hub = TrackerHub(self.folder, self.config, self.plugins)
        self._attempt.callback(self.hub.close)
        self.setup(training=True)
        if checkpoint is not None:
            self.load_checkpoint(checkpoint)
            log.info("Resumed from %s.", checkpoint)
        self.checkpoints = Checkpoints(self.folder.checkpoints, self.config.checkpoint.keep_last)

    def _loop(self) -> dict[str, float]:
        total = self.total_steps
        log.info("%s", " ".join(self.derived()))
        self.emit("run_started", {"steps": total})
        metrics: dict[str, float] = {}
        assert self.folder is not None
        with Progress(total, self.step_done, self.folder.path.name) as self._progress:
            if self.config.eval.at_start and self.step_done == 0:
                self.hub.log(0, self._evaluated())
            while self.step_done < total:
                metrics = self._one_step(self.step_done + 1, last=self.step_done + 1 == total)
        self._progress = None
        self.emit("run_finished", {"metrics": metrics})
        return metrics

    def _one_step(self, step: int, last: bool) -> dict[str, float]:
        start = time.perf_counter()
        self._step_now = step
        self._apply_schedule(step)
        self._times = {}
        metrics = self.step(step)
        self.step_done = step
        seconds = time.perf_counter() - start
        metrics |= {f"time/{name}": value for name, value in self._times.items()} | {"time/step": seconds}
        metrics |= self._throughput(metrics) | machine.memory_metrics() | self.source.counters
        metrics["plugins/observer_failures"] = float(self.plugins.observer_failures)
        every = self.config.eval.every_steps
        if (every and step % every == 0) or (last and self.config.eval.at_end):
            metrics |= self._evaluated()
        self.hub.log(step, metrics)
        if self._progress:
            self._progress.step(step, metrics)
        self.emit("step_finished", {"metrics": metrics})
        self._check_bounds(metrics)
        saves = self.config.checkpoint
        if (saves.every_steps and step % saves.every_steps == 0) or (last and saves.at_end):
            self._save(step)
        return metrics

    def _check_bounds(self, metrics: Mapping[str, float]) -> None:
        self._measured |= set(metrics)
        evaluated = any(name.startswith("eval/") for name in self._measured)
        for name, bound in self.config.run.stop_above.items():
            waits = "actor/loss" not in self._measured or (name.startswith("eval/") and not evaluated)
            if name not in self._measured and not waits:
                raise ConfigError(
                    f"run.stop_above: no step measures '{name}'.{did_you_mean(name, self._measured)}"
                )
            if name in metrics and not metrics[name] <= bound:  # NaN is over every bound
                raise TrainingFailed(
                    f"{name} is {metrics[name]:.4g} after step {self.step_done}, over run.stop_above = {bound:g}. "
                    "The step is not saved; the last checkpoint is from before it."
                )

    def _way_on(self) -> str:
        """What to do after a stop."""
        assert self.folder is not None
        steps = Checkpoints(self.folder.checkpoints).steps()
        if not steps:
            return "No checkpoint was saved: set checkpoint.every_steps to keep work."
        return f"The newest checkpoint is of step {steps[-1]}. Go on: engine resume {self.folder.path}"

    def _evaluated(self) -> dict[str, float]:
        if self._progress:
            self._progress.phase("eval")
        start = time.perf_counter()
        metrics = self.evaluate()
        metrics["time/eval"] = time.perf_counter() - start
        self.emit("evaluated", {"metrics": metrics})
        return metrics

    def _save(self, step: int) -> None:
        def write(folder: Path) -> None:
            self.groups["actor"].call("save", folder=folder / "actor").result().result()

        state = {
            "data": self.source.state(),
            "trainer": self.state(),
            "tokenizer": tokenizer_hash(self.tokenizer),
            "plugins": self.plugins.versions(),
        }
        path = self.checkpoints.save(step, write, state)
        log.info("Checkpoint: %s", path)
        self.emit("checkpoint_saved", {"path": str(path)})

    def _apply_schedule(self, step: int) -> None:
        self.config_now = config_at(self.config, step)
        changed = changes(self.config, step)
        if changed:
            log.info(
                "Schedule, step %d: %s", step, ", ".join(f"{key} = {value}" for key, value in changed.items())
            )
        if "actor.optim.lr" in self.config.schedule:
            self.groups["actor"].call("set_lr", lr=self.config_now.actor.optim.lr).result()
        if "actor.max_tokens_per_rank" in self.config.schedule:
            budget = self.config_now.actor.max_tokens_per_rank
            self.groups["actor"].call("set_token_budget", tokens=budget).result()

    def _throughput(self, metrics: Mapping[str, float]) -> dict[str, float]:
        found = {}
        if self._times.get("generate"):
            found["throughput/generated_tokens_per_second"] = (
                metrics["tokens/generated"] / self._times["generate"]
            )
        if self._times.get("train"):
            found["throughput/train_tokens_per_second"] = (
                metrics.get("tokens/total", 0.0) / self._times["train"]
            )
        return found

    def derived(self) -> list[str]:
        """The numbers that follow from the file, said once at the start."""
        data, group = self.config.data, self.config.rollout.group_size
        each = (
            f" x {group} responses = {data.prompts_per_step * group} rollouts"
            if "rollout" in self.roles(training=True)
            else ""
        )
        # counting usable rows reads them all: only where the length of the run depends on it
        rows = "" if self.config.run.steps else f" ({len(self.source)} rows in data.train)"
        return [
            f"{self.total_steps} steps of {data.prompts_per_step} rows{each}{rows},",
            f"{self.optimizer_steps_per_step} optimizer step(s) each,",
            f"at most {self.config.actor.max_tokens_per_rank} tokens a micro-batch.",
        ]


def combine(totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mini-batches' values of each metric as the step's: counts are summed, the rest averaged."""
    rules: dict[str, Callable[[Sequence[float]], float]] = {
        "mismatch/max_abs": max,
        "actor/lr": max,
        "actor/skipped_steps": sum,
        "actor/empty_updates": sum,
    }
    return {name: rules.get(name, statistics.fmean)(values) for name, values in totals.items()}


def check_live(live: Mapping[str, Any]) -> None:
    """Refuse objects from Python that are names or paths, with the key where a name belongs."""
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
