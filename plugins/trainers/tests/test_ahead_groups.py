"""What a checkpoint holds of groups that are queued, and what a run under other settings makes of it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from engine_core.errors import TrainingFailed
from engine_core.runs.rollout_files import RolloutFile
from engine_core.timeline import Clock
from engine_core.types import Batch, Prompt, Rollout
from engine_plugin_trainers.ahead import Group
from engine_plugin_trainers.ahead_groups import FILE, AheadGroups
from engine_plugin_trainers.async_trainer import AsyncTrainer

ABOUT = {"tokenizer": "hash", "temperature": 1.0}


def ahead_of(per_step=4, staleness=1, temperature=1.0):
    """One without workers."""
    rollout = SimpleNamespace(temperature=temperature, top_p=1.0, top_k=0, group_size=2)
    config = SimpleNamespace(rollout=rollout, data=SimpleNamespace(prompts_per_step=per_step))
    options = SimpleNamespace(max_staleness=staleness, order="ready")
    return AheadGroups(SimpleNamespace(config=config, now=config), None, options, Clock())


def trainer(staleness=1, version=3, **found):
    """One that samples ahead, without anything else."""
    made = object.__new__(AsyncTrainer)
    made.config = SimpleNamespace(options=SimpleNamespace(max_staleness=staleness))
    made.version, made.ahead = version, SimpleNamespace(thread=object(), **found)
    return made


def rollout(id, prompt, version=2):
    return Rollout(
        id, prompt, torch.tensor([1, 5, 6]), torch.tensor([False, True, True]), torch.zeros(3),
        torch.full((3,), version, dtype=torch.int32), "stop",
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """State and folder: group 13 is complete, of group 14 one response is there."""
    before = ahead_of()
    before.admitted = 16
    for number in (13, 14, 15):
        group = Group(number, Prompt(f"train:{number}", [1], "", {"answer": str(number)}))
        before.queue.admit(group, step=4)
    first, second, _ = before.queue.groups
    first.rollouts = {id: rollout(id, first.prompt) for id in ("4:1:0", "4:1:1")}
    second.rollouts = {"4:2:1": rollout("4:2:1", second.prompt)}
    second.rollouts["4:2:1"].rewards = {"solved": 0.5, "unknown": None}  # an episode's
    for name, write in before.files(ABOUT).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name)
    return before.state(), tmp_path


def test_what_is_there_stays_with_its_prompt_and_the_rest_is_asked_for_again(saved):
    after = ahead_of()
    after.load(*saved, 3)
    assert [(g.number, g.due, sorted(g.rollouts)) for g in after.queue.groups] == [
        (13, 5, ["4:1:0", "4:1:1"]),
        (14, 5, ["4:2:1"]),
        (15, 5, []),
    ]
    assert all(r.prompt is g.prompt for g in after.queue.groups for r in g.rollouts.values())
    assert after.queue.groups[0].prompt.columns == {"answer": "13"}
    assert after.queue.groups[1].rollouts["4:2:1"].rewards == {"solved": 0.5, "unknown": None}
    assert (after.admitted, after.resampled, list(after.returned)) == (16, 3, [])


def test_an_episode_keeps_the_prompt_and_the_branches_that_its_environment_gave_it(tmp_path):
    before, prompt = ahead_of(), Prompt("train:13", [1], "", {"answer": "13"})
    before.queue.admit(Group(13, prompt), step=4)
    own = Prompt("train:13", [1, 5], "", prompt.columns)
    branches = [rollout("", own), rollout("", prompt)]
    before.queue.groups[0].rollouts = {"4:1:0": dataclasses.replace(rollout("4:1:0", own), branches=branches)}
    (tmp_path / FILE).parent.mkdir(exist_ok=True)
    before.files(ABOUT)[FILE](tmp_path / FILE)
    after = ahead_of()
    after.load(before.state(), tmp_path, 3)
    found = after.queue.groups[0].rollouts
    assert list(found) == ["4:1:0"]
    assert found["4:1:0"].prompt.token_ids == [1, 5]
    assert [branch.prompt.token_ids for branch in found["4:1:0"].branches] == [[1, 5], [1]]


@pytest.mark.parametrize("other", [{"per_step": 2}, {"staleness": 2}, {"temperature": 0.7}])
def test_under_other_settings_every_prompt_is_sampled_again_in_the_order_of_the_data(saved, other):
    after = ahead_of(**other)
    after.load(*saved, 3)
    assert after.queue.groups == []
    assert [(g.number, g.prompt.id, g.rollouts) for g in after.returned] == [
        (number, f"train:{number}", {}) for number in (13, 14, 15)
    ]
    assert (after.admitted, after.resampled) == (16, 6)


def test_a_run_that_samples_nothing_ahead_any_more_loses_no_prompt(saved, tmp_path):
    after = ahead_of(staleness=0)
    after.load(*saved, 3)
    data = [Prompt(f"train:{number}", [1], "") for number in range(16, 20)]
    run = trainer()
    run.ahead, run.source = after, SimpleNamespace(take=lambda count: [data.pop(0) for _ in range(count)])
    assert [prompt.id for prompt in run.take_prompts(2)] == ["train:13", "train:14"]
    again = ahead_of(staleness=0)
    again.load(after.state(), tmp_path / "without files", 4)
    assert [group.prompt.id for group in again.returned] == ["train:15"]
    assert [prompt.id for prompt in run.take_prompts(2)] == ["train:15", "train:16"]
    assert [prompt.id for prompt in run.take_prompts(2)] == ["train:17", "train:18"]


def test_a_checkpoint_of_a_run_that_sampled_nothing_ahead_has_nothing(tmp_path):
    after = ahead_of()
    after.load(None, tmp_path, 3)
    assert (after.admitted, after.queue.groups) == (12, [])


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
    made = trainer(version=3, staleness=2)
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
    assert made._staleness(rollouts) == dict.fromkeys(expected, 0.0)


def test_nothing_sampled_is_not_stale():
    made = trainer(version=3)
    rollouts = [with_versions("none", [0], [False])]
    made._check_staleness(rollouts)
    assert set(made._staleness(rollouts).values()) == {0.0}
    assert set(made._staleness([]).values()) == {0.0}


def test_a_token_that_is_too_old_ends_the_run_with_its_rollout_and_age():
    made = trainer(version=3, staleness=1)
    with pytest.raises(TrainingFailed, match=r"Rollout 'old' has a token that is 2 policy versions old"):
        made._check_staleness([with_versions("new", [3]), with_versions("old", [2, 1])])
    made._check_staleness([with_versions("old", [2, 3])])


def mixed(mask=(False, True, True), versions=(0, 2, 3), valid=True):
    found = rollout("5:0:0", Prompt("train:0", [1], ""))
    found.loss_mask, found.valid = torch.tensor(mask), valid
    found.policy_versions = torch.tensor(versions, dtype=torch.int32)
    return found


@pytest.mark.parametrize(
    ("rollouts", "fresh"),
    [
        ([mixed(), mixed(versions=(0, 3, 3))], [False, False, True, False, True, True]),
        ([mixed(versions=(0, 3, 3))] * 2, None),
        ([mixed(valid=False), mixed(versions=(0, 3, 3))], None),  # the one older token is not learned from
        ([mixed((False, False, False))], None),
        ([mixed(versions=(0, 2, 2))], [False, False, False]),
    ],
    ids=["an older token", "all new", "an older token that does not count", "none sampled", "all older"],
)
def test_fresh_tokens_are_those_of_the_policy_that_is_trained_now(rollouts, fresh):
    found = trainer(version=3).fresh(Batch.from_rollouts(rollouts))
    assert ({} if fresh is None else {"fresh": fresh}) == {n: c.tolist() for n, c in found.items()}
