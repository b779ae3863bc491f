"""What a checkpoint holds of groups that are queued, and what a run under other settings makes of it."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from engine_core.errors import TrainingFailed
from engine_core.runs.rollout_files import RolloutFile
from engine_core.types import Batch, Prompt, Rollout
from engine_plugin_trainers.ahead import AheadQueue, Group
from engine_plugin_trainers.ahead_source import FILE, AheadSource


def source(per_step=4, staleness=1, temperature=1.0, version=3, stages=()):
    """One without workers."""
    made = object.__new__(AheadSource)
    rollout = SimpleNamespace(temperature=temperature, top_p=1.0, top_k=0, group_size=2)
    config = SimpleNamespace(rollout=rollout, stage=stages)
    options = SimpleNamespace(max_staleness=staleness)
    made.run = SimpleNamespace(config=config, config_now=config, options=options, step_done=3)
    made._tokenizer, made.version = "hash", version
    made._changed, made._ages, made._came, made._batched = threading.Condition(), None, ([], {}), None
    made.thread = object()
    made.per_step, made.queue = per_step, AheadQueue(per_step, staleness, False)
    made.returned, made.admitted, made.resampled = deque(), 0, 0
    return made


def rollout(id, prompt, version=2):
    return Rollout(
        id, prompt, torch.tensor([1, 5, 6]), torch.tensor([False, True, True]), torch.zeros(3),
        torch.full((3,), version, dtype=torch.int32), "stop",
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """State and folder: group 13 is complete, of group 14 one response is there."""
    before = source()
    before.admitted = 16
    for number in (13, 14, 15):
        group = Group(number, Prompt(f"train:{number}", [1], "", {"answer": str(number)}))
        before.queue.admit(group, step=4)
    first, second, _ = before.queue.groups
    first.rollouts = {id: rollout(id, first.prompt) for id in ("4:1:0", "4:1:1")}
    second.rollouts = {"4:2:1": rollout("4:2:1", second.prompt)}
    for name, write in before.ahead_files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name)
    return before.ahead_state(), tmp_path


def test_what_is_there_stays_with_its_prompt_and_the_rest_is_asked_for_again(saved):
    after = source()
    after.load_ahead(*saved)
    assert [(g.number, g.due, sorted(g.rollouts)) for g in after.queue.groups] == [
        (13, 5, ["4:1:0", "4:1:1"]),
        (14, 5, ["4:2:1"]),
        (15, 5, []),
    ]
    assert all(r.prompt is g.prompt for g in after.queue.groups for r in g.rollouts.values())
    assert after.queue.groups[0].prompt.columns == {"answer": "13"}
    assert (after.admitted, after.resampled, list(after.returned)) == (16, 3, [])


@pytest.mark.parametrize("other", [{"per_step": 2}, {"staleness": 2}, {"temperature": 0.7}])
def test_under_other_settings_every_prompt_is_sampled_again_in_the_order_of_the_data(saved, other):
    after = source(**other)
    after.load_ahead(*saved)
    assert after.queue.groups == []
    assert [(g.number, g.prompt.id, g.rollouts) for g in after.returned] == [
        (number, f"train:{number}", {}) for number in (13, 14, 15)
    ]
    assert (after.admitted, after.resampled) == (16, 6)


def test_a_run_that_samples_nothing_ahead_any_more_loses_no_prompt(saved, tmp_path):
    after = source(staleness=0)
    after.load_ahead(*saved)
    data = [Prompt(f"train:{number}", [1], "") for number in range(16, 20)]
    after.run.source = SimpleNamespace(take=lambda count: [data.pop(0) for _ in range(count)])
    assert [prompt.id for prompt in after._take(2)] == ["train:13", "train:14"]
    again = source(staleness=0)
    again.load_ahead(after.ahead_state(), tmp_path / "without files")
    assert [group.prompt.id for group in again.returned] == ["train:15"]
    assert [prompt.id for prompt in after._take(2)] == ["train:15", "train:16"]
    assert [prompt.id for prompt in after._take(2)] == ["train:17", "train:18"]


def test_a_checkpoint_of_a_run_that_sampled_nothing_ahead_has_nothing(tmp_path):
    after = source()
    after.load_ahead(None, tmp_path)
    assert (after.admitted, after.queue.groups) == (12, [])


def test_a_token_that_is_too_old_ends_the_run():
    with pytest.raises(TrainingFailed, match=r"Rollout '1:0:0' has a token that is 2 policy versions old"):
        source()._check_staleness([rollout("1:0:0", Prompt("p", [1], ""), version=1)])
    source()._check_staleness([rollout("1:0:0", Prompt("p", [1], ""), version=2)])


def test_the_file_is_one_of_rollouts(saved):
    assert RolloutFile(saved[1] / FILE).about["temperature"] == 1.0


def with_versions(id, versions, sampled=None):
    """A rollout whose first token is the prompt's; the versions are of the rest."""
    made = rollout(id, Prompt(id, [1], ""))
    made.token_ids = torch.arange(len(versions) + 1)
    made.loss_mask = torch.tensor([False, *(sampled or [True] * len(versions))])
    made.rollout_log_probs = torch.zeros(len(versions) + 1)
    made.policy_versions = torch.tensor([-1, *versions], dtype=torch.int32)
    return made


def test_staleness_is_that_of_the_tokens_that_count_also_once_a_stage_has_masked_some():
    made = source(version=3, staleness=2, stages=["one that masks"])
    rollouts = [
        with_versions("mixed", [1, 1, 2, 3]),
        with_versions("a", [3]),
        with_versions("none", [0], [False]),
    ]
    # ages 2, 2, 1, 0 and 0; one of three rollouts is of several versions
    expected = {"async/staleness_mean": 1.0, "async/staleness_max": 2.0, "async/mixed_version_share": 1 / 3}
    made._check_staleness(rollouts)
    assert made._staleness(rollouts) == expected
    rollouts[0].loss_mask[1:3] = False  # ages 1, 0 and 0
    assert made._staleness(rollouts) == expected | {"async/staleness_mean": 1 / 3, "async/staleness_max": 1.0}
    rollouts[0].loss_mask[3] = False  # now of one version
    made._check_staleness(rollouts)
    assert made._staleness(rollouts) == dict.fromkeys(expected, 0.0)


def test_without_stages_ages_and_sampled_tokens_are_those_of_what_came():
    made, other = source(version=3, staleness=2), source(version=3, staleness=2, stages=["one that drops"])
    rollouts = [with_versions("mixed", [1, 1, 2, 3]), with_versions("none", [0], [False])]
    for each in (made, other):
        assert each.sampled_tokens(rollouts) == 4  # nothing has come yet
        each._check_staleness(rollouts)
        assert each.sampled_tokens(rollouts) == 4
    assert made._staleness(rollouts) == other._staleness(rollouts)
    assert other.sampled_tokens(rollouts[1:]) == 0
    assert other._staleness(rollouts[1:]) == dict.fromkeys(other._staleness(rollouts), 0.0)


def test_nothing_sampled_is_not_stale():
    made = source(version=3)
    rollouts = [with_versions("none", [0], [False])]
    made._check_staleness(rollouts)
    assert set(made._staleness(rollouts).values()) == {0.0}


def test_a_token_that_is_too_old_ends_the_run_with_its_rollout_and_age():
    made = source(version=3, staleness=1)
    with pytest.raises(TrainingFailed, match=r"'old'.*2"):
        made._check_staleness([with_versions("new", [3]), with_versions("old", [2, 1])])


def mixed(mask=(False, True, True), versions=(0, 2, 3), valid=True):
    found = rollout("5:0:0", Prompt("train:0", [1], ""))
    found.loss_mask, found.valid = torch.tensor(mask), valid
    found.policy_versions = torch.tensor(versions, dtype=torch.int32)
    return found


@pytest.mark.parametrize(
    "rollouts",
    [
        [mixed(), mixed(versions=(0, 3, 3))],
        [mixed(versions=(0, 3, 3))] * 2,
        [mixed(valid=False), mixed(versions=(0, 3, 3))],  # the one older token is not learned from
        [mixed(valid=False), mixed()],
        [mixed((False, False, False))],
        [],
    ],
    ids=[
        "an older token",
        "all new",
        "an older token that does not count",
        "one of two",
        "none sampled",
        "none",
    ],
)
def test_a_batch_of_what_came_is_the_one_that_is_packed_of_any_rollouts(rollouts):
    came, other = source(), source()
    came._check_staleness(rollouts)
    batches = []
    for each in (came, other):
        batch = Batch.from_rollouts(rollouts, 1.0, False, each.known_columns(rollouts))
        fresh = {} if not rollouts else each.fresh(batch)
        batches.append(batch.with_columns(tokens=fresh))
    assert came._batched is not None
    assert other._batched is None or not rollouts
    first, second = batches
    assert first.tokens.keys() == second.tokens.keys()
    assert all(torch.equal(first[name], second[name]) for name in first.tokens)


def test_columns_of_what_came_are_taken_for_these_rollouts_alone_and_once():
    made, rollouts = source(), [mixed(), mixed()]
    made._check_staleness(rollouts)
    assert made.known_columns(rollouts[:1]) is None
    made._check_staleness(rollouts)
    assert made.known_columns([rollouts[1], rollouts[0]]) is None
    made._check_staleness(rollouts)
    assert made.known_columns(list(rollouts)).keys() == {"loss_mask", "policy_versions"}
    assert made.known_columns(rollouts) is None  # it is not held any longer
    staged = source(stages=["a filter"])
    staged._check_staleness(rollouts)
    assert staged.known_columns(rollouts) is None  # which may mask tokens in place


@pytest.mark.parametrize("change", ["in place", "another mask", "another version"])
def test_what_a_trainer_of_somebody_elses_has_changed_counts(change):
    made, rollouts = source(), [rollout("a", Prompt("p", [1], ""), version=3) for _ in range(2)]
    made._check_staleness(rollouts)
    if change == "in place":
        rollouts[1].loss_mask[2] = False
    elif change == "another mask":
        rollouts[1].loss_mask = torch.tensor([False, True, False])
    else:
        rollouts[1].policy_versions = torch.full((3,), 2, dtype=torch.int32)
    batch = Batch.from_rollouts(rollouts, 1.0, False, made.known_columns(rollouts))
    assert batch["loss_mask"].tolist() == [t for r in rollouts for t in r.loss_mask.tolist()]
    assert batch["policy_versions"].tolist() == [t for r in rollouts for t in r.policy_versions.tolist()]
    assert ("fresh" in made.fresh(batch)) == (change == "another version")


def test_older_rollouts_that_a_trainer_learns_from_once_more_are_not_fresh():
    made, prompt = source(), Prompt("p", [1], "")
    old = rollout("old", prompt, version=2)
    made._check_staleness([rollout("new", prompt, version=3)])
    batch = Batch.from_rollouts([old], 1.0, False, made.known_columns([old]))
    assert not made.fresh(batch)["fresh"].any()
