"""Groups of stored rollouts that are read by number; trainings on them are in tests/integration/test_offline.py."""

import torch

from engine_core.config.models import DataConfig
from engine_core.runs.rollout_files import write_rollouts
from engine_core.types import Prompt, Rollout
from engine_plugin_trainers.data.stored import Fit, StoredGroups


def rollout(index, branches=()):
    return Rollout(
        f"1:0:{index}",
        Prompt("train:0", [5, 6], "x"),
        torch.tensor([5, 6, 7, 8]),
        torch.tensor([False, False, True, True]),
        torch.tensor([0.0, 0.0, -1.0, -1.0]),
        torch.zeros(4, dtype=torch.int32),
        "stop",
        index=index,
        branches=list(branches),
    )


def test_the_branches_of_an_episode_are_no_further_rollouts_of_its_group(tmp_path):
    file = tmp_path / "step_000001.parquet"
    write_rollouts(file, 1, [rollout(0, [rollout(0), rollout(0)]), rollout(1)], {"tokenizer": "t"})
    fit = Fit(tokenizer="t", vocabulary=10, temperature=1.0)
    (group,) = StoredGroups(DataConfig(train=str(file)), 0, fit).take(1)
    assert [(each.request_id, len(each.branches)) for each in group] == [("1:0:0", 2), ("1:0:1", 0)]
