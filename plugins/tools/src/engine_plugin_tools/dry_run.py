"""``engine train --dry-run``: what a start would refuse, short of making a run folder and building a model."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.read import key_text
from engine_core.errors import ConfigError, EnvironmentProblem, PluginError, errors_of, refuse
from engine_core.runs.folders import exists_already, is_unused, writing_problem
from engine_core.train.models import reward_roles
from engine_core.types import Request, Sampling
from engine_plugin_tools.tracker_threads import make_trackers

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.runtime import Role
    from engine_core.rewards import RewardRunner
    from engine_core.rewards.signatures import Outcome
    from engine_core.train.run import TrainingRun
    from engine_core.types import Prompt


def dry_run(run: TrainingRun) -> list[str]:
    """Check what a start would check, and call each reward on a made-up response.

    Args:
        run: a trainer that is not set up.

    Returns:
        The numbers derived from the run file, the processes of each role, and the value of each reward, as lines.

    Raises:
        EngineError: everything that a start would refuse.
    """
    trackers = partial(make_trackers, run.config, run.plugins)
    refuse(errors_of([partial(check_free, run.config), trackers, run.load_inputs]))
    lines = [*run.derived(), *_layout(run)]
    refuse(
        errors_of(
            [partial(_check_machine, run), partial(check_engines, run), lambda: lines.extend(_rewards(run))]
        )
    )
    return lines


def check_free(config: EngineConfig) -> None:
    """Check that a run could make its folder.

    Raises:
        ConfigError: the name is that of a used folder.
        EnvironmentProblem: the folder cannot be created.
    """
    root, name = Path(config.run.dir), config.run.name
    if problem := writing_problem(root):
        raise EnvironmentProblem(
            f"run.dir: cannot make a run folder in '{root}': {problem}. Set run.dir to a folder you may write to."
        )
    if name and (root / name).exists() and not is_unused(root / name):
        raise ConfigError(f"{exists_already(root / name)} (for a check alone: --set run.name=NEW)")


def _check_machine(run: TrainingRun) -> None:
    """Check that the engines of this process can serve their options on this machine."""
    if run.config.runtime.backend == "local":
        runtime: Any = run.plugins.resolve("runtimes", "local")(run.config, run.plugins, run.live)
        runtime.host.check(_roles(run))


def _roles(run: TrainingRun) -> dict[str, Role]:
    """Return the roles that training starts, with the models of rewards."""
    roles = run.roles(training=True)
    return roles | reward_roles(run.config, run.plugins) if "rollout" in roles else roles


def check_engines(run: TrainingRun) -> None:
    """Check that the engines fit their models and pools, on any machine.

    Raises:
        ConfigError: an engine cannot serve its pool, or its options do not fit the model.
    """
    from engine_core.local.engine_host import check_ranks, check_sampler, naming_table

    config, roles = run.config, run.roles(training=True)
    local = config.runtime.backend == "local"
    together = 1 if local else getattr(config.runtime.options, "processes", 1)
    for name, role in roles.items():
        pools = {} if local else config.placement.pools
        processes = pools.get(config.placement.pool_of(name) or "", together)
        if role.kind != "train":
            if isinstance(processes, int):
                check_sampler(config, run.plugins, name, role, processes)
            continue
        table, model = config.role(name), config.model_of(name)
        engine = run.plugins.resolve("train_engines", table.backend)
        if isinstance(processes, int):
            check_ranks(config, name, engine, processes)
        if not run.builds_model:
            with naming_table(config, name, role):
                engine.check_model(table, model, name, processes if isinstance(processes, int) else None)


def _layout(run: TrainingRun) -> list[str]:
    """Return which roles share which processes, as lines."""
    config = run.config
    roles = _roles(run)
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


def try_rewards(rewards: RewardRunner, prompt: Prompt) -> dict[str, float | None]:
    """Call each reward with workers on two made-up responses to a prompt; return its value of the first.

    Args:
        rewards: of the run.
        prompt: a row of the data.

    Raises:
        PluginError: every reward that failed, with the line of its function.
    """
    texts = ("I do not know.", "42")
    empty = [Request(f"dry-run:{i}", prompt, Sampling(), index=i).unsampled() for i in range(len(texts))]
    rollouts = [
        replace(each, text=text, finish_reason="stop") for each, text in zip(empty, texts, strict=True)
    ]
    outcomes = rewards.outcomes(rollouts, rewards.pools)
    problems = {
        name: f"reward.{name}: fails on the made-up response '{text}': {outcome.message}.{_place(outcome)}"
        for name, found in outcomes.items()
        for text, outcome in zip(texts, found, strict=True)
        if outcome.failure
    }
    if problems:
        raise PluginError("\n".join(problems.values()))
    return {name: found[0].value for name, found in outcomes.items()}


def _place(outcome: Outcome) -> str:
    """Return the innermost line of an outcome's traceback, with a space before it; empty without one."""
    frames = re.findall(r'File "(.+?)", line (\d+)', outcome.trace)
    return f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""
