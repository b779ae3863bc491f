"""Contracts of rewards catch faults of the runner and of the pools of workers, which no reward can have."""

import pytest

from engine_core.errors import TrainingFailed
from engine_core.rewards import runner, signatures
from engine_core.rewards.runner import RewardRunner
from engine_core.rewards.signatures import Outcome, RewardFunction
from engine_plugin_rewards.worker_pool import early, pool
from engine_plugin_rewards.worker_pool.pool import Pool
from engine_plugin_testing import RewardRunnerSuite, RewardSuite
from engine_plugin_testing.reward_bench import RewardBench
from engine_plugin_testing.reward_runner_bench import RewardRunnerBench
from engine_plugin_testing.worker import Place

CONTRACT = "random_steps_are_summed_as_configured"


FOUR = {"completion": "2 + 2 = 4", "answer": "4"}


class Numbers(RewardSuite):
    name = "numeric"
    examples = [(FOUR, 1.0), (FOUR | {"answer": "5"}, 0.0), (FOUR | {"answer": None}, None)]
    failing = [FOUR | {"answer": "unknown"}]


def turned(monkeypatch):
    """The samples of a group that is scored as it arrives are in another order."""
    begin = early.EarlyScoring.__init__

    def begun(self, pools, on_failure, rollouts, arguments):
        def backwards(*of_group):
            return {name: list(values)[::-1] for name, values in arguments(*of_group).items()}

        begin(self, pools, on_failure, rollouts, backwards)

    monkeypatch.setattr(early.EarlyScoring, "__init__", begun)


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


def loses_the_rest(monkeypatch):
    """All samples of a request fail with the one that ended its worker."""

    def all_of_them(self, worker, outcome, on_failure):
        left = [at for at in worker.job or () if self.outcomes[at] is None]
        worker.job = ()
        for at in left:
            self._settle(at, outcome, on_failure)

    monkeypatch.setattr(Pool, "_blame", all_of_them)


def scores_again(monkeypatch):
    """The whole request of a worker that ended is sent again, without the sample that ended it."""
    blame = Pool._blame

    def again(self, worker, outcome, on_failure):
        job, waiting = list(worker.job or ()), len(self.queue)
        blame(self, worker, outcome, on_failure)
        if len(self.queue) > waiting:
            self.queue[0] = [at for at in job if self.outcomes[at] is not outcome]

    monkeypatch.setattr(Pool, "_blame", again)


def alias_first(monkeypatch):
    """``ground_truth`` is the answer, also where the data has a column of this name."""
    arguments = signatures.arguments

    def aliased(name, signature, rollouts, columns):
        found = arguments(name, signature, rollouts, columns)
        if "ground_truth" in signature.required:
            found["ground_truth"] = [r.prompt.columns["answer"] for r in rollouts]
        return found

    monkeypatch.setattr(runner, "arguments", aliased)


def own_options(monkeypatch):
    """A function gets the lists of its options themselves."""
    monkeypatch.setattr(
        RewardFunction, "call", lambda self, given: self.function(**{**given, **self.bound, **self.options})
    )


def late_is_wrong(monkeypatch):
    """A timeout counts as an error."""

    def outcome(value=None, failure="", *rest, **more):
        return Outcome(value, "error" if failure == "timeout" else failure, *rest, **more)

    monkeypatch.setattr(pool, "Outcome", outcome)


def begins_before(monkeypatch):
    """The deadline of a request counts from the last message before it."""
    give = Pool._give

    def gives(self, worker, job):
        since = worker.since
        give(self, worker, job)
        worker.since = since

    monkeypatch.setattr(Pool, "_give", gives)


def one_deadline(monkeypatch):
    """An answer of a sample does not begin the deadline of the next one."""
    take = pool.Worker._take

    def taken(self, message):
        since = self.since
        take(self, message)
        self.since = since if getattr(self, "job", None) else self.since

    monkeypatch.setattr(pool.Worker, "_take", taken)


def at_the_share(monkeypatch):
    """A step ends where as many samples fail as are allowed."""
    note = runner.Scorer.note

    def noted(self, outcome, sample, step, count):
        note(self, outcome, sample, step, count)
        if self.failed >= self.config.max_failure_share * count:
            raise TrainingFailed("max_failure_share")

    monkeypatch.setattr(runner.Scorer, "note", noted)


def unchecked(monkeypatch):
    """Columns that are missing are noticed when a function is called."""
    monkeypatch.setattr(runner, "check_columns", lambda *given: None)


def leaves_others(monkeypatch):
    """Processes in other sessions go on."""
    monkeypatch.setattr(pool, "kill_marked", lambda marks: None)


RANDOM, DEADLINE = "random_samples_of_any_form_are_scored_apart", "a_deadline_is_that_of_one_sample"
RUNNER_FAULTS = [
    (loses_the_rest, RANDOM, "the samples behind one that ends its worker lost"),
    (scores_again, RANDOM, "a sample scored again after its worker ended"),
    (alias_first, RANDOM, "an alias before the column of its name"),
    (own_options, RANDOM, "options changed by a call"),
    (late_is_wrong, RANDOM, "a timeout counted as an error"),
    (begins_before, DEADLINE, "a deadline that began before the request"),
    (one_deadline, DEADLINE, "a deadline of all samples of a request"),
    (at_the_share, "more_failures_than_allowed_end_the_step", "a step ended at the share itself"),
    (unchecked, "a_missing_column_is_refused", "columns that are never checked"),
    (leaves_others, "what_a_function_started_is_ended", "a process in another session left"),
]


class Runner(RewardRunnerSuite):
    pass


@pytest.mark.slow  # worker processes that are killed
@pytest.mark.parametrize(
    ("plant", "contract", "fault"), RUNNER_FAULTS, ids=[plant.__name__ for plant, *_ in RUNNER_FAULTS]
)
def test_a_planted_fault_of_the_workers_is_caught(monkeypatch, tmp_path, plant, contract, fault):
    made = Runner.contracts[f"test_{contract}"]
    plant(monkeypatch)
    with (
        pytest.raises((AssertionError, AttributeError, TrainingFailed)),
        RewardRunnerBench(Runner.settings(), Place(0, 1, tmp_path, tmp_path)) as bench,
    ):
        made.function(bench)
    assert fault in made.catches


def test_every_fault_that_a_contract_of_the_runner_claims_to_catch_is_planted():
    claimed = {(made.name, fault) for made in Runner.contracts.values() for fault in made.catches}
    assert claimed == {(f"test_{contract}", fault) for _, contract, fault in RUNNER_FAULTS}
