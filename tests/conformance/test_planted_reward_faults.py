"""The contract of random steps catches faults of the runner and of the pools of workers, which no reward can have."""

import pytest

from engine_core.rewards import signatures
from engine_core.rewards.runner import RewardRunner
from engine_plugin_rewards.worker_pool import early
from engine_plugin_rewards.worker_pool.pool import Pool
from engine_plugin_testing import RewardSuite
from engine_plugin_testing.reward_bench import RewardBench
from engine_plugin_testing.worker import Place

CONTRACT = "random_steps_are_summed_as_configured"


FOUR = {"completion": "2 + 2 = 4", "answer": "4"}


class Numbers(RewardSuite):
    name = "numeric"
    examples = [(FOUR, 1.0), (FOUR | {"answer": "5"}, 0.0), (FOUR | {"answer": None}, None)]
    failing = [FOUR | {"answer": "unknown"}]


def turned(monkeypatch):
    """The samples of a group that is scored as it arrives are in another order."""
    arguments = early.arguments

    def backwards(*of_group):
        return {name: list(values)[::-1] for name, values in arguments(*of_group).items()}

    monkeypatch.setattr(early, "arguments", backwards)


def kept_counts(monkeypatch):
    """The failures of a step are added to those before."""
    begin = RewardRunner._begin

    def begun(self, rollouts, step):
        before = [scorer.failures for scorer in self.scorers]
        found = begin(self, rollouts, step)
        for scorer, failures in zip(self.scorers, before, strict=True):
            scorer.failures = failures
        return found

    monkeypatch.setattr(RewardRunner, "_begin", begun)


def unnoticed(monkeypatch):
    """A failure among outcomes that are known before is not counted."""
    known = RewardRunner._known
    monkeypatch.setattr(
        RewardRunner,
        "_known",
        lambda self, outcomes, count, _: known(self, outcomes, count, lambda *of_one: None),
    )


def clips_the_sum(monkeypatch):
    """A value is weighted, then clipped."""
    terms = RewardRunner.terms

    def late(self):
        for name, weight, clipped in terms(self):
            yield name, 1.0 if weight else 0.0, lambda value, w=weight, c=clipped: c(w * value)

    monkeypatch.setattr(RewardRunner, "terms", late)


def goes_on(monkeypatch):
    """The workers of a step that was given up finish their requests."""

    def abandon(self):
        self.queue.clear()
        self.outcomes = []

    monkeypatch.setattr(Pool, "abandon", abandon)


def own_objects(monkeypatch):
    """A function in the controller gets the lists of the rows themselves."""
    monkeypatch.setattr(signatures.copy, "deepcopy", lambda value: value)


FAULTS = [
    (turned, "the samples of a group turned as it arrives"),
    (kept_counts, "failures of the step before"),
    (unnoticed, "a failure that is known before and not counted"),
    (clips_the_sum, "a weight before the range"),
    (own_objects, "the lists of a row changed by a function"),
    (goes_on, "answers of a step that was given up"),
]


@pytest.mark.parametrize(("plant", "fault"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_caught_by_its_contract(monkeypatch, tmp_path, plant, fault):
    made = Numbers.contracts[f"test_{CONTRACT}"]
    plant(monkeypatch)
    with pytest.raises((AssertionError, AttributeError)):  # an answer may have no place in the new step
        made.function(RewardBench(Numbers.settings(), Place(0, 1, tmp_path, tmp_path)))
    assert fault in made.catches
