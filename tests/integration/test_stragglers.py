"""Responses that are stopped before their end, in whole runs: what is carried over, dropped, counted and resumed."""

import itertools
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import Trainer, load_config
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.update import fresh_gap
from engine_core.types import Sampling
from engine_plugin_processes.runtime import MultiProcessRuntime
from engine_plugin_testing.rollout_bench import expected_log_probs

pytestmark = pytest.mark.usefixtures("forked_workers")

STEPS = 5
PROMPTS, GROUP = 4, 2


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def early(grpo):
    """Steps of four groups that ask for seven; responses end anywhere between 1 and 40 tokens."""
    return grpo | {
        "run.steps": STEPS,
        "data.prompts_per_step": PROMPTS,
        "rollout.group_size": GROUP,
        "rollout.max_response_tokens": 40,
        "rollout.stop_token_ids": list(range(2, 24)),
        "rollout.over_sampling": 1.75,
        "rollout.partial_rollouts": True,
        "rollout.hf.tokens_per_step": 3,
        "actor.optim.lr": 0.02,
    }


def trained(settings, resume=None, watch=None):
    run = Trainer(load_config(overrides=settings), rewards=[digits])
    if watch is not None:
        watch(run)
    try:
        run.train(resume=resume)
    finally:
        run.close()
    return run


def lines_of(folder):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def batches_of(folder, steps=STEPS):
    return [read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet") for step in range(1, steps + 1)]


def taken(rollout):
    """Step and number of the prompt of a response."""
    step, number, _ = rollout.request_id.split(":")
    return int(step), int(number)


def test_a_step_has_whole_groups_and_every_prompt_is_used_or_counted(early):
    run = trained(early)
    lines, batches = lines_of(run.folder.path), batches_of(run.folder.path)
    new = carried = 0
    for line, batch in zip(lines, batches, strict=True):
        groups = {}
        for rollout in batch:
            groups.setdefault(rollout.group_id, []).append(rollout)
        assert sorted(groups) == list(range(PROMPTS))
        for members in groups.values():
            assert len({r.prompt.id for r in members}) == 1
            assert [int(r.request_id.split(":")[2]) for r in members] == list(range(GROUP))
            assert {r.finish_reason for r in members} <= {"stop", "length"}
        new += 7 - carried
        assert line["sampling/resumed_groups"] == carried
        carried = line["sampling/carried_groups"]
        assert carried == 3
        assert line["sampling/dropped_groups"] == line["sampling/stale_groups"] == 0
    used = {taken(r) for batch in batches for r in batch}
    assert len(used) == STEPS * PROMPTS  # no group twice
    assert new == len(used) + carried
    assert len({taken(r) for r in run.early_stop.carried} - used) == carried
    assert max(line["sampling/stopped"] for line in lines) > 0


TWO_RANKS = {"runtime.backend": "torchrun", "runtime.torchrun.processes": 2, "actor.backend": "fsdp"}
SAMPLERS = {
    "runtime.backend": "torchrun",
    "runtime.torchrun.max_replacements": 1,
    "placement.pools": {"train": 1, "serve": 2},
    "placement.actor": "train",
    "placement.rollout": "serve",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "repeatable"),
    [
        ({"rollout.process": {}}, True),
        (TWO_RANKS, True),
        (TWO_RANKS, False),
        (SAMPLERS, False),
    ],
    ids=["a process of its own", "two ranks", "two ranks, by themselves", "two that come and go"],
)
def test_wherever_samplers_are_a_step_has_whole_groups_and_no_token_of_another_policy(
    early, tmp_path, monkeypatch, where, repeatable
):
    monkeypatch.setattr(MultiProcessRuntime, "_repeatable", lambda runtime, pool: repeatable)
    reward = tmp_path / "digits.py"
    reward.write_text(
        "from engine_core import hookimpl\nfrom engine_core.specs import Reward\n\n\n"
        "def digits(completion):\n    return sum(c.isdigit() for c in completion) / max(len(completion), 1)\n\n\n"
        "@hookimpl\ndef engine_rewards():\n    return {'digits': Reward(load=digits)}\n"
    )
    named = {"plugins": [str(reward)], "reward": [{"name": "digits"}]}
    run = Trainer(load_config(overrides=early | where | named | {"run.steps": 3}, allow_code=True))
    try:
        run.train()
    finally:
        run.close()
    lines, batches = lines_of(run.folder.path), batches_of(run.folder.path, 3)
    assert len({taken(r) for batch in batches for r in batch}) == 3 * PROMPTS
    mixed = 0
    for line, batch in zip(lines, batches, strict=True):
        assert [len([r for r in batch if r.group_id == group]) for group in range(PROMPTS)] == [
            GROUP
        ] * PROMPTS
        assert {r.finish_reason for r in batch} <= {"stop", "length"}
        assert line["sampling/carried_groups"] == 3
        assert fresh_gap(line) < 1e-4
        mixed += sum(len(set(r.policy_versions[r.loss_mask].tolist())) > 1 for r in batch)
    assert mixed > 0
    assert max(line["correction/weight_max"] for line in lines[1:]) > 1.01  # old tokens are weighed


@pytest.mark.slow
def test_each_token_of_a_carried_response_is_of_the_policy_that_its_version_names(early):
    policies = {}

    def watch(run):
        push = run.push_weights

        def pushed(updated):
            found = push(updated)
            weights = run.runtime.engines["actor"].module.state_dict()
            policies[run.version] = {name: w.detach().clone() for name, w in weights.items()}
            return found

        run.push_weights = pushed

    run = trained(early, watch=watch)
    config = AutoConfig.from_pretrained(early["model.path"])
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mixed = [
        rollout
        for batch in batches_of(run.folder.path)
        for rollout in batch
        if len(set(rollout.policy_versions[rollout.loss_mask].tolist())) > 1
    ]
    assert len(mixed) >= 2
    moved = 0.0
    for rollout in mixed:
        versions = rollout.policy_versions[rollout.prompt_length :]
        assert versions.tolist() == sorted(versions.tolist())
        by_version = {}
        for version in set(versions.tolist()):
            module.load_state_dict(policies[version])
            by_version[version] = expected_log_probs(module.double(), rollout, Sampling())[0]
            module.float()
        found = rollout.rollout_log_probs[rollout.prompt_length :]
        expected = torch.stack([by_version[v][at] for at, v in enumerate(versions.tolist())])
        assert float((found - expected).abs().max()) < 1e-4
        moved = max(moved, *(float((found - other).abs().max()) for other in by_version.values()))
    assert moved > 1e-2  # another version's would have shown


@pytest.mark.slow
def test_with_weights_that_stay_a_carried_response_is_the_one_that_was_never_stopped(early):
    run = trained(early | {"actor.optim.lr": 0.0, "run.steps": 3})
    carried = [
        r
        for batch in batches_of(run.folder.path, 3)
        for r in batch
        if len(set(r.policy_versions[r.loss_mask].tolist())) > 1
    ]
    assert carried
    other = Trainer(load_config(overrides=early | {"rollout.over_sampling": 1.0}), rewards=[digits])
    other.setup()
    for rollout in carried:
        asked = other.sampler.request(rollout.prompt, rollout.request_id, other.sampler.sampling_at(3))
        (whole,) = other.groups["rollout"].call("generate", requests=[asked]).result()
        assert whole.token_ids.tolist() == rollout.token_ids.tolist()
        assert whole.finish_reason == rollout.finish_reason
        assert float((whole.rollout_log_probs - rollout.rollout_log_probs).abs().max()) < 1e-5
    other.close()


@pytest.mark.slow
def test_carried_tokens_are_weighed_and_only_fresh_ones_measure_the_gap(early):
    seen = []

    def watch(run):
        annotated = run.annotate

        def annotate(batch):
            now = run.groups["actor"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]
            seen.append((batch, now))
            return annotated(batch)

        run.annotate = annotate

    run = trained(early | {"run.steps": 3}, watch=watch)
    line, (batch, now) = lines_of(run.folder.path)[-1], seen[-1]
    mask = batch["loss_mask"]
    ratio = (now - batch["rollout_log_probs"]).double().exp()[mask]
    fresh = (batch["policy_versions"] == 2)[mask]
    assert 0 < int(fresh.sum()) < len(fresh)
    assert float((ratio[fresh] - 1).abs().max()) < 1e-4
    assert float((ratio[~fresh] - 1).abs().max()) > 0.01
    assert line["correction/weight_mean"] == pytest.approx(float(ratio.clamp(max=2.0).mean()), rel=1e-4)
    assert line["mismatch/fresh_mean_abs"] < 1e-4


def test_without_carrying_what_was_stopped_is_dropped_and_counted(early):
    run = trained(early | {"rollout.partial_rollouts": False})
    lines, batches = lines_of(run.folder.path), batches_of(run.folder.path)
    assert run.early_stop.carried == []
    for step, (line, batch) in enumerate(zip(lines, batches, strict=True), 1):
        assert {taken(r)[0] for r in batch} == {step}
        assert len(batch) == PROMPTS * GROUP
        assert line["sampling/dropped_groups"] == 3
        assert line["sampling/carried_groups"] == line["sampling/resumed_groups"] == 0
    assert sum(line["sampling/stopped_tokens"] for line in lines) > 0


@pytest.mark.slow
def test_groups_that_are_too_old_go_and_are_counted(early):
    """One prompt a step and seven under way: some wait for several steps, since the oldest do not end first."""
    changes = {"data.prompts_per_step": 1, "rollout.over_sampling": 5.0, "rollout.partial_max_staleness": 1}
    run = trained(early | changes | {"rollout.stop_token_ids": list(range(2, 40)), "run.steps": 8})
    lines = lines_of(run.folder.path)
    assert sum(line["sampling/stale_groups"] for line in lines) > 0
    for step, batch in enumerate(batches_of(run.folder.path, 8), 1):
        assert min(int(r.policy_versions[r.loss_mask].min()) for r in batch) >= step - 1 - 1
    for before, line in itertools.pairwise(lines):
        gone = before["sampling/carried_groups"] - line["sampling/resumed_groups"]
        assert gone == line["sampling/stale_groups"]


@pytest.mark.slow
def test_a_stop_and_a_resume_are_the_uninterrupted_run_bit_for_bit(early, monkeypatch, tmp_path):
    straight = trained(early | {"run.name": "straight"}).folder.path
    monkeypatch.setenv("ENGINE_FAULT", "step.train@4:term")  # step 4 has taken what step 3 had carried over
    with pytest.raises(SystemExit):
        trained(early)
    monkeypatch.delenv("ENGINE_FAULT")
    folder = tmp_path / "runs" / "r"
    path = Checkpoints(folder / "checkpoints").latest()
    assert path.name == "step_00000003"
    kept = read_rollouts(path / "carried.parquet")
    assert len({r.group_id for r in kept}) == 3
    assert {r.finish_reason for r in kept} > {"abort"}
    assert all(r.rewards == {} for r in kept)  # nothing of the step after it
    run = trained(early, resume=folder)
    assert lines_of(folder) == lines_of(straight)
    for step in range(1, STEPS + 1):
        name = f"rollouts/step_{step:06d}.parquet"
        assert (folder / name).read_bytes() == (straight / name).read_bytes()
    last = [Checkpoints(each / "checkpoints").latest() for each in (folder, straight)]
    assert read_state(last[0])["trainer"] == read_state(last[1])["trainer"]
    assert (last[0] / "carried.parquet").read_bytes() == (last[1] / "carried.parquet").read_bytes()
    assert len(run.early_stop.carried) == 3 * GROUP


@pytest.mark.slow
def test_what_was_carried_is_dropped_with_a_word_where_carrying_is_off_now(early, tmp_path, caplog):
    trained(early | {"run.steps": 1})
    trained(early | {"run.steps": 2, "rollout.partial_rollouts": False}, resume=tmp_path / "runs" / "r")
    assert "3 groups that an earlier attempt had carried over are dropped" in caplog.text


@pytest.mark.slow
def test_greedy_baselines_are_of_the_groups_that_were_complete(early):
    run = trained(early | {"algorithm.advantage": "remax", "run.steps": 2})
    for batch in batches_of(run.folder.path, 2):
        assert len(batch) == PROMPTS * GROUP
        assert all(r.greedy_reward is not None for r in batch)


# -- time limits --------------------------------------------------------------


@pytest.mark.parametrize("policy", ["drop", "zero", "keep"])
def test_a_response_out_of_time_follows_its_policy(early, policy):
    changes = {"rollout.over_sampling": 1.0, "rollout.request_timeout_seconds": 1e-6, "run.steps": 1}
    run = trained(early | changes | {"rollout.on_timeout": policy, "rollout.overlap_rewards": True})
    (line,), (batch,) = lines_of(run.folder.path), batches_of(run.folder.path, 1)
    late = [r for r in batch if r.finish_reason == "abort"]
    assert len(late) == line["sampling/timeouts"] > 0
    assert all(
        0 < r.response_length <= 3 for r in late
    )  # a step of three tokens, then the clock is looked at
    assert {r.valid for r in late} == {policy != "drop"}
    assert {r.failure for r in late} == {"" if policy == "keep" else "timeout"}
    assert line["response_length/truncated_share"] == len(late) / len(batch)
    if policy == "keep":
        assert [r.reward for r in late] == pytest.approx(digits([r.text for r in late]))
    else:
        assert {r.reward for r in late} == {0.0}
    assert all(r.valid and not r.failure for r in batch if r not in late)


def test_a_response_out_of_time_can_end_the_run(early):
    changes = {
        "rollout.over_sampling": 1.0,
        "rollout.request_timeout_seconds": 1e-6,
        "rollout.on_timeout": "fail",
    }
    with pytest.raises(
        TrainingFailed, match=r"had \d tokens after 1e-06 s \(rollout\.request_timeout_seconds\)"
    ):
        trained(early | changes)


@pytest.mark.slow
def test_a_response_out_of_time_completes_its_group(early):
    run = trained(early | {"rollout.request_timeout_seconds": 1e-6, "run.steps": 2})
    for batch in batches_of(run.folder.path, 2):
        assert len(batch) == PROMPTS * GROUP
        assert "timeout" in {r.failure for r in batch}


# -- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm.correction.level": "off"},
            r"algorithm\.correction\.level.*got 'off', but rollout\.partial_rollouts makes responses with tokens of several",
        ),
        ({"rollout.over_sampling": 0.5}, r"rollout\.over_sampling"),
        (
            {"trainer": "distill", "teacher.path": "x"},
            r"rollout\.partial_rollouts.*trainer 'distill' does not correct for",
        ),
        (
            {"environment.name": "calculator", "rollout.on_timeout": "zero"},
            r"rollout\.on_timeout.*\[environment\] samples episodes",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(early, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=early | changes)


def test_a_sampler_that_stops_nothing_is_refused(early, tmp_path):
    plugin = tmp_path / "whole.py"
    plugin.write_text(
        "from engine_core import hookimpl\nfrom engine_core.specs import RolloutBackend\n"
        "from engine_plugin_hf_rollout.plugin import HFOptions\n\n\n@hookimpl\ndef engine_rollout_engines():\n"
        "    return {'whole': RolloutBackend(load='engine_plugin_hf_rollout.engine:HFRolloutEngine', config=HFOptions)}\n"
    )
    settings = {k: v for k, v in early.items() if not k.startswith("rollout.hf")}
    changes = {"rollout.backend": "whole", "plugins": [str(plugin)]}
    with pytest.raises(
        ConfigError, match=r"rollout\.over_sampling: got 1\.75, but .*'whole' has no capability 'partial'"
    ):
        Trainer(load_config(overrides=settings | changes, allow_code=True), rewards=[digits]).setup()
