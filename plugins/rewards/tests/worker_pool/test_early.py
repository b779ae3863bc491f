"""Groups scored while others are sampled: the same as scored at the end, and sooner."""

import copy
import os
import time

import pytest

from engine_core.config.rewards import RewardConfig
from engine_core.errors import TrainingFailed
from engine_core.rewards.models import Known
from engine_core.types import Request, Sampling


def config(name, **settings):
    return RewardConfig(name=name, **{"workers": 2} | settings)


def asked(rollouts):
    return [Request(r.request_id, r.prompt, Sampling(), r.group_id, r.index) for r in rollouts]


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


REWARDS = (
    config("exact"),
    config("letters", weight=0.5),
    config("misbehave", weight=0.1, max_failure_share=1.0),
)


def test_rewards_and_metrics_are_those_of_scoring_at_the_end_whatever_the_order(runner, rollouts):
    texts = ["a", "bb", "ccc", "raise", "e", "ff", "a", "h"]
    late = rollouts(*texts, answer=["a"] * 8)
    early = copy.deepcopy(late)
    expected = [runner(*REWARDS).score(late, step) for step in (1, 2)]
    scorer = runner(*REWARDS)
    for step in (1, 2):
        scoring = scorer.early(asked(early), step)
        for place in (5, 0, 4, 7, 1, 6, 2, 3):  # groups of two, complete in another order
            scoring.take([early[place]])
        scoring.seal()
        assert scorer.score(early, step, early=scoring) == expected[step - 1]
    assert [(r.reward, r.rewards, r.valid) for r in early] == [(r.reward, r.rewards, r.valid) for r in late]
    assert expected[1]["reward/misbehave/errors"] == 1.0


def test_a_group_without_a_column_that_others_have_is_scored_alike_early_and_late(runner, rollouts):
    expected = []
    for ahead in (False, True):
        scored = rollouts("a", "bb", "a", "bb", answer=["a"] * 4)
        for each in scored[2:]:  # the second group
            each.prompt.columns.clear()
        scorer = runner(config("exact", max_failure_share=1.0))
        scorer.check_columns({"answer"})
        scoring = scorer.early(asked(scored), 1) if ahead else None
        if scoring:
            for each in scored:
                scoring.take([each])
            scoring.seal()
        metrics = scorer.score(scored, 1, early=scoring)
        expected.append(([r.rewards for r in scored], metrics))
    assert expected[0] == expected[1]
    assert expected[0][0][0] == {"exact": 1.0}


def test_a_group_is_scored_as_soon_as_it_is_complete(runner, rollouts):
    scorer = runner(config("letters"))
    scored = rollouts("a", "bb", "ccc", "dddd")
    scoring = scorer.early(asked(scored), 1)
    pool = scorer.pools[0]
    scoring.take([scored[0]])
    scoring.take([scored[3]])
    time.sleep(0.3)
    assert pool.outcomes == [None] * 4
    scoring.take([scored[1]])
    until(lambda: all(pool.outcomes[:2]))
    assert [outcome.value for outcome in pool.outcomes[:2]] == [1.0, 2.0]
    assert pool.outcomes[2:] == [None] * 2
    scoring.take([scored[2]])
    scoring.seal()
    scorer.score(scored, 1, early=scoring)
    assert [r.reward for r in scored] == [1.0, 2.0, 3.0, 4.0]
    assert scoring.busy_seconds > 0


def test_a_policy_that_ends_the_run_does_so_while_others_are_sampled(runner, rollouts):
    scorer = runner(config("misbehave", on_error="fail"))
    scored = rollouts("raise", "bb", "ccc", "dddd")
    scoring = scorer.early(asked(scored), 3)
    scoring.take(scored[:2])
    until(lambda: not scoring._thread.is_alive())
    with pytest.raises(TrainingFailed, match=r"Reward 'misbehave' failed in step 3 on sample train:0"):
        scoring.take(scored[2:])
    scoring.cancel()
    good = rollouts("a", "bb")  # and the runner is fit for the next step
    scorer.score(good, 4)
    assert [r.reward for r in good] == [1.0, 2.0]


def test_who_cancels_leaves_nothing_under_way_and_no_thread(runner, rollouts):
    scorer = runner(config("misbehave"))
    scored = rollouts("sleep", "sleep", "a", "b")
    scoring = scorer.early(asked(scored), 1)
    scoring.take(scored[:2])
    until(lambda: any(worker.job for worker in scorer.pools[0].workers))
    pids = {worker.popen.pid for worker in scorer.pools[0].workers if worker.job}
    scoring.cancel()
    assert not scoring._thread.is_alive()
    assert not any(os.path.exists(f"/proc/{pid}/fd") for pid in pids)
    good = rollouts("a", "bb")
    scorer.score(good, 2)
    assert [r.reward for r in good] == [1.0, 2.0]


def test_rewards_of_this_process_and_of_all_samples_at_once_wait(runner, rollouts):
    assert runner(config("letters", workers=0)).early(asked(rollouts("a", "b")), 1) is None
    both = runner(config("letters"), config("exact", workers=0))
    scored = rollouts("a", "bb", answer=["a", "a"])
    scoring = both.early(asked(scored), 1)
    scoring.take(scored)
    scoring.seal()
    both.score(scored, 1, early=scoring)
    assert [r.rewards for r in scored] == [{"letters": 1.0, "exact": 1.0}, {"letters": 2.0, "exact": 0.0}]


def test_other_rollouts_than_those_that_were_scored_are_refused(runner, rollouts):
    scorer, scored = runner(config("letters")), rollouts("a", "bb")
    scoring = scorer.early(asked(scored), 1)
    scoring.take(scored)
    scoring.seal()
    with pytest.raises(ValueError, match="other rollouts"):
        scorer.score(scored[::-1], 1, early=scoring)


def test_outcomes_that_are_known_stay_those_of_their_rollouts_whatever_was_scored_since(runner, rollouts):
    """As with groups sampled ahead: they are scored, then other groups, and only then are they summed up."""
    texts = [["a", "bb", "raise", "dddd"], ["eeeee", "x", "f", "gg", "h", "ii"]]
    late = [rollouts(*each, answer=["a"] * len(each)) for each in texts]
    early = copy.deepcopy(late)
    expected = [runner(*REWARDS).score(each, 1) for each in late]
    scorer = runner(*REWARDS)
    known = [Known(scorer.outcomes(each), 0.0) for each in early]
    found = []
    for each, outcomes in zip(early, known, strict=True):
        found.append(scorer.score(each, 1, early=outcomes))
    assert found == expected
    for one, other in zip(late, early, strict=True):
        assert [(r.reward, r.rewards, r.valid) for r in one] == [
            (r.reward, r.rewards, r.valid) for r in other
        ]
    assert found[0]["reward/misbehave/errors"] == 1.0
