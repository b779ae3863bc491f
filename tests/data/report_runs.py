"""Runs and rollouts for the tests of the report, with text that would run in a page that trusts it."""

from __future__ import annotations

import torch

from engine_core.config import EngineConfig
from engine_core.runs.tracking import RunFolder, TrackerHub
from engine_core.types import Prompt, Rollout

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--\u2028&amp;"


def make_run(tmp_path, lines, name="arithmetic") -> RunFolder:
    config = EngineConfig(run={"dir": str(tmp_path), "name": name}, tracking={"trackers": []})
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, None)
    hub.start()
    for step, line in enumerate(lines, 1):
        hub.log(step, line)
    hub.close()
    run.close()
    return run


def rollout(text: str, reward: float, group: int = 0, length: int = 1) -> Rollout:
    count = 1 + length
    return Rollout(
        f"r{group}:{text[:9]}", Prompt("p", [1], f"asked {HOSTILE}", {"answer": "42"}), torch.ones(count, dtype=torch.int64),
        torch.tensor([False] + [True] * length), torch.zeros(count), torch.zeros(count, dtype=torch.int32), "stop", text=text,
        reward=reward, group_id=group,
    )  # fmt: skip
