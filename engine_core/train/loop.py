"""THE LOOP of every trainer, top to bottom: set-up, steps with their schedule, evaluation, metrics, saving, stopping.

The trainer defines the step itself: ``trainer.Trainer.step`` is the step of reinforcement learning. After each step the
loop takes a ``ResumePoint``. A stop in the middle of the next step or of an evaluation saves that point.
"""

from __future__ import annotations

import gc
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core import faults, timeline
from engine_core.config.dump import as_data
from engine_core.errors import (
    ConfigError,
    EngineError,
    EnvironmentProblem,
    PluginError,
    SamplerLost,
    TrainingFailed,
    did_you_mean,
    lacks_memory,
)
from engine_core.plugins.modules import blamed
from engine_core.redaction import Redactor
from engine_core.runs import machine
from engine_core.runs.logs import FILE_ONLY, Progress, setup_logging
from engine_core.runs.tracking import RunFolder, TrackerHub
from engine_core.train.checkpointing import Resume, ResumePoint, Saver, about
from engine_core.train.stopping import Stop, StopSignals, Terminated, resume_hint

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from engine_core.config import EngineConfig
    from engine_core.contracts.parts import TimelineWriter
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")

YOUNG = 500_000
"""New objects until Python collects garbage: rollouts are none, however many."""


def train(run: TrainingRun, resume: Path | Resume | None) -> dict[str, float]:
    """Set a trainer up, do the remaining steps, and save; see ``TrainingRun.train``.

    Raises:
        KeyboardInterrupt: Ctrl-C stopped the run.
        SystemExit: another signal stopped the run; 75 if its last step was saved, else 143.
        Exception: the run failed; the failure is logged and the trainer is closed.
    """
    faults.arm()
    loop: Loop | None = None
    with StopSignals() as run.signals, ExitStack() as attempt:  # closed last: run folder, its log, trackers
        try:
            with run.signals.window(), exits_are_failures():
                found = Resume.find(resume) if isinstance(resume, str | Path) else resume
                loop = start(run, found, attempt)
            if run.config.runtime.backend != "local":  # there the engines decide, which share this process
                from engine_core.local.host_memory import keep_freed_memory

                keep_freed_memory()
            with frozen_gc(), exits_are_failures():
                return loop.run_steps()
        except Stop as stop:
            try:
                saved = loop is not None and loop.save_for(stop)
                if not saved:
                    hint = loop.hint if loop else ""
                    log.warning("Stopped by %s; nothing new was saved.%s", stop.name, hint)
                run.emit("run_stopped", {"signal": stop.name})
            finally:
                _close(run)
            raise stop.ending(saved) from None
        except BaseException as failure:
            error = blamed(failure, run.plugins.plugins) if isinstance(failure, Exception) else failure
            try:
                run.emit("run_failed", {"error": f"{type(error).__name__}: {error}"})
                if run.folder is not None:
                    report_failure(error, run.step_now, loop.hint if loop else "")
            finally:
                _close(run)
            if isinstance(error, Terminated):
                raise SystemExit(Terminated.code) from None
            if error is not failure:
                raise error from failure
            raise


@contextmanager
def exits_are_failures() -> Iterator[None]:
    """Turn a ``sys.exit`` of a plugin or a library into a failure: the run would end as if it were complete.

    Raises:
        TrainingFailed: ``sys.exit`` was called.
    """
    try:
        yield
    except SystemExit as error:
        raise TrainingFailed(
            f"A plugin or a library called sys.exit({error.code}) during the run."
        ) from error


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection, and let it run less often.

    A program with torch and transformers has many objects that live until its end. Scanning them again for every few
    thousand rollouts takes a tenth of the controller's time with 1,024 workers. Does nothing if the program has frozen
    objects itself.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG) if young else 0, *older)  # 0: collection is off
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()


def start(run: TrainingRun, resume: Resume | None, attempt: ExitStack) -> Loop:
    """Do everything before the first step: run folder, log, trackers, data, workers, the state of a checkpoint.

    Args:
        run: the trainer.
        resume: the checkpoint to resume from; None: a new run.
        attempt: receives what must be closed at the end of the attempt.
    """
    folder = run.folder = RunFolder.create(run.config, run.plugins) if resume is None else resume.claim()
    attempt.callback(folder.close)
    folder.redactor = Redactor.of(as_data(run.config))
    attempt.enter_context(setup_logging(folder))
    if resume is not None:
        resume.compare(run.config, run.plugins)
    elif before := folder.attempt:
        said = "The run's folder was left by a start in which nothing was trained; its log is in logs/attempt_%d."
        log.info(said, before - 1)
    for message in machine.check_start(folder.path):
        log.warning("%s", message)
    for unread in run.config.unread:
        log.info("Not read: %s", unread)
    log.info("Plugins: %s", json.dumps(run.plugins.versions()))
    hub = TrackerHub(folder, run.config, run.plugins)
    attempt.callback(hub.close)
    if run.config.profile.steps:
        run.plugins.require("parts", "profiler")
    writer = None
    if run.plugins.offered("parts", "timeline"):
        writer = run.plugins.resolve("parts", "timeline")(folder.path, run)
        attempt.callback(writer.close)
    with timeline.span("setup"):
        run.setup(training=True, resume=resume)
    point = None
    if resume is not None:
        point = run.restore(resume)
        log.info("Resumed from %s.", resume.path)
        faults.point("resume.before_rewind")
        # steps after the checkpoint are repeated, so what was recorded of them goes
        folder.rewind(point.step, run.config, run.plugins, unfinished=point.unfinished is not None)
    hub.start()
    if hub.trackers:
        run.plugins.listener = hub.trackers.event
    run.trained = True
    return Loop(run, folder, hub, point, writer)


def report_failure(error: BaseException, step: int, hint: str) -> None:
    """Log the step in which a run failed or was ended at once.

    Args:
        error: the exception that ended the run.
        step: step number.
        hint: how to resume; "" at the start.
    """
    if not isinstance(error, Exception):
        where = f"in step {step}.{hint}" if hint else "at its start."
        log.warning("The run was ended at once %s", where)
        return
    # the caller prints the error on the screen
    log.error("%s", error, exc_info=error, extra=FILE_ONLY)
    log.error("The run failed %s", f"in step {step}.{hint}" if hint else "at its start.")
    if hint and not isinstance(error, EngineError):  # it is printed with a traceback after this log line
        error.add_note(hint.strip())


def _close(run: TrainingRun) -> None:
    """End the workers. Log an error of theirs, so that it does not replace the cause: lost workers may not close."""
    try:
        run.close()
    except Exception as error:
        log.error("The workers did not end cleanly: %s", error, exc_info=error)


class Loop:
    """The steps of one attempt: it drives a trainer, which knows nothing of it.

    Args:
        run: a trainer that is set up for training.
        folder: its run folder.
        hub: writes metrics.
        point: the point to resume from; None in a new run.
        writer: writes the timeline; None: no plugin offers that.
    """

    def __init__(
        self,
        run: TrainingRun,
        folder: RunFolder,
        hub: TrackerHub,
        point: ResumePoint | None,
        writer: TimelineWriter | None = None,
    ) -> None:
        self.run, self.folder, self.hub, self.writer = run, folder, hub, writer
        self.saver = Saver(folder, run.config.checkpoint)
        self.total = run.total_steps
        self.point = point or run.resume_point({}, unfinished={})
        before = folder.read_metrics() if point else []
        self._measured = set[str]().union(*before)  # names of all metrics so far
        self._missed = set[str]()  # names of metrics that only a later step may measure
        offered = run.plugins.offered("parts", "health")
        self._health = run.plugins.resolve("parts", "health")() if offered else None
        self._conditions = set[str]()  # names of those that were logged

    @property
    def hint(self) -> str:
        """The advice for a run that has ended early, with a space before it."""
        return f" {resume_hint(self.folder, self.run.config.checkpoint)}"

    def run_steps(self) -> dict[str, float]:
        """Do the remaining steps; return the metrics of the last step done here.

        Raises:
            SamplerLost: a sampler was lost; the last finished step is saved if that is possible.
        """
        run, metrics = self.run, dict[str, float]()
        log.info("%s", " ".join(run.derived()))
        started = {"folder": str(self.folder.path), "steps": self.total}
        run.emit("run_started", {**started, "earlier": self.folder.read_metrics()})
        with Progress(self.total, run.step_done, self.folder.path.name) as run.progress:
            try:
                if self.point.unfinished is not None:  # of a step that an earlier attempt did not finish
                    if run.step_done:  # the step is evaluated under its own settings
                        run.use_settings_of(run.step_done)
                    metrics = self.finish_step(dict(self.point.unfinished))
                while run.step_done < self.total:
                    run.signals.check()
                    with timeline.span(f"step {run.step_done + 1}"):
                        metrics = self.train_step(run.step_done + 1)
                        metrics = self.finish_step(metrics)
            except SamplerLost:
                # else the weights are not those of a finished step
                if self.point.step and not run.weights_changed:
                    self.save_finished_step()
                raise
            finally:
                run.progress = None
        run.emit("run_finished", {"metrics": metrics})
        if run.plugins.offered("parts", "plan_check"):
            run.plugins.resolve("parts", "plan_check")(run, self.folder.read_metrics())
        return metrics

    def train_step(self, step: int) -> dict[str, float]:
        """Do the trainer's part of one step, with the settings of that step; the step counts as done at the end.

        Raises:
            PluginError: the trainer's ``step`` returned no metrics.
        """
        run, start = self.run, self.run.clock.now()
        run.begin_step(step)
        faults.point("step.begin")
        metrics: dict[str, float] = run.guarded(self._step_of_trainer)(step)
        if not isinstance(metrics, Mapping):
            raise PluginError(
                f"{type(run).__name__}.step must return the metrics of the step as a dict; it gave {metrics!r}."
            )
        run.step_done, run.rows_done = step, run.rows_done + run.config.data.prompts_per_step
        seconds = run.clock.now() - start
        metrics |= {f"time/{name}": value for name, value in run.times.items()} | {"time/step": seconds}
        metrics |= self._throughput(metrics) | run.source.counters
        metrics |= machine.memory_metrics() | run.runtime.memory_metrics()
        if self.writer:
            names = {group: name for name, group in reversed(run.groups.items())}  # a group may have two
            metrics |= self.writer.write({name: group.world_size for group, name in names.items()}, metrics)
        metrics["plugins/observer_failures"] = float(run.plugins.observer_failures)
        self.point = run.resume_point(metrics, unfinished=metrics)
        run.weights_changed = False  # since the point
        run.signals.check()
        return metrics

    def finish_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluate if it is time, write the metrics, check them against goals and bounds, save if it is time."""
        run, step = self.run, self.run.step_done
        self.end_at_goal(metrics)  # before the evaluation, which a last step has
        if self.evaluation_is_due(step):
            metrics |= self.evaluate()
        faults.point("step.before_metrics")
        if step or metrics:
            self.hub.log(step, metrics)
        faults.point("step.after_metrics")
        if step:
            if run.progress:
                run.progress.step(step, metrics)
            self.end_at_goal(metrics)
            if reasons := run.emit("step_finished", {"metrics": metrics}):
                self.end_here("; ".join(reasons))
            self.check_health(metrics)
            self.check_bounds(metrics)
        self.point = run.resume_point(metrics)
        if step and self.saver.due(step, metrics, last=step == self.total):
            self.save(must=step == self.total)
        return metrics

    def evaluation_is_due(self, step: int) -> bool:
        """Return whether ``[eval]`` asks for scores after a step; 0 is the start."""
        config = self.run.config.eval
        if step == 0:
            return config.at_start
        last = step == self.total and config.at_end
        return bool(config.every_steps and step % config.every_steps == 0) or last

    def evaluate(self) -> dict[str, float]:
        """Score the held-out sets; a stop may interrupt it."""
        run = self.run
        if run.progress:
            run.progress.phase("eval")
        start = run.clock.now()
        with timeline.span("eval"), run.signals.window(), self._memory_explained():
            faults.point("step.eval")
            metrics = run.evaluate()
        metrics["time/eval"] = run.clock.now() - start
        run.emit("evaluated", {"metrics": metrics})
        return metrics

    def end_at_goal(self, metrics: Mapping[str, float]) -> None:
        """Make this step the last one if a metric has reached its goal in ``[run] finish_above`` or ``finish_below``."""
        run, done = self.run.config.run, self.run.step_done
        for name in (run.finish_above.keys() | run.finish_below.keys()) & metrics.keys():
            value, above = metrics[name], run.finish_above.get(name, math.inf)
            reached = value > above or value < run.finish_below.get(name, -math.inf)
            if reached and done != self.total:
                self.end_here(f"{name} is {value:.4g} and has reached its goal.")

    def end_here(self, reason: str) -> None:
        """Make the last finished step the last one of the run."""
        self.total = self.run.step_done
        log.info("The run ends after step %d. %s", self.total, reason)

    def check_bounds(self, metrics: Mapping[str, float]) -> None:
        """End the run if a metric is above its bound in ``[run] fail_above``.

        Raises:
            TrainingFailed: a metric is above its bound; the step is not saved.
            ConfigError: no step measures a metric that has a bound or chooses the best checkpoint.
        """
        self._measured |= set(metrics)
        evaluated = any(name.startswith("eval/") for name in self._measured)
        stages = [f"stage/{stage.name}/" for stage in self.run.config.stage]
        for key, name in self.run.config.chosen_metrics:
            waits = "actor/loss" not in self._measured or (name.startswith("eval/") and not evaluated)
            if name in self._measured or waits:
                continue
            said = f"{key}: no step measures '{name}'.{did_you_mean(name, self._measured)}"
            if not name.startswith((*self.run.late_metrics, *stages)):
                raise ConfigError(said)
            if name not in self._missed:
                log.warning("%s A later step may; until then the key has no effect.", said)
                self._missed.add(name)
        for name, bound in self.run.config.run.fail_above.items():
            if name in metrics and not metrics[name] <= bound:  # NaN is over every bound
                raise TrainingFailed(
                    f"{name} is {metrics[name]:.4g} after step {self.run.step_done}, above run.fail_above = {bound:g}. "
                    "The step is not saved; the last checkpoint is from before it."
                )

    def check_health(self, metrics: dict[str, float]) -> None:
        """Show the conditions that hold, and log and report each the first time, if the part ``health`` is installed."""
        found = self._health(metrics) if self._health else {}
        for name in [name for name in found if name not in self._conditions]:
            log.info("Advice (%s): %s", name, found[name])
            self.run.emit("condition_found", {"name": name, "message": found[name]})
        self._conditions |= found.keys()
        if self.run.progress:
            self.run.progress.conditions = list(found)

    def save(self, must: bool) -> None:
        """Write a checkpoint of the last finished step; a failure is an error if it ``must`` be written."""
        run = self.run
        if run.progress:
            run.progress.phase("checkpoint")
        described = about(run.config, run.plugins, run.tokenizer, run.roles(training=True))
        with timeline.span(f"save step {self.point.step}"):
            path = self.saver.save(self.point, self._write, described, must)
        if path:
            run.plugins.emit("checkpoint_saved", self.point.step, {"path": str(path)})
        else:
            run.plugins.emit("checkpoint_failed", self.point.step, {"failures": self.saver.failures})

    def _write(self, folder: Path) -> None:
        """Write the workers' state after the metrics have come to the disk."""
        self.hub.sync()
        self.run.save_roles(folder)

    def save_for(self, stop: Stop) -> bool:
        """Save the last finished step because of a stop; return False if that is switched off or fails."""
        self.run.runtime.give_up()  # the stop may have come between a call and the wait for its result
        if saved := self.save_finished_step(EnvironmentProblem):
            log.warning("Stopped by %s after step %d.%s", stop.name, self.point.step, self.hint)
        return saved

    def save_finished_step(self, expected: type[EngineError] = EngineError) -> bool:
        """Save the last finished step at an early end of the run; return False if that is switched off or fails.

        Args:
            expected: errors of the save that are logged, since the caller reports why the run ends; others are raised.
        """
        if not self.saver.config.at_stop:
            return False
        try:
            self.save(must=True)
        except expected as error:
            log.error("%s", error)
            return False
        return True

    def _step_of_trainer(self, step: int) -> dict[str, float]:
        profiled: AbstractContextManager[None] = nullcontext()
        if step in self.run.config.profile.steps:
            profiled = self.run.runtime.profiled(self.folder.path / "profile" / f"step_{step:06}")
        with self._memory_explained(), profiled:
            return self.run.step(step)

    def _memory_explained(self) -> AbstractContextManager[None]:
        run = self.run
        return out_of_memory_explained(run.step_now, run.config_now, run.trained_roles, run.samples)

    def _throughput(self, metrics: Mapping[str, float]) -> dict[str, float]:
        found, times = {}, self.run.times
        # asynchronous sampling is no phase
        if times.get("generate") and "tokens/generated" in metrics and "time/sampling" not in metrics:
            found["throughput/generated_tokens_per_second"] = metrics["tokens/generated"] / times["generate"]
        if times.get("train") and "tokens/total" in metrics:
            found["throughput/train_tokens_per_second"] = metrics["tokens/total"] / times["train"]
        return found


@contextmanager
def out_of_memory_explained(
    step: int, config: EngineConfig, trained: Sequence[str], samples: bool
) -> Iterator[None]:
    """Turn an out-of-memory error of an accelerator or host into one that names the settings to lower.

    Args:
        step: step number, for the message.
        config: settings of that step.
        trained: roles that are trained.
        samples: whether the step samples rollouts.

    Raises:
        EnvironmentProblem: raised in place of the out-of-memory error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        rank = getattr(error.__cause__, "rank", None)
        where = "" if rank is None else f" on rank {rank}"
        now = {name: str(config.role(name).max_tokens_per_rank) for name in trained}
        automatic = "auto; the log says what it came to"
        budgets = " or ".join(
            f"{name}.max_tokens_per_rank (now {automatic if budget == 'auto' else budget})"
            for name, budget in now.items()
        )
        longest = (
            "rollout.max_response_tokens or data.max_prompt_tokens" if samples else "the limits of [data]"
        )
        raise EnvironmentProblem(
            f"Out of memory{where} in step {step}: {str(error).partition(chr(10))[0][:200]} "
            f"Lower {budgets}; if one sequence is too long for the device, lower {longest}; recompute activations or "
            "offload, if the backend has the option; or use more processes. Then: `engine resume RUN --set KEY=VALUE`."
        ) from error
