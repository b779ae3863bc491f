"""THE LOOP of every trainer, top to bottom: set-up, steps with their schedule, evaluation, metrics, saving, stopping.

The trainer defines the step itself: ``trainer.Trainer.step`` is the step of reinforcement learning. After each step the
loop takes a ``ResumePoint``. A stop in the middle of the next step or of an evaluation saves that point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core import faults
from engine_core.config.schedule import changes, config_at
from engine_core.errors import (
    ConfigError,
    EngineError,
    EnvironmentProblem,
    SamplerLost,
    TrainingFailed,
    did_you_mean,
)
from engine_core.runs import machine
from engine_core.runs.logs import Progress
from engine_core.train.checkpointing import Resume, ResumePoint, Saver
from engine_core.train.memory import frozen_gc, keep_freed_memory, out_of_memory_explained
from engine_core.train.stopping import Stop, StopSignals, Terminated, resume_hint

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")

STEPS_BEFORE_ADVICE = 10


def train(run: TrainingRun, resume: Path | Resume | None) -> dict[str, float]:
    """Set a trainer up, do the remaining steps, and save; see ``TrainingRun.train``.

    Raises:
        KeyboardInterrupt: Ctrl-C stopped the run.
        SystemExit: another signal stopped the run; 75 if its last step was saved, else 143.
        Exception: the run failed; the failure is logged and the trainer is closed.
    """
    faults.arm()
    loop: Loop | None = None
    with StopSignals() as run.signals:
        try:
            with run.signals.window():
                found = Resume.find(resume) if isinstance(resume, str | Path) else resume
                point = run.open(found)  # run folder, log, trackers, data, workers; the state of a checkpoint
            loop = Loop(run, point)
            return loop.run_steps()
        except Stop as stop:
            raise run.stopped(stop, loop) from None
        except BaseException as error:
            run.failed(error, began=loop is not None)
            if isinstance(error, Terminated):
                raise SystemExit(Terminated.code) from None
            raise
        finally:
            run.end_attempt()


class Loop:
    """The steps of one attempt.

    Args:
        run: a trainer that is set up for training.
        point: the point to resume from; None in a new run.
    """

    def __init__(self, run: TrainingRun, point: ResumePoint | None) -> None:
        self.run, self.saver = run, Saver(run)
        self.total = run.total_steps
        self.point = point or ResumePoint.take(run, {}, unfinished={})
        before = run.folder.read_metrics() if point and run.folder else []
        self._measured = set[str]().union(*before)  # names of all metrics so far
        self._first: list[dict[str, float]] = []  # metrics of the first steps of this attempt

    def run_steps(self) -> dict[str, float]:
        """Do the remaining steps; return the metrics of the last step done here.

        Raises:
            SamplerLost: a sampler was lost; the last finished step is saved if that is possible.
        """
        run, metrics = self.run, dict[str, float]()
        assert run.folder is not None
        log.info("%s", " ".join(run.derived()))
        run.emit("run_started", {"steps": self.total})
        if not run.runtime.in_process:
            keep_freed_memory()
        progress = Progress(self.total, run.step_done, run.folder.path.name)
        with progress as run.progress, frozen_gc(run.clock.now) as collect_garbage:
            try:
                if self.point.unfinished is not None:  # of a step that an earlier attempt did not finish
                    if run.step_done:  # the step is evaluated under its own settings
                        apply_schedule(run, run.step_done)
                    metrics = self.finish_step(dict(self.point.unfinished))
                while run.step_done < self.total:
                    run.signals.check()
                    metrics = self.train_step(run.step_done + 1)
                    metrics = self.finish_step(metrics)
                    collect_garbage()
            except SamplerLost:
                self.save_finished_step()
                raise
            finally:
                run.progress = None
        run.emit("run_finished", {"metrics": metrics})
        return metrics

    def train_step(self, step: int) -> dict[str, float]:
        """Do the trainer's part of one step, with the settings of that step; the step counts as done at the end."""
        run, start = self.run, self.run.clock.now()
        run.begin_step(step)
        faults.point("step.begin")
        apply_schedule(run, step)
        with out_of_memory_explained(run):
            metrics = run.step(step)
        run.step_done = step
        seconds = run.clock.now() - start
        metrics |= {f"time/{name}": value for name, value in run.times.items()} | {"time/step": seconds}
        metrics |= self._throughput(metrics) | run.source.counters
        metrics |= machine.memory_metrics() | run.runtime.memory_metrics()
        metrics["plugins/observer_failures"] = float(run.plugins.observer_failures)
        self.point = ResumePoint.take(run, metrics, unfinished=metrics)
        run.signals.check()
        return metrics

    def finish_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluate if it is time, write the metrics, check them against their bounds, save if it is time."""
        run, step = self.run, self.run.step_done
        if self.evaluation_is_due(step):
            metrics |= self.evaluate()
        faults.point("step.before_metrics")
        if step or metrics:
            run.hub.log(step, metrics)
        faults.point("step.after_metrics")
        if step:
            self.log_advice(metrics)
            if run.progress:
                run.progress.step(step, metrics)
            run.emit("step_finished", {"metrics": metrics})
            self.check_bounds(metrics)
        self.point = ResumePoint.take(run, metrics)
        if step and self.saver.due(step, metrics, last=step == self.total):
            self.save(last=step == self.total)
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
        with run.signals.window(), out_of_memory_explained(run):
            faults.point("step.eval")
            metrics = run.evaluate()
        metrics["time/eval"] = run.clock.now() - start
        run.emit("evaluated", {"metrics": metrics})
        return metrics

    def check_bounds(self, metrics: Mapping[str, float]) -> None:
        """End the run if a metric is above its bound in ``[run] stop_above``.

        Raises:
            TrainingFailed: a metric is above its bound; the step is not saved.
            ConfigError: no step measures a metric that has a bound or chooses the best checkpoint.
        """
        self._measured |= set(metrics)
        evaluated = any(name.startswith("eval/") for name in self._measured)
        for key, name in self.run.config.chosen_metrics:
            waits = "actor/loss" not in self._measured or (name.startswith("eval/") and not evaluated)
            if name not in self._measured and not waits:
                raise ConfigError(f"{key}: no step measures '{name}'.{did_you_mean(name, self._measured)}")
        for name, bound in self.run.config.run.stop_above.items():
            if name in metrics and not metrics[name] <= bound:  # NaN is over every bound
                raise TrainingFailed(
                    f"{name} is {metrics[name]:.4g} after step {self.run.step_done}, over run.stop_above = {bound:g}. "
                    "The step is not saved; the last checkpoint is from before it."
                )

    def log_advice(self, metrics: dict[str, float]) -> None:
        """Log advice on speed after ``STEPS_BEFORE_ADVICE`` steps, if the part ``advice`` is installed."""
        if len(self._first) < STEPS_BEFORE_ADVICE:
            self._first.append(metrics)
            if len(self._first) == STEPS_BEFORE_ADVICE and self.run.plugins.offered("parts", "advice"):
                advice: Callable[[Sequence[Mapping[str, float]]], str] = self.run.plugins.resolve(
                    "parts", "advice"
                )
                if said := advice(self._first):
                    log.info("Advice: %s", said)

    def save(self, last: bool) -> None:
        """Write a checkpoint of the last finished step."""
        if self.run.progress:
            self.run.progress.phase("checkpoint")
        self.saver.save(self.point, must=last)

    def save_for(self, stop: Stop) -> bool:
        """Save the last finished step because of a stop; return False if that is switched off or fails."""
        if not self.saver.config.at_stop:
            return False
        try:
            self.saver.save(self.point, must=True)
        except EnvironmentProblem as error:
            log.error("%s", error)
            return False
        log.warning("Stopped by %s after step %d. %s", stop.name, self.point.step, resume_hint(self.run))
        return True

    def save_finished_step(self) -> None:
        """Save the last finished step because a sampler was lost, if the failed step has changed no weight."""
        if self.run.weights_changed or not self.point.step or not self.saver.config.at_stop:
            return
        try:
            self.saver.save(self.point, must=True)
        except EngineError as error:  # the caller reports the loss itself
            log.error("%s", error)

    def _throughput(self, metrics: Mapping[str, float]) -> dict[str, float]:
        found, times = {}, self.run.times
        if times.get("generate") and "time/sampling" not in metrics:  # asynchronous sampling is no phase
            found["throughput/generated_tokens_per_second"] = metrics["tokens/generated"] / times["generate"]
        if times.get("train"):
            found["throughput/train_tokens_per_second"] = metrics.get("tokens/total", 0.0) / times["train"]
        return found


def apply_schedule(run: TrainingRun, step: int) -> None:
    """Give a run the settings of ``step``, and send the workers their learning rates and token budgets."""
    run.config_now = config_at(run.config, step)
    changed = changes(run.config, step)
    if changed:
        log.info(
            "Schedule, step %d: %s", step, ", ".join(f"{key} = {value}" for key, value in changed.items())
        )
    for role in (name for name in ("actor", "critic") if name in run.groups):
        table = run.config_now.role(role)
        if f"{role}.optim.lr" in run.config.schedule:
            run.groups[role].call("set_lr", lr=table.optim.lr).result()
        if f"{role}.max_tokens_per_rank" in run.config.schedule:
            run.groups[role].call("set_token_budget", tokens=table.max_tokens_per_rank).result()
