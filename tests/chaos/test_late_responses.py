"""Responses that are out of time or carried over to the next step, in whole runs."""

import json

import pytest

from engine_core.runs.rollout_files import read_rollouts

pytestmark = pytest.mark.chaos

LATE = {"rollout.request_timeout_seconds": 1e-6, "rollout.max_response_tokens": 40}
LATE |= {"rollout.hf": {"tokens_per_step": 3}, "run.steps": 2, "eval.at_end": False}


def test_a_response_out_of_time_follows_its_policy(engine, tiny, metrics):
    run = engine("train", tiny(LATE | {"rollout.on_timeout": "keep"}))
    assert run.code == 0, run.err
    for line in metrics():
        rollouts = read_rollouts(engine.folder / f"runs/r/rollouts/step_{line['step']:06d}.parquet")
        assert len(rollouts) == 8
        assert line["sampling/timeouts"] == sum(each.finish_reason == "abort" for each in rollouts) > 0
        assert all(each.valid for each in rollouts)
    failed = engine("train", tiny(LATE | {"rollout.on_timeout": "fail", "run.name": "fails"}))
    assert failed.code == 6, failed.err
    assert "tokens after 1e-06 s (rollout.request_timeout_seconds)" in failed.err
    assert "Traceback" not in failed.err


CARRIED = {
    "rollout.over_sampling": 1.75,
    "rollout.partial_rollouts": True,
    "rollout.max_response_tokens": 40,
    "rollout.stop_token_ids": list(range(2, 24)),
    "rollout.hf": {"tokens_per_step": 3},
    "tracking.rollouts_every_steps": 1,
}


@pytest.mark.slow
def test_a_stop_while_responses_are_carried_over_saves_them_and_the_resumed_run_is_the_straight_one(
    engine, tiny, straight, result
):
    stopped = engine("train", tiny(CARRIED), env={"ENGINE_FAULT": "step.train@3:term"})
    assert stopped.code == 75, stopped.err
    newest = max(engine.folder.glob("runs/r/checkpoints/step_*"))
    assert newest.name == "step_00000002"
    assert read_rollouts(newest / "carried.parquet")
    assert "carried.parquet" in json.loads((newest / "manifest.json").read_text())["files"]
    resumed = engine("resume", "r")
    assert resumed.code == 0, resumed.err
    assert result() == straight(CARRIED)
    assert sum(line["sampling/resumed_groups"] for line in result()["metrics"]) > 0
