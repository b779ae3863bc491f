"""The stage ``replay_cache`` in whole runs: what comes back, how it is weighed, and that a resume loses none of it."""

import itertools
import json

import pytest
import torch

from engine_core import Trainer, load_config
from engine_core.errors import ConfigError, PluginError
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_core.runs.rollout_files import read_rollouts

STEPS = 5


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def replay(grpo):
    """Five steps whose batches are half replayed, from a cache that overflows and ages."""
    options = {"share": 0.5, "size": 7, "max_staleness": 2}
    return grpo | {
        "run.steps": STEPS,
        "stage": [{"name": "replay_cache", "replay_cache": options}],
        "data.prompts_per_step": 3,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 4,
    }


def trained(settings, resume=None):
    run = Trainer(load_config(overrides=settings), rewards=[digits])
    try:
        run.train(resume=resume)
    finally:
        run.close()
    return run


def lines_of(folder):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def held(folder):
    """What the last checkpoint holds, byte for byte."""
    path = Checkpoints(folder / "checkpoints").latest()
    files = {
        str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*.*")) if f.suffix != ".json"
    }
    return read_state(path)["trainer"], files


def test_older_groups_come_back_as_they_were_sampled(replay, tmp_path):
    trained(replay)
    folder = tmp_path / "runs" / "r"
    sampled = {}
    lines = lines_of(folder)
    for step, line in enumerate(lines, 1):
        batch = read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")
        old = [r for r in batch if not r.request_id.startswith(f"{step}:")]
        new = [r for r in batch if r.request_id.startswith(f"{step}:")]
        assert len(new) == 6
        assert len(old) == (6 if step > 1 else 0)
        assert line["stage/replay_cache/share"] == (0.5 if step > 1 else 0)
        assert line["stage/replay_cache/size"] == min(3 * step, 7)
        for rollout in old:
            then = sampled[rollout.request_id]
            assert torch.equal(then.token_ids, rollout.token_ids)
            assert torch.equal(then.rollout_log_probs, rollout.rollout_log_probs)
            assert torch.equal(then.policy_versions, rollout.policy_versions)
            assert (then.reward, then.rewards, then.text) == (rollout.reward, rollout.rewards, rollout.text)
        ages = [step - 1 - int(r.policy_versions.max()) for r in old]
        assert all(1 <= age <= 2 for age in ages)
        if ages:
            assert line["stage/replay_cache/age_max"] == max(ages)
            assert line["stage/replay_cache/age_mean"] == sum(ages) / len(ages)
        assert line["tokens/total"] == sum(len(r.token_ids) for r in batch)
        assert line["rollouts"] == 6  # that were sampled
        sampled |= {r.request_id: r for r in new}
    assert {line["stage/replay_cache/too_old"] for line in lines} > {0}


@pytest.mark.parametrize("updates", [1, 2])
def test_a_replayed_token_is_weighed_by_the_present_policy_over_the_one_that_sampled_it(replay, updates):
    changes = {
        "actor.optim.lr": 0.05,
        "run.steps": 2,
        "algorithm.mini_batch_prompts": 3 if updates == 2 else 0,
    }
    run = Trainer(load_config(overrides=replay | changes), rewards=[digits])
    seen = []
    annotated = run.annotate

    def watch(batch):
        now = run.groups["actor"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]
        seen.append((batch, now))
        return annotated(batch)

    run.annotate = watch
    run.train()
    line = lines_of(run.folder.path)[-1]
    batch, now = seen[-1]
    ratio = (now - batch["rollout_log_probs"]).double().exp()
    old = batch["policy_versions"] < 1
    mask = batch["loss_mask"]
    assert float((ratio[mask & ~old] - 1).abs().max()) < 1e-5  # the sampler is the policy itself
    assert float((ratio[mask & old] - 1).abs().mean()) > 0.01  # which has moved since
    assert torch.equal(batch["fresh"][mask], ~old[mask])
    if updates == 1:
        weights = ratio.clamp(max=2.0)[mask]
        assert line["correction/weight_mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
        assert line["correction/weight_max"] == pytest.approx(float(weights.max()), rel=1e-5)
        gap = ratio.log().abs()[mask]
        assert line["mismatch/mean_abs"] == pytest.approx(float(gap.mean()), rel=1e-5)
    assert line["mismatch/fresh_mean_abs"] < 1e-6
    assert line["mismatch/fresh_share"] == pytest.approx(float((mask & ~old).sum() / mask.sum()), abs=0.1)
    run.close()


def test_the_gradient_is_that_of_truncated_importance_sampling(replay):
    """One update on a batch with replayed groups: against autograd of the definition, outside of the engine's losses."""
    changes = {"actor.optim.lr": 0.05, "run.steps": 2, "actor.optim.max_grad_norm": 0.0}
    run = Trainer(load_config(overrides=replay | changes), rewards=[digits])
    seen = []
    updated = run.update

    def watch(batch, step):
        module = run.runtime.engines["actor"].module
        total = torch.zeros((), dtype=torch.float32)
        count = int(batch["loss_mask"].sum())
        for start, end in itertools.pairwise(batch.offsets):
            tokens = batch.token_ids[start:end]
            logits = module(input_ids=tokens[None]).logits[0].float()
            log_probs = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0]
            part = {n: batch[n][start + 1 : end] for n in ("rollout_log_probs", "advantages", "loss_mask")}
            weight = (log_probs.detach() - part["rollout_log_probs"]).exp().clamp(max=2.0)
            total = total - (weight * part["advantages"] * log_probs)[part["loss_mask"]].sum() / count
        grads = torch.autograd.grad(total, [p for p in module.parameters() if p.requires_grad])
        seen.append(float(torch.stack([g.double().norm() for g in grads]).norm()))
        return updated(batch, step)

    run.update = watch
    run.train()
    line = lines_of(run.folder.path)[-1]
    assert line["correction/weight_max"] > 1.05  # there is something to weigh
    assert line["actor/grad_norm"] == pytest.approx(seen[-1], rel=1e-4)
    run.close()


def test_a_stop_and_a_resume_are_the_uninterrupted_run_bit_for_bit(replay, monkeypatch, tmp_path):
    straight = trained(replay | {"run.name": "straight"}).folder.path
    monkeypatch.setenv(
        "ENGINE_FAULT", "step.train@4:term"
    )  # the cache has taken the groups of step 4 already
    with pytest.raises(SystemExit):
        trained(replay)
    monkeypatch.delenv("ENGINE_FAULT")
    folder = tmp_path / "runs" / "r"
    path = Checkpoints(folder / "checkpoints").latest()
    assert path.name == "step_00000003"
    kept = read_rollouts(path / "stages" / "replay_cache.parquet")
    assert {r.request_id.split(":")[0] for r in kept} == {"1", "2", "3"}
    trained(replay, resume=folder)
    assert lines_of(folder) == lines_of(straight)
    assert held(folder) == held(straight)
    assert "stages/replay_cache.parquet" in held(folder)[1]
    for step in range(1, STEPS + 1):
        name = f"rollouts/step_{step:06d}.parquet"
        assert (folder / name).read_bytes() == (straight / name).read_bytes()


def test_a_cache_that_is_new_to_a_resumed_run_begins_empty_and_says_so(replay, tmp_path, caplog):
    trained({k: v for k, v in replay.items() if k != "stage"} | {"run.steps": 1})
    run = trained(replay | {"run.steps": 2}, resume=tmp_path / "runs" / "r")
    assert (
        "Stage 'replay_cache' was not there when the checkpoint was written: it begins empty." in caplog.text
    )
    assert lines_of(run.folder.path)[-1]["stage/replay_cache/share"] == 0


def test_a_stage_of_older_rollouts_before_one_that_refills_is_refused(replay):
    stages = [replay["stage"][0], {"name": "dynamic_sampling"}]
    with pytest.raises(
        ConfigError, match=r"stage.replay_cache: stands before 'dynamic_sampling'.*Put it after"
    ):
        Trainer(load_config(overrides=replay | {"stage": stages}), rewards=[digits])
    Trainer(load_config(overrides=replay | {"stage": stages[::-1]}), rewards=[digits])


PLUGIN = """
from engine_core import hookimpl
from engine_core.specs import Stage
from engine_core.types import StageState

class Count:
    def __init__(self):
        self.seen = 0
    def __call__(self, rollouts, step):
        self.seen += len(rollouts)
        return rollouts, {{"seen": float(self.seen)}}
    {state}

@hookimpl
def engine_stages():
    return {{"count": Stage(load=Count)}}
"""
STATE = """
    def state(self):
        return StageState({"seen": self.seen})
    def load_state(self, state):
        self.seen = state.values["seen"]
"""


def own_stage(replay, tmp_path, text):
    (tmp_path / "count.py").write_text(text)
    (tmp_path / "run.toml").write_text('plugins = ["count.py"]\n[[stage]]\nname = "count"\n')
    settings = {k: v for k, v in replay.items() if k != "stage"}
    return Trainer(
        load_config(tmp_path / "run.toml", overrides=settings | {"run.steps": 2}), rewards=[digits]
    )


def test_a_stage_of_ones_own_remembers_too(replay, tmp_path, monkeypatch):
    text = PLUGIN.format(state=STATE.strip())
    monkeypatch.setenv("ENGINE_FAULT", "step.generate@2:term")
    with pytest.raises(SystemExit):
        own_stage(replay, tmp_path, text).train()
    monkeypatch.delenv("ENGINE_FAULT")
    run = own_stage(replay, tmp_path, text)
    run.train(resume=tmp_path / "runs" / "r")
    run.close()
    assert [line["stage/count/seen"] for line in lines_of(run.folder.path)] == [6, 12]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLUGIN.format(state="pass"), "Count has no state and no load_state, so a resumed run"),
        (PLUGIN.format(state=STATE.strip()).replace("__call__", "run"), r"objects of Count must be callable as f\(rollouts, step\)"),
        (PLUGIN.format(state=STATE.strip()).replace("(self, rollouts, step)", "(self, rollouts)"), "its objects must be callable"),
        (PLUGIN.format(state=STATE.strip()).replace("__init__(self)", "__init__(self, size)"), r"must be made as Count\(\)"),
        (PLUGIN.format(state=STATE.strip()).replace("StageState({", "dict({"), r"state\(\) must return a StageState with a dict of values, got dict"),
        (PLUGIN.format(state=STATE.strip()).replace('{"seen": self.seen}', '{"seen": {self.seen}}'), r"Stage 'count': state\(\) gives 'seen' = \{0\}, which cannot be written as JSON"),
        (PLUGIN.format(state=STATE.strip()).replace('{"seen": self.seen}', '{"seen": [{1: self.seen}]}'), "a dict has keys that are no text"),
        (PLUGIN.format(state=STATE.strip()).replace('{"seen": float(self.seen)}', '{"seen": "many"}'), "Stage 'count': metric 'seen' must be a number, got 'many'"),
        (PLUGIN.format(state=STATE.strip()).replace("return StageState({", "raise KeyError({"), r"stage 'count' failed: KeyError: .*count.py:\d+: raise KeyError"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_serve_as_a_stage_is_refused(replay, tmp_path, text, said):
    run = own_stage(replay, tmp_path, text)
    with pytest.raises(PluginError, match=said):
        run.train()
    assert not (tmp_path / "runs" / "r" / "metrics.jsonl").read_text()
