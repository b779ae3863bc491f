"""The steps of one attempt: schedule, step, evaluation, metrics, bounds, checkpoint; and the stop in between.

After each step the loop takes a ``ResumePoint``. A stop that comes later, in the middle of the next step
or of an evaluation, saves that point.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine_core import faults, machine
from engine_core.advice import STEPS, advice
from engine_core.config.schedule import changes, config_at
from engine_core.errors import (
    ConfigError,
    EngineError,
    EnvironmentProblem,
    SamplerLost,
    TrainingFailed,
    did_you_mean,
)
from engine_core.progress import Progress
from engine_core.trainers.ending import way_on
from engine_core.trainers.memory import keep_freed_memory, out_of_memory_explained, set_up_is_kept
from engine_core.trainers.points import ResumePoint

if TYPE_CHECKING:
    from engine_core.preemption import Stop
    from engine_core.trainers.base import TrainingRun
    from engine_core.trainers.saving import Saver

log = logging.getLogger("engine")


class StepLoop:
    """Drives a trainer through its steps.

    Args:
        run: set up for training.
        saver: writes its checkpoints.
    """

    def __init__(self, run: TrainingRun, saver: Saver) -> None:
        self.run, self.saver = run, saver
        self.point: ResumePoint | None = None
        self._total = run.total_steps
        self._measured: set[str] = set()  # names of all metrics so far
        self._first: list[dict[str, float]] = []  # metrics of the first steps done here

    def go(self, point: ResumePoint | None) -> dict[str, float]:
        """Do the steps that are left.

        Args:
            point: what the run goes on from; None at its beginning.

        Returns:
            The metrics of the last step done here.
        """
        run = self.run
        log.info("%s", " ".join(run.derived()))
        run.emit("run_started", {"steps": self._total})
        assert run.folder is not None
        if not run.runtime.in_process:
            keep_freed_memory()
        self.point = point or ResumePoint.take(run, {}, unfinished={})
        metrics: dict[str, float] = {}
        with (
            Progress(self._total, run.step_done, run.folder.path.name) as run.progress,
            set_up_is_kept(run.clock.now) as look_for_garbage,
        ):
            try:
                if self.point.unfinished is not None:
                    if run.step_done:  # its evaluation is under the settings of its step
                        apply_schedule(run, run.step_done)
                    metrics = self._finish(dict(self.point.unfinished))
                while run.step_done < self._total:
                    run.signals.check()
                    metrics = self._finish(self._train(run.step_done + 1))
                    look_for_garbage()
            except SamplerLost:
                self._keep()
                raise
            finally:
                run.progress = None
        run.folder.pending.finish()
        run.emit("run_finished", {"metrics": metrics})
        return metrics

    def stop(self, stop: Stop) -> bool:
        """Save the last point, for a stop that was asked for; False where there is none to save."""
        if self.point is None:
            return False
        try:
            self.saver.save(self.point, must=True)
        except EnvironmentProblem as error:
            log.error("%s", error)
            return False
        log.warning("Stopped by %s after step %d. %s", stop.name, self.point.step, way_on(self.run))
        return True

    def _keep(self) -> None:
        """Save the last finished step, where the failed one has changed no weight."""
        run = self.run
        if self.point is None or run._updated or not self.point.step:
            return
        try:
            self.saver.save(self.point, must=True)
        except EngineError as error:  # the failure itself is told by whoever called
            log.error("%s", error)

    def _train(self, step: int) -> dict[str, float]:
        """The trainer's part of one step; the step counts as done when it is over."""
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

    def _finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluate, write the metrics down, hold them against their bounds, save."""
        run, step = self.run, self.run.step_done
        if self._evaluates(step):
            metrics |= self._evaluated()
        faults.point("step.before_metrics")
        if step or metrics:
            run.hub.log(step, metrics)
        faults.point("step.after_metrics")
        if step:
            self._advise(metrics)
            if run.progress:
                run.progress.step(step, metrics)
            run.emit("step_finished", {"metrics": metrics})
            self._check_bounds(metrics)
        self.point = ResumePoint.take(run, metrics)
        if step and self.saver.due(step, metrics, last=step == self._total):
            self._save(last=step == self._total)
        return metrics

    def _evaluates(self, step: int) -> bool:
        config = self.run.config.eval
        if step == 0:
            return config.at_start
        last = step == self._total and config.at_end
        return bool(config.every_steps and step % config.every_steps == 0) or last

    def _evaluated(self) -> dict[str, float]:
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

    def _save(self, last: bool) -> None:
        assert self.point is not None
        if self.run.progress:
            self.run.progress.phase("checkpoint")
        self.saver.save(self.point, must=last)

    def _check_bounds(self, metrics: Mapping[str, float]) -> None:
        self._measured |= set(metrics)
        evaluated = any(name.startswith("eval/") for name in self._measured)
        for name, bound in self.run.config.run.stop_above.items():
            waits = "actor/loss" not in self._measured or (name.startswith("eval/") and not evaluated)
            if name not in self._measured and not waits:
                raise ConfigError(
                    f"run.stop_above: no step measures '{name}'.{did_you_mean(name, self._measured)}"
                )
            if name in metrics and not metrics[name] <= bound:  # NaN is over every bound
                raise TrainingFailed(
                    f"{name} is {metrics[name]:.4g} after step {self.run.step_done}, over run.stop_above = {bound:g}. "
                    "The step is not saved; the last checkpoint is from before it."
                )

    def _advise(self, metrics: dict[str, float]) -> None:
        """Say once what would make the run quicker."""
        if len(self._first) < STEPS:
            self._first.append(metrics)
            if len(self._first) == STEPS and (said := advice(self._first)):
                log.info("Advice: %s", said)

    def _throughput(self, metrics: Mapping[str, float]) -> dict[str, float]:
        found, times = {}, self.run.times
        if times.get("generate") and "time/sampling" not in metrics:  # which is not a phase
            found["throughput/generated_tokens_per_second"] = metrics["tokens/generated"] / times["generate"]
        if times.get("train"):
            found["throughput/train_tokens_per_second"] = metrics.get("tokens/total", 0.0) / times["train"]
        return found


def apply_schedule(run: TrainingRun, step: int) -> None:
    """Give a run the settings of ``step``, and its workers those that they hold."""
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
