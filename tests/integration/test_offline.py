"""``trainer = "offline"``: learning from files of rollouts, without a sampler."""

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from variants import variants

from engine_core import Trainer, load_config
from engine_core.cli.loading import check_config
from engine_core.config.assemble import check_inputs, plugins_for
from engine_core.errors import ConfigError, DataError, PluginError
from engine_core.local.runtime import LocalRuntime
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_core.runs.rollout_files import ABOUT, RolloutFile, read_rollouts, write_rollouts
from engine_plugin_trainers.offline_trainer import OfflineTrainer

STEPS = 3


def early(completions):
    """Share of characters that are letters up to m: a reward with a spread for a random model."""
    return [sum("a" <= c <= "m" for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def sampled(world, tmp_path_factory):
    """The folder of a run of three steps of 4 groups of 4, whose policy moves."""
    settings = {
        "model.path": str(world / "model"),
        "data.train": str(world / "data" / "train.jsonl"),
        "data.prompts_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 6,
        "actor.optim.lr": 0.02,
        "run.dir": str(tmp_path_factory.mktemp("sampled")),
        "run.name": "r",
        "run.steps": STEPS,
        "tracking.trackers": [],
    }
    run = Trainer(load_config(overrides=settings), rewards=[early])
    run.train()
    run.close()
    return run.folder.path


@pytest.fixture
def offline(world, sampled, tmp_path):
    """Settings of an offline run on that run's rollouts."""
    return {
        "trainer": "offline",
        "model.path": str(world / "model"),
        "data.train": str(sampled),
        "data.prompts_per_step": 4,
        "actor.optim.lr": 0.02,
        "rollout.max_response_tokens": 6,
        "run.dir": str(tmp_path / "runs"),
        "run.name": "o",
        "tracking.trackers": [],
    }


def made(settings, changes=None, **live):
    return OfflineTrainer(load_config(overrides={**settings, **(changes or {})}), **live)


def trained(run, **arguments):
    try:
        run.train(**arguments)
    finally:
        run.close()
    return lines_of(run.folder.path)


def lines_of(folder):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def rollout_file(folder, step=1):
    return folder / "rollouts" / f"step_{step:06d}.parquet"


def test_one_pass_learns_each_stored_group_once_without_a_sampler(offline, monkeypatch):
    run = made(offline)
    batches = []
    monkeypatch.setattr(
        run, "with_advantages", lambda b: batches.append(b) or Trainer.with_advantages(run, b)
    )
    lines = trained(run)
    assert len(lines) == STEPS
    assert run.runtime.engines.keys() == {"actor"}
    assert ("rollout_engines", "hf") not in run.plugins.chosen  # its plugin need not be installed
    assert all(batch["group_ids"].tolist() == [g for g in range(4) for _ in range(4)] for batch in batches)
    learned = sorted(
        t for b in batches for t in map(tuple, (s.tolist() for s in b.token_ids.split(b.lengths.tolist())))
    )
    stored = [r for step in (1, 2, 3) for r in read_rollouts(rollout_file(Path(offline["data.train"]), step))]
    assert learned == sorted(tuple(r.token_ids.tolist()) for r in stored)
    assert all(line["rollouts"] == 16 and line["actor/grad_norm"] > 0 for line in lines)
    assert not any(name.startswith(("eval", "sync")) or name == "tokens/generated" for name in lines[0])
    assert [line["policy_version"] for line in lines] == [1, 2, 3]


def test_the_policy_that_sampled_learns_what_it_learned_then(offline, sampled):
    """From the model that sampled step 1, its rollouts in their order: the update is the recorded one."""
    changes = {
        "data.train": str(rollout_file(sampled)),
        "data.shuffle": False,
        "algorithm.correction.level": "off",
    }
    now, then = trained(made(offline, changes))[0], lines_of(sampled)[0]
    for name in (
        "actor/loss",
        "actor/grad_norm",
        "reward/mean",
        "reward/std",
        "reward/early",
        "tokens/total",
    ):
        assert now[name] == then[name], name
    assert now["mismatch/mean_abs"] < 1e-6


def test_rollouts_of_another_policy_are_weighed_as_such(offline, sampled):
    changes = {"data.train": str(rollout_file(sampled, 3)), "data.shuffle": False}
    run = made(offline, changes)
    seen = []
    annotated = run.annotate

    def watch(batch):
        seen.append(
            (batch, run.groups["actor"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"])
        )
        return annotated(batch)

    run.annotate = watch
    (line,) = trained(run)
    batch, now = seen[0]
    log_ratio = (now - batch["rollout_log_probs"]).double()[batch["loss_mask"]]
    assert float(log_ratio.abs().mean()) > 0.01
    assert line["correction/weight_mean"] == pytest.approx(
        float(log_ratio.exp().clamp(max=2).mean()), rel=1e-5
    )
    assert line["mismatch/mean_abs"] == pytest.approx(float(log_ratio.abs().mean()), rel=1e-5)
    assert line["mismatch/fresh_share"] == 0


def test_another_policy_is_no_fault_of_the_sampler(offline, sampled):
    lines = trained(made(offline, {"rollout.max_log_prob_gap": 1e-4, "algorithm.correction.cap": 10.0}))
    assert max(line["mismatch/mean_abs"] for line in lines) > 1e-3


@pytest.mark.parametrize(
    "point", variants(("step.begin@2", "step.train@3", "step.after_update@2"), ("step.train@3",))
)
def test_a_stop_and_a_resume_are_the_uninterrupted_run_bit_for_bit(offline, monkeypatch, tmp_path, point):
    settings = offline | {"run.epochs": 2, "data.prompts_per_step": 3, "actor.optim.schedule": "cosine"}
    straight = made(settings, {"run.name": "straight"})
    expected = trained(straight)
    monkeypatch.setenv("ENGINE_FAULT", f"{point}:term")
    with pytest.raises(SystemExit):
        trained(made(settings))
    monkeypatch.delenv("ENGINE_FAULT")
    resumed = made(settings)
    assert trained(resumed, resume=tmp_path / "runs" / "o") == expected
    ends = [Checkpoints(run.folder.checkpoints).latest() for run in (straight, resumed)]
    assert len({(end / "actor" / "weights.safetensors").read_bytes() for end in ends}) == 1
    assert len({(end / "actor" / "optimizer.safetensors").read_bytes() for end in ends}) == 1
    data = [read_state(end)["data"] for end in ends]
    assert data[0] == data[1]
    assert (data[0]["epoch"], data[0]["position"]) == (1, 12)


def test_a_resume_on_other_files_is_refused(offline, sampled, tmp_path):
    trained(made(offline, {"run.steps": 1}))
    other = {"data.train": str(rollout_file(sampled)), "run.steps": 2}
    with pytest.raises(DataError, match="The data changed since the checkpoint"):
        trained(made(offline, other), resume=tmp_path / "runs" / "o")


def test_evaluation_samples_with_a_sampler_and_learning_raises_the_reward(offline, world):
    changes = {
        "data.validation": str(world / "data" / "heldout.jsonl"),
        "eval.at_start": True,
        "eval.every_steps": 5,
        "eval.temperature": 1.0,
        "eval.samples_per_prompt": 8,
        "run.steps": 10,
    }
    run = made(offline, changes, rewards=[early])
    lines = trained(run)
    assert run.runtime.engines.keys() == {"actor", "rollout"}
    scores = [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line]
    assert len(scores) == 3
    assert scores[-1] > scores[0] + 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval.at_end": True}, r"reward: missing. eval.at_end asks for scores"),
        ({"eval.at_end": True}, "data.validation: missing"),
        ({"data.train": []}, "data.train: missing"),
    ],
)
def test_what_a_run_needs_and_lacks_is_said(offline, changes, said):
    with pytest.raises(ConfigError, match=said):
        made(offline, changes)


def test_without_eval_it_says_how_to_evaluate(offline):
    run = made(offline)
    with pytest.raises(ConfigError, match=r"Add --set eval.at_end=true"):
        run.evaluate()
    run.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.advantage": "gae", "algorithm.mini_batch_prompts": 2, "algorithm.epochs": 2},
        {"algorithm.kl_coef": 0.1, "algorithm.advantage": "rloo", "algorithm.ref_refresh_steps": 1},
        {"algorithm.advantage": "gdpo", "reward": [{"name": "early", "weight": 1.0, "clip": [0.0, 0.5]}]},
        {"algorithm.loss": "gspo", "algorithm.correction.level": "sequence"},
        {"algorithm.loss": "reinforce", "algorithm.correction.bypass": True},
    ],
    ids=["gae", "kl", "gdpo", "gspo", "bypass"],
)
def test_the_whole_algorithm_stack_runs(offline, changes):
    lines = trained(made(offline, changes | {"run.steps": 2}))
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert ("critic/loss" in lines[0]) == (changes.get("algorithm.advantage") == "gae")
    assert ("actor/kl" in lines[0]) == ("algorithm.kl_coef" in changes)


def test_a_stage_that_refills_takes_further_groups_from_the_files(offline, sampled, tmp_path):
    rollouts = read_rollouts(rollout_file(sampled))
    for rollout in rollouts:
        if rollout.group_id in (0, 2):
            rollout.reward = 1.0  # no signal
    file = write_rollouts(tmp_path / "flat.parquet", 1, rollouts)
    changes = {"data.train": str(file), "data.shuffle": False, "data.prompts_per_step": 2, "run.steps": 1}
    run = made(offline, changes | {"stage": [{"name": "dynamic_sampling"}]})
    (line,) = trained(run)
    assert line["stage/dynamic_sampling/rounds"] == 3  # groups 0 and 1, then 2, then 3
    assert line["stage/dynamic_sampling/dropped_groups"] == 2
    assert run.source.state()["position"] == 4


def changed(sampled, tmp_path, change, about=None):
    """A file of step 1 whose rollouts were changed."""
    source = RolloutFile(rollout_file(sampled))
    rollouts = source.rollouts()
    return write_rollouts(
        tmp_path / "bad.parquet", 1, change(rollouts) or rollouts, source.about | (about or {})
    )


def edit(**changes):
    def apply(rollouts):
        rollouts[5] = dataclasses.replace(
            rollouts[5], **{name: make(rollouts[5]) for name, make in changes.items()}
        )

    return apply


def put(tensor, at, value):
    copy = tensor.clone()
    copy[at] = value
    return copy


@pytest.mark.parametrize(
    ("change", "about", "said"),
    [
        (edit(token_ids=lambda r: put(r.token_ids, -1, 10**6)), {}, r"row 5: token id 1000000 is outside"),
        (edit(token_ids=lambda r: put(r.token_ids, 0, -1)), {}, r"row 5: token id -1 is outside"),
        (edit(loss_mask=lambda r: r.loss_mask[1:]), {}, r"row 5: loss_mask has \d+ values, token_ids \d+"),
        (edit(rollout_log_probs=lambda r: put(r.rollout_log_probs, -1, float("nan"))), {}, "row 5.*log-prob nan"),
        (edit(rollout_log_probs=lambda r: put(r.rollout_log_probs, -1, 0.5)), {}, "row 5.*log-prob 0.5"),
        (edit(reward=lambda r: float("nan")), {}, "row 5: its reward is nan; expected a finite number"),
        (edit(reward=lambda r: None), {}, "row 5: its reward is nan; expected a finite number"),
        (edit(prompt=lambda r: dataclasses.replace(r.prompt, token_ids=[1] * 99)), {}, "row 5: its prompt has 99"),
        (lambda r: None, {"tokenizer": "another"}, "sampled with another tokenizer"),
    ],
    ids=["beyond", "negative", "lengths", "nan", "positive", "reward", "no_reward", "prompt", "tokenizer"],
)  # fmt: skip
def test_rollouts_that_do_not_fit_are_refused_before_any_model_is_built(
    offline, sampled, tmp_path, monkeypatch, change, about, said
):
    file = changed(sampled, tmp_path, change, about)
    monkeypatch.setattr(LocalRuntime, "start", lambda *a: pytest.fail("a model was built"))
    with pytest.raises(DataError, match=said) as caught:
        trained(made(offline, {"data.train": [str(rollout_file(sampled, 2)), str(file)]}))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.drop_columns(["rollout_log_probs"]), "it has no column rollout_log_probs"),
        (lambda t: t.slice(0, 0), "holds no rollouts"),
        (lambda t: t.replace_schema_metadata({ABOUT: b'{"format": 9}'}), "is of format 9"),
        (lambda t: pa.table({"prompt": ["2+2="]}), "it has no column step, request_id"),
    ],
    ids=["column", "empty", "format", "rows"],
)
def test_files_that_are_not_rollouts_are_refused_before_any_model_is_built(
    offline, sampled, tmp_path, monkeypatch, spoil, said
):
    file = tmp_path / "bad.parquet"
    pq.write_table(spoil(pq.read_table(rollout_file(sampled))), file)
    monkeypatch.setattr(LocalRuntime, "start", lambda *a: pytest.fail("a model was built"))
    with pytest.raises(DataError, match=said):
        trained(made(offline, {"data.train": str(file)}))


def test_a_run_without_greedy_responses_cannot_serve_remax(offline):
    with pytest.raises(DataError, match="greedy_reward is missing"):
        trained(made(offline, {"algorithm.advantage": "remax"}))


def test_greedy_rewards_of_the_files_are_the_baselines_of_remax(offline, sampled, tmp_path):
    rollouts = read_rollouts(rollout_file(sampled))
    for rollout in rollouts:
        rollout.greedy_reward = None if rollout.group_id == 3 else 0.25  # one greedy response failed
    file = write_rollouts(tmp_path / "greedy.parquet", 1, rollouts)
    run = made(offline, {"algorithm.advantage": "remax", "data.train": str(file), "data.shuffle": False})
    seen = []
    original = run.with_advantages
    run.with_advantages = lambda batch: seen.append(batch) or original(batch)
    trained(run)
    assert seen[0]["greedy_rewards"].isnan().tolist() == [False] * 12 + [True] * 4
    assert set(seen[0]["greedy_rewards"][:12].tolist()) == {0.25}


def test_unequal_groups_are_learned_from(offline, sampled, tmp_path):
    file = changed(sampled, tmp_path, lambda r: r[:-1])
    assert trained(made(offline, {"data.train": str(file)}))[0]["rollouts"] == 15


def test_a_step_that_lost_all_its_groups_is_left_out_of_a_folder(offline, sampled, tmp_path, caplog):
    folder = tmp_path / "rollouts"
    for step in (1, 2):
        write_rollouts(folder, step, read_rollouts(rollout_file(sampled)) if step == 1 else [])
    assert len(trained(made(offline, {"data.train": str(folder)}))) == 1
    assert "Left out" in caplog.text


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nothing", "there is no file or folder"),
        ("empty", "holds no Parquet file"),
        ("rows.jsonl", r"has the ending '.jsonl'"),
        ("cut.parquet", "no Parquet file"),
    ],
)
def test_validate_tells_paths_that_cannot_be(offline, tmp_path, entry, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    (problem,) = check_inputs(load_config(overrides=offline | {"data.train": str(tmp_path / entry)}))
    assert said.replace("\\", "") in problem


def test_another_temperature_is_said(offline, caplog):
    trained(made(offline, {"rollout.temperature": 0.5, "run.steps": 1}))
    assert (
        "was sampled at temperature 1.0; the policy that is trained has rollout.temperature = 0.5"
        in caplog.text
    )


def test_a_sampler_that_is_not_installed_is_missed_only_by_an_evaluation(offline):
    missing = {"rollout.backend": "sglang"}
    plugins_for(load_config(overrides=offline | missing))
    with pytest.raises(PluginError, match="sglang"):
        load_config(overrides=offline | missing | {"eval.at_end": True})


def test_generated_rollouts_are_data_too(offline, world, sampled, tmp_path):
    settings = {k: v for k, v in offline.items() if k != "trainer"}
    settings |= {"data.train": str(world / "data" / "heldout.jsonl"), "rollout.group_size": 2}
    sampler = Trainer(load_config(overrides=settings), rewards=[early])
    sampler.setup()
    rollouts = sampler.generate(sampler.source.all())
    file = write_rollouts(tmp_path / "mine.parquet", 0, rollouts, sampler.about())
    sampler.close()
    assert RolloutFile(file).about["temperature"] == 1.0
    lines = trained(made(offline, {"data.train": [str(file), str(rollout_file(sampled))]}))
    assert len(lines) == 3  # 8 + 4 groups
    assert torch.isfinite(torch.tensor([line["actor/loss"] for line in lines])).all()


def test_rewards_of_a_run_that_evaluates_nothing_need_not_be_loaded(offline):
    terms = {"algorithm.advantage": "gdpo", "reward": [{"name": "early", "weight": 2.0}]}
    config = load_config(overrides=offline | terms)
    assert check_config(config) == []
    assert ("rewards", "early") not in plugins_for(config).chosen  # no plugin offers it


def test_advantages_of_each_reward_need_the_names_of_the_rewards(offline):
    (error,) = check_config(load_config(overrides=offline | {"algorithm.advantage": "gdpo"}))
    assert "reward: missing. 'gdpo' reads names and weights of [[reward]]" in str(error)
