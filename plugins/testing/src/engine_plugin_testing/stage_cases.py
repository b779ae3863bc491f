"""Contracts of a stage: what it keeps, what it leaves alone, and its state."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import StageState
from engine_plugin_testing.contracts import contract

if TYPE_CHECKING:
    from engine_core.types import Rollout
    from engine_plugin_testing.algorithm_bench import StageBench

GROUPS = [[0.0, 1.0, 0.5, 1.0], [2.0, -1.0, 0.0, 0.25], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
STEPS = 4
SAMPLED = ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions")


def _call(stage: Any, rollouts: list[Rollout], step: int) -> tuple[list[Rollout], Mapping[str, Any]]:
    made = stage(rollouts, step)
    pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)
    assert pair, f"It must return (rollouts, metrics), a list and a dict; it returned {type(made).__name__}."
    kept = list(made[0])
    for name, value in made[1].items():
        assert math.isfinite(float(value)), f"Metric '{name}' is {value}."
    return kept, made[1]


def _made(stage: Any, rollouts: list[Rollout], step: int) -> tuple[list[str], dict[str, Any]]:
    """Return what a stage makes of a step: the kept ids, and rewards, validity and metrics by name."""
    kept, metrics = _call(stage, rollouts, step)
    values = {f"metric '{name}'": float(value) for name, value in metrics.items()}
    for rollout in kept:
        values |= {
            f"{name} of '{rollout.request_id}'": getattr(rollout, name)
            for name in ("reward", "rewards", "valid")
        }
    return [rollout.request_id for rollout in kept], values


def _same(stages: Sequence[Any], names: Sequence[str], bench: StageBench, step: int) -> None:
    """Check that two stages make the same of a step."""
    (first, own), (second, other) = (_made(stage, bench.rollouts(GROUPS, step), step) for stage in stages)
    assert first == second, f"In step {step} {names[0]} keeps {first}, {names[1]} {second}."
    for name in sorted({*own, *other}):
        assert own.get(name) == other.get(name), (
            f"In step {step} {name} is {own.get(name)} for {names[0]}, {other.get(name)} for {names[1]}."
        )


@contract(catches=("the wrong groups kept",))
def examples_are_kept_as_they_say(bench: StageBench) -> None:
    """From the groups of each example, a new stage keeps the positions that the example gives, in any order."""
    for groups, expected in bench.examples:
        kept, _ = _call(bench.stage(), bench.rollouts(groups), 1)
        found = [sorted(r.index for r in kept if r.group_id == number) for number in range(len(groups))]
        assert found == [sorted(positions) for positions in expected], (
            f"Of groups {groups} it keeps the positions {found}; expected {expected}."
        )


@contract(catches=("log-probs changed in a rollout",))
def what_was_sampled_stays(bench: StageBench) -> None:
    """A stage changes no token, mask, log-prob, version or prompt of a rollout.

    Groups stay together.
    """
    stage = bench.stage()
    for step in range(1, STEPS + 1):
        before = {r.request_id: r for r in bench.rollouts(GROUPS, step)}
        kept, _ = _call(stage, bench.rollouts(GROUPS, step), step)
        for rollout in kept:
            if (own := before.get(rollout.request_id)) is None:  # of an earlier step
                continue
            for name in SAMPLED:
                assert torch.equal(getattr(rollout, name), getattr(own, name)), (
                    f"It changes {name} of rollout '{rollout.request_id}'."
                )
            assert rollout.prompt == own.prompt, f"It changes the prompt of rollout '{rollout.request_id}'."
        current = [rollout for rollout in kept if rollout.request_id in before]
        pairs = {(rollout.group_id, before[rollout.request_id].group_id) for rollout in current}
        assert len(pairs) == len({new for new, _ in pairs}) == len({old for _, old in pairs}), (
            "It puts the rollouts of a group into several groups, or those of several groups into one."
        )


@contract(catches=("a failure on a step without valid rollouts",))
def steps_without_anything_pass(bench: StageBench) -> None:
    """The stage handles a step with no valid rollout or with only one rollout.

    Cases: a step without rollouts, one whose rollouts are all invalid, and one with a single rollout.

    Raises:
        AssertionError: the stage fails on one of them.
    """
    invalid = [dataclasses.replace(rollout, valid=False) for rollout in bench.rollouts(GROUPS)]
    for name, rollouts in (
        ("no rollout", []),
        ("invalid rollouts only", invalid),
        ("one rollout", bench.rollouts([[1.0]])),
    ):
        try:
            _call(bench.stage(), rollouts, 1)
        except Exception as error:
            raise AssertionError(f"It fails on a step with {name}: {error}") from error


@contract(catches=("a random choice",))
def a_step_is_repeated_exactly(bench: StageBench) -> None:
    """New stages that see the same steps give the same rollouts, rewards and metrics.

    A resumed run repeats steps.
    """
    stages = [bench.stage(), bench.stage()]
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        _same(stages, ("one", "the other"), bench, step)


@contract(catches=("a state that lacks a part", "rewards that follow a mean which is not in the state"))
def a_resumed_stage_continues(bench: StageBench) -> None:
    """A stage that loads the state of another stage continues exactly as that one does.

    The state is as a checkpoint holds it. In all further steps both keep and change the same.

    Raises:
        AssertionError: the state is no JSON, or the two differ.
    """
    going = bench.stage()
    if not hasattr(going, "state"):
        return  # a function has no state
    for step in range(1, STEPS + 1):
        _call(going, bench.rollouts(GROUPS, step), step)
    state = going.state()
    assert isinstance(state, StageState), f"state() gives {type(state).__name__}, expected a StageState."
    try:
        values = json.loads(json.dumps(state.values))
    except TypeError as error:
        raise AssertionError(f"The values of state() cannot be written as JSON: {error}") from error
    held = [dataclasses.replace(rollout) for rollout in state.rollouts]
    resumed = bench.stage()
    resumed.load_state(StageState(values, held))  # type: ignore[attr-defined]
    for step in (2, STEPS + 1, STEPS + 2):
        _same((going, resumed), ("the stage", "the resumed one"), bench, step)
