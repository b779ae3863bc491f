"""Every loss, KL, correction and adaptive weight through the real trainer: two steps of four updates each."""

import json
import math

import pytest
import torch
from variants import variants

from engine_core import Trainer, builtin, load_config
from engine_core.algorithms.regularizers import ESTIMATORS
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.local.engine_host import EngineHost


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def trainer(grpo):
    """A run of two steps, two epochs of two mini-batches each, with these settings."""

    def make(**settings):
        moves = {"algorithm.mini_batch_prompts": 2, "algorithm.epochs": 2, "actor.optim.lr": 3e-3}
        named = {key.replace("__", "."): value for key, value in settings.items()}
        return Trainer(load_config(overrides={**grpo, **moves, **named}), rewards=[digits])

    return make


@pytest.fixture
def apart(monkeypatch):
    """The sampler has a module of its own, whose log-probs come out a little different each time."""
    monkeypatch.setattr(EngineHost, "_can_share", lambda self: False)
    from engine_core.types import Batch

    whole = Batch.from_rollouts.__func__

    def noisy(cls, rollouts, *settings):
        batch = whole(cls, rollouts, *settings)
        noise = 0.3 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(len(rollouts)))
        moved = (batch["rollout_log_probs"] + noise * batch["loss_mask"]).clamp(max=-1e-4)
        return batch.with_columns(tokens={"rollout_log_probs": moved * batch["loss_mask"]})

    monkeypatch.setattr(Batch, "from_rollouts", classmethod(noisy))


def steps_of(run):
    run.train()
    run.close()
    lines = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in line.values()), line
        assert line["actor/grad_norm"] > 0
        assert line["actor/skipped_steps"] == 0
    return lines


LOSSES = builtin.engine_losses()


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(trainer, loss):
    run = trainer(algorithm__loss=loss)
    lines = steps_of(run)
    assert all(line["actor/approx_kl"] > 0 for line in lines)  # the policy moved between the updates
    assert run.policy.plan.columns == ("old_log_probs",)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("estimator", variants(ESTIMATORS, ("k1", "k3+")))
def test_every_estimator_of_the_kl_trains(trainer, estimator, kl_in):
    lines = steps_of(
        trainer(algorithm__kl_coef=0.1, algorithm__kl_estimator=estimator, algorithm__kl_in=kl_in)
    )
    assert lines[1]["actor/kl"] != 0
    assert ("reward/kl_penalty" in lines[1]) == (kl_in == "reward")


CORRECTIONS = {
    "token": {"level": "token"},
    "sequence": {"level": "sequence", "cap": 5.0},
    "normalized": {"level": "token", "normalize": True},
    "icepop": {"level": "token", "mask": "token"},
    "mis": {"level": "sequence", "mask": "sequence", "mask_low": 0.1, "mask_high": 10.0},
    "geometric": {"mask": "geometric", "mask_low": 0.7, "mask_high": 1.4},
    "k1": {"reject": "k1", "reject_ratio": 1.5},
    "k2": {"reject": "k2", "reject_ratio": 1.5},
    "k3": {"reject": "k3", "reject_ratio": 1.5},
    "opsm": {"off_policy_threshold": 0.05},
    "bypass": {"bypass": True},
    "bypass_masked": {"bypass": True, "mask": "token", "normalize": True},
}


@pytest.mark.parametrize(
    "settings",
    variants(CORRECTIONS, ("token", "icepop", "mis", "k1", "opsm", "bypass_masked"), CORRECTIONS),
)
def test_every_correction_trains_and_is_measured(trainer, apart, settings):
    chosen = {f"algorithm__correction__{key}": value for key, value in settings.items()}
    lines = steps_of(trainer(**chosen, algorithm__correction__max_masked_share=1.0))
    for line in lines:
        assert line["mismatch/mean_abs"] > 0.1
        if "level" in settings:
            assert 0 < line["correction/effective_sample_share"] <= 1.0001
            assert line["correction/weight_max"] > 1
        if {"mask", "reject"} & set(settings):
            assert 0 <= line["correction/masked_share"] < 1
        if "off_policy_threshold" in settings:
            assert 0 < line["correction/off_policy_share"] < 1
    if settings == CORRECTIONS["normalized"]:
        assert lines[0]["correction/weight_mean"] == pytest.approx(1.0)


def test_bypass_computes_no_old_log_probs_and_weighs_only_a_loss_without_a_ratio(trainer, apart):
    bypass = {"algorithm__correction__bypass": True}
    plain = trainer(**bypass)
    assert "correction/weight_mean" not in steps_of(plain)[0]
    assert plain.policy.plan.columns_for(torch.arange(4), plain.config.algorithm) == ()
    weighed = steps_of(trainer(**bypass, algorithm__loss="reinforce", run__name="reinforce"))
    assert weighed[0]["correction/weight_mean"] != 1


def test_the_gap_is_weighed_where_the_sampler_is_another_module_and_only_there(trainer, monkeypatch):
    assert "correction/weight_mean" not in steps_of(trainer())[0]
    monkeypatch.setattr(EngineHost, "_can_share", lambda self: False)
    lines = steps_of(trainer(run__name="apart"))
    assert lines[0]["correction/weight_mean"] == pytest.approx(1.0, abs=1e-4)


def test_a_cut_distribution_is_weighed_by_one_and_masks_nothing(trainer, monkeypatch):
    monkeypatch.setattr(EngineHost, "_can_share", lambda self: False)
    cut = {"rollout__top_p": 0.8, "rollout__top_k": 20}
    lines = steps_of(trainer(**cut, algorithm__correction__mask="geometric"))
    assert lines[1]["correction/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert lines[1]["correction/masked_share"] == 0


def test_a_correction_that_masks_more_than_its_bound_ends_the_run_before_the_update(trainer, apart):
    run = trainer(algorithm__correction__mask="geometric", algorithm__correction__mask_low=0.999)
    with pytest.raises(TrainingFailed, match=r"masked \S+ of the loss tokens .*max_masked_share = 0\.5"):
        run.train()
    assert not list(run.folder.checkpoints.glob("step_*"))


def test_weights_that_are_worth_less_than_their_bound_end_the_run_before_the_update(trainer, apart):
    level = {"algorithm__correction__level": "token"}
    worth = steps_of(trainer(**level, run__name="free"))[0]["correction/effective_sample_share"]
    assert 0.5 < worth < 0.99
    least = "algorithm__correction__min_effective_sample_share"
    steps_of(trainer(**level, **{least: worth / 4}, run__name="over"))
    run = trainer(**level, **{least: 0.999})
    with pytest.raises(
        TrainingFailed, match=r"are worth \S+ of the loss tokens .*min_effective_sample_share"
    ):
        run.train()
    assert not list(run.folder.checkpoints.glob("step_*"))


def test_only_the_tokens_of_high_entropy_are_learned(trainer):
    run = trainer(algorithm__top_entropy_quantile=0.2)
    lines = steps_of(run)
    assert run.policy.plan.measured == ("current_entropy",)
    assert all(0.2 <= line["actor/learned_share"] < 0.3 for line in lines)


def test_the_weight_of_the_entropy_adapts(trainer):
    lines = steps_of(trainer(algorithm__entropy_target=100.0, algorithm__entropy_delta=0.01))
    assert [line["actor/entropy_coef"] for line in lines] == [0.0, 0.01]
    lines = steps_of(trainer(algorithm__entropy_target=1e-3, algorithm__entropy_coef=0.5, run__name="over"))
    assert [line["actor/entropy_coef"] for line in lines] == [0.5, 0.0]


def test_a_loss_whose_column_nobody_makes_is_refused(grpo, tmp_path):
    plugin = tmp_path / "odd.py"
    plugin.write_text("""
from engine_core import hookimpl
from engine_core.specs import Loss

@hookimpl
def engine_losses():
    return {"odd": Loss(load=print, needs=frozenset({"advantages", "current_entropi"}))}
""")
    settings = {**grpo, "plugins": [str(plugin)], "algorithm.loss": "odd"}
    config = load_config(overrides=settings, allow_code=True)
    with pytest.raises(ConfigError, match=r"'current_entropi'.*Did you mean 'current_entropy'"):
        Trainer(config, rewards=[digits])


def without_time(line):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    return {key: value for key, value in line.items() if not key.startswith(dropped)}


ADAPTIVE = {
    "kl": {"kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 100.0},
    "kl_in_reward": {"kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 100.0, "kl_in": "reward"},
    "entropy": {"entropy_target": 100.0, "entropy_delta": 0.01},
    "refreshed_copy": {"kl_coef": 0.1, "ref_refresh_steps": 2},
    "refreshed_average": {"kl_coef": 0.1, "ref_refresh_steps": 1, "ref_refresh_mix": 0.3},
}


@pytest.mark.parametrize("settings", variants(ADAPTIVE, ("kl", "refreshed_average"), ADAPTIVE))
def test_what_adapts_goes_on_after_a_resume_as_if_nothing_had_happened(trainer, settings):
    chosen = {f"algorithm__{key.replace('.', '__')}": value for key, value in settings.items()}
    straight = trainer(**chosen, run__steps=4)
    straight.train()
    first = trainer(**chosen, run__steps=3, run__name="stopped")
    first.train()
    second = trainer(**chosen, run__steps=4, run__name="stopped")
    second.train(resume=first.folder.path)

    def last(run):
        return without_time(json.loads((run.folder.path / "metrics.jsonl").read_text().splitlines()[3]))

    assert last(second) == last(straight)
    for role in ("actor", "ref"):
        if role in straight.groups:
            expected = dict(straight.runtime.engines[role].named_weights())
            found = dict(second.runtime.engines[role].named_weights())
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for run in (straight, first, second):
        run.close()


def test_the_weight_of_the_kl_adapts_from_step_to_step(trainer):
    lines = steps_of(trainer(algorithm__kl_coef=0.1, algorithm__kl_target=1e-5, algorithm__kl_horizon=100.0))
    assert lines[0]["actor/kl_coef"] == 0.1
    assert lines[0]["actor/kl"] > 1.2e-5
    assert lines[1]["actor/kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 16 / 100))


@pytest.mark.parametrize("mix", [1.0, 0.25])
def test_the_reference_follows_the_actor(trainer, mix):
    run = trainer(algorithm__kl_coef=0.1, algorithm__ref_refresh_steps=2, algorithm__ref_refresh_mix=mix)
    run.setup(training=True)
    assert run.runtime.engines["ref"].context.mixed == (mix < 1)
    start = {name: tensor.clone() for name, tensor in run.runtime.engines["ref"].named_weights()}
    run.train()
    actor = dict(run.runtime.engines["actor"].named_weights())
    for name, tensor in run.runtime.engines["ref"].named_weights():
        torch.testing.assert_close(tensor, start[name] * (1 - mix) + actor[name] * mix)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in actor.items())
    run.close()


def test_a_reference_that_stays_is_not_saved(trainer):
    run = trainer(algorithm__kl_coef=0.1)
    run.train()
    run.close()
    (saved,) = run.folder.checkpoints.glob("step_*")
    assert not (saved / "ref").exists()
