"""Contracts of an environment: its episodes train, repeat and resume exactly, and survive any response."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy

from engine_core.runs.rollout_files import read_rollouts, rollout_path
from engine_core.types import sequences_of
from engine_plugin_testing.contracts import contract, refused
from engine_plugin_testing.trainer_cases import compare

if TYPE_CHECKING:
    from engine_plugin_testing.trainer_bench import EnvironmentBench


def _without_errors(lines: list[dict[str, float]], what: str) -> None:
    for line in lines:
        failed = line["environment/errors"] + line["environment/timeouts"]
        assert failed == 0, f"{failed:g} episodes of step {line['step']} failed {what}; the log shows where."


@contract()
def episodes_end_without_errors(bench: EnvironmentBench) -> None:
    """In three steps with a random model, no episode fails.

    Each episode ends with a rollout.
    """
    _without_errors(bench.train("run", 3), "")


@contract(catches=("a failure on a short turn",))
def short_responses_are_survived(bench: EnvironmentBench) -> None:
    """Very short episodes end without an error.

    Cases: episodes of one turn, and responses that are cut after their first token.
    """
    _without_errors(bench.train("turn", 1, environment__max_turns=1), "with one turn")
    _without_errors(bench.train("token", 1, rollout__max_response_tokens=1), "with responses of one token")


@contract(
    catches=("random numbers that ignore the episode's seed", "random numbers of Python's global generator")
)
def a_run_is_repeated_exactly(bench: EnvironmentBench) -> None:
    """Two runs with one seed have the same metrics, because random numbers come from ``episode.seed``.

    The second run does not seed the global generators of Python and numpy, whose numbers depend on the order of episodes.
    """
    first = bench.train("first", 2)
    with patch.object(random, "seed"), patch.object(numpy.random, "seed"):
        second = bench.train("second", 2)
    compare(first, second, "The repeated run, whose global generators have another state,")


@contract(catches=("state that outlives an episode",))
def a_resumed_run_ends_like_one_that_was_not_stopped(bench: EnvironmentBench) -> None:
    """After a resume, steps have the same metrics as in a run that was not stopped.

    No state outlives an episode.
    """
    whole = bench.train("whole", 4)
    bench.train("half", 2)
    compare(whole, bench.train("half", 4, resume=True), "The resumed run")


@contract(catches=("a turn that is learned in two sequences",))
def each_turn_is_learned_once(bench: EnvironmentBench) -> None:
    """No sampled turn is learned in two sequences of an episode: its rollout and its branches.

    Each branch learns a turn that the others do not, and shares the prompt, the group and the reward of its episode.
    """
    bench.train("sequences", 1, tracking__rollouts_every_steps=1)
    for rollout in read_rollouts(rollout_path(bench.folder / "runs" / "sequences" / "rollouts", 1)):
        learned: set[int] = set()
        for sequence in sequences_of([rollout]):
            at = f"sequence {sequence.request_id}"
            turns = set(sequence.extras["turns"][sequence.loss_mask].tolist())
            assert turns, f"{at} learns no turn."
            assert not turns & learned, f"{at} learns turn {min(turns & learned)}, and so does another one."
            learned |= turns
            assert sequence.prompt.id == rollout.prompt.id, f"{at} has the prompt {sequence.prompt.id}."
            assert sequence.reward == rollout.reward, f"{at} has another reward than its episode."


@contract()
def unknown_options_are_refused(bench: EnvironmentBench) -> None:
    """A key that is not in the environment's table is refused when the run file is read."""
    with refused("A table with the unknown key 'no_such_option'", "no_such_option"):
        bench.config("options", 1, {**bench.settings["options"], "no_such_option": 1})
