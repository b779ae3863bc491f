"""``engine train --dry-run``: what a start would refuse, short of making a run folder and building a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core.config.read import key_text
from engine_core.errors import errors_of, refuse
from engine_core.rewards.preflight import try_rewards
from engine_core.runs.folders import check_free
from engine_core.runs.tracking import make_tracker

if TYPE_CHECKING:
    from engine_core.train.run import TrainingRun


def dry_run(run: TrainingRun) -> list[str]:
    """Check what a start would check, and call each reward on a made-up response.

    Args:
        run: a trainer that is not set up.

    Returns:
        The numbers derived from the run file, the processes of each role, and the value of each reward, as lines.

    Raises:
        EngineError: everything that a start would refuse.
    """
    refuse(errors_of([partial(check_free, run.config), partial(_make_trackers, run), run.load_inputs]))
    lines = [*run.derived(), *_layout(run)]
    refuse(errors_of([partial(_check_engines, run), lambda: lines.extend(_rewards(run))]))
    return lines


def _make_trackers(run: TrainingRun) -> None:
    for name in run.config.tracking.trackers:
        make_tracker(name, run.config, run.plugins)


def _check_engines(run: TrainingRun) -> None:
    """Check that the train engines fit their models and pools, and, if they run in this process, this machine."""
    from engine_core.local.engine_host import check_ranks

    config, roles = run.config, run.roles(training=True)
    local = config.runtime.backend == "local"
    if local:
        runtime: Any = run.plugins.resolve("runtimes", "local")(config, run.plugins, run.live)
        runtime.host.check(roles)
    together = 1 if local else getattr(config.runtime.options, "processes", 1)
    for name in (name for name, role in roles.items() if role.kind == "train"):
        processes = config.placement.pools.get(config.placement.pool_of(name) or "", together)
        table, model = config.role(name), config.model_of(name)
        engine = run.plugins.resolve("train_engines", table.backend)
        if isinstance(processes, int):
            check_ranks(config, name, engine, processes)
        if not run.builds_model:
            model = model.model_copy(update={"path": table.path or model.path})
            engine.check_model(table, model, name, processes if isinstance(processes, int) else None)


def _layout(run: TrainingRun) -> list[str]:
    """Return which roles share which processes, as lines."""
    config = run.config
    roles = run.roles(training=True)
    runtime: Any = run.plugins.spec("runtimes", config.runtime.backend)
    if runtime.in_process:
        return [f"Roles in this process: {', '.join(roles)}"]
    pools = config.placement.pools
    if not pools:
        processes = getattr(config.runtime.options, "processes", "auto")
        count = "one process for each GPU" if processes == "auto" else f"{processes} process(es)"
        return [f"Roles in {count}: {', '.join(roles)}"]
    lines, first = [], 0
    for pool, size in pools.items():
        inside = [role for role in roles if config.placement.pool_of(role) == pool]
        ranks = f"process {first}" if size == 1 else f"processes {first} to {first + size - 1}"
        lines.append(f"Pool {pool}, {ranks}: {', '.join(inside) or 'no role'}")
        first += size
    return lines


def _rewards(run: Any) -> list[str]:
    """Return the value that each reward gives a made-up response to the first row, as lines."""
    if not (getattr(run, "scores", False) and run.rewards.scorers):
        return []
    prompts = run.source.take(1)
    return [
        f"Reward {key_text((name,))} of a made-up response: {value}"
        for name, value in try_rewards(run.rewards, prompts[0]).items()
    ]
