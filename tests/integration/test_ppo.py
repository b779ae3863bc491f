"""Whole PPO runs with a critic on a tiny model: what is built, what learns, warm-up, stops and resume."""

import json
import logging

import pytest
import torch
from variants import variants

from engine_core import Trainer, load_config
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_core.types import Batch
from engine_plugin_tools.commands.export import write_model


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def ppo(grpo):
    """Three steps with two updates each."""
    return grpo | {
        "algorithm.advantage": "gae",
        "algorithm.mini_batch_prompts": 2,
        "critic.optim.lr": 1e-3,
        "critic.optim.schedule": "linear",
        "actor.optim.schedule": "cosine",
        "rollout.max_response_tokens": 4,
        "run.steps": 3,
    }


@pytest.fixture
def make(ppo):
    """A trainer on these settings with changes; closed at the end."""
    made = []

    def of(changes=None, rewards=(digits,), leave=(), **live):
        settings = {
            k: v for k, v in {**ppo, **(changes or {})}.items() if not k.startswith(tuple(leave) or "-")
        }
        made.append(Trainer(load_config(overrides=settings, allow_code=True), rewards=list(rewards), **live))
        return made[-1]

    yield of
    for trainer in made:
        trainer.close()


def lines_of(run):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def files_of(run):
    """Bytes of every file of the last checkpoint's roles, and its own state without times."""
    path = Checkpoints(run.folder.checkpoints).latest()
    files = {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.glob("*/*"))}
    state = read_state(path)
    return files, {key: state[key] for key in ("step", "data", "trainer", "random")}


def weights(run, role):
    return {name: tensor.clone() for name, tensor in run.runtime.engines[role].named_weights()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_a_run_trains_both_models_and_says_how_the_critic_does(make):
    run = make()
    run.setup(training=True)
    before = {role: weights(run, role) for role in ("actor", "critic")}
    assert before["critic"].keys() == before["actor"].keys() | {"score.weight"}
    run.train()
    for role in ("actor", "critic"):
        assert len(changed(before[role], weights(run, role))) > len(before[role]) / 2
    for line in lines_of(run):
        assert line["critic/loss"] > 0
        assert line["critic/grad_norm"] > 0
        assert line["critic/explained_variance"] <= 1
        assert line["critic/skipped_steps"] == line["actor/skipped_steps"] == 0
        assert {"critic/value_mean", "critic/return_mean", "critic/clip_fraction"} <= line.keys()
    assert [line["critic/lr"] for line in lines_of(run)] == pytest.approx([1e-3, 1e-3 * 4 / 6, 1e-3 * 2 / 6])


def test_a_run_without_the_table_has_a_critic_like_the_actor(make):
    run = make({"actor.max_tokens_per_rank": 77}, leave=("critic",))
    assert (run.config.critic.optim.lr, run.config.critic.max_tokens_per_rank) == (1e-5, 77)
    run.train()
    assert lines_of(run)[0]["critic/lr"] == 1e-5


def test_a_run_that_needs_no_values_builds_no_critic_and_says_that_the_table_is_not_read(make, caplog):
    run = make({"algorithm.advantage": "grpo"})
    with caplog.at_level(logging.INFO, "engine"):
        run.train()
    assert set(run.groups) == {"actor", "rollout"}
    assert "Not read: [critic]: algorithm.advantage = 'grpo' needs no values" in caplog.text
    assert not any(name.startswith("critic/") for name in lines_of(run)[0])


def test_evaluation_and_sampling_build_no_critic(make):
    run = make({"algorithm.kl_coef": 0.1})
    run.evaluate()
    assert set(run.groups) == {"actor", "rollout"}


def test_a_checkpoint_is_taken_for_evaluation_and_export_without_its_critic(make, tmp_path):
    run = make({"eval.at_end": True})
    trained = run.train()
    again = make()
    again.load_checkpoint(Checkpoints(run.folder.checkpoints).latest())
    assert "critic" not in again.groups
    assert again.evaluate()["eval/reward_mean"] == trained["eval/reward_mean"]
    again.export(tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_an_exported_critic_starts_another_run_with_its_values(make, tmp_path):
    run = make({"critic.optim.lr": 0.05})
    run.train()
    write_model(
        tmp_path / "critic",
        Checkpoints(run.folder.checkpoints).latest(),
        run.config,
        adapter=False,
        role="critic",
    )
    saved = weights(run, "critic")
    assert "score.weight" in saved
    later = make({"critic.path": str(tmp_path / "critic"), "run.name": "later"})
    later.setup(training=True)
    assert not changed(saved, weights(later, "critic"))
    assert changed(weights(run, "actor"), weights(later, "actor"))


def test_a_role_that_is_not_trained_or_not_loaded_is_not_exported(make, tmp_path):
    run = make({"run.steps": 1, "algorithm.kl_coef": 0.1})
    run.train()
    latest = Checkpoints(run.folder.checkpoints).latest()
    with pytest.raises(ConfigError, match=r"--role: step_\d+ holds no model 'ref'"):
        write_model(tmp_path / "out", latest, run.config, adapter=False, role="ref")
    again = make()
    again.load_checkpoint(latest)
    with pytest.raises(
        ConfigError, match=r"'critic' is not loaded here, only actor, rollout. .*--role critic"
    ):
        again.export(tmp_path / "out", role="critic")
    with pytest.raises(ConfigError, match=r"it has no \[critic.lora\], so there is no adapter"):
        again.export(tmp_path / "out", adapter=True, role="critic")
    assert not (tmp_path / "out").exists()


def test_the_critic_alone_learns_in_the_warm_up(make):
    run = make({"critic.warmup_steps": 2})
    run.setup(training=True)
    before = {role: weights(run, role) for role in ("actor", "critic")}
    seen = {}
    step = run.step

    def watching(number):
        metrics = step(number)
        seen[number] = {role: changed(before[role], weights(run, role)) for role in before}
        return metrics

    run.step = watching
    run.train()
    assert not seen[2]["actor"]
    assert seen[1]["critic"]
    assert seen[3]["actor"]
    lines = lines_of(run)
    assert [line["policy_version"] for line in lines] == [0, 0, 1]
    assert ["actor/loss" in line for line in lines] == [False, False, True]
    assert lines[2]["actor/lr"] == pytest.approx(1e-3)  # its schedule begins where it does
    rates = [group["lr"] for group in run.runtime.engines["actor"].optimizer.param_groups]
    assert rates == pytest.approx([0.0] * len(rates), abs=1e-9)  # and ends with the run


def test_a_warm_up_longer_than_the_run_is_refused(make):
    with pytest.raises(
        ConfigError, match=r"critic\.warmup_steps: got 3, expected less than run\.steps \(3\)"
    ):
        make({"critic.warmup_steps": 3})


@pytest.mark.parametrize(
    "point",
    variants(
        ("step.after_backward@5", "step.after_update@5", "step.after_update@6", "step.train@2"),
        ("step.after_update@6",),
    ),
)
def test_a_stop_between_the_two_updates_finishes_the_step_and_resumes_bit_for_bit(
    make, monkeypatch, point, tmp_path
):
    straight = make({"run.name": "straight"})
    straight.train()
    monkeypatch.setenv("ENGINE_FAULT", f"{point}:term")
    stopped = make()
    with pytest.raises(SystemExit) as caught:
        stopped.train()
    assert caught.value.code == 75
    monkeypatch.delenv("ENGINE_FAULT")
    assert Checkpoints(stopped.folder.checkpoints).steps() == [1 if point == "step.train@2" else 2]
    resumed = make()
    resumed.train(resume=tmp_path / "runs" / "r")
    assert lines_of(resumed) == lines_of(straight)
    assert files_of(resumed) == files_of(straight)


def test_skipped_steps_are_counted_for_each_role(make):
    run = make({"critic.optim.max_skipped_steps": 4, "actor.optim.max_skipped_steps": 2})
    run.setup(training=True)
    engine = run.runtime.engines["critic"]
    step = engine.optimizer_step

    def broken():
        engine.module.score.weight.grad[:] = torch.nan
        return step()

    engine.optimizer_step = broken
    with pytest.raises(
        TrainingFailed, match=r"4 optimizer steps in a row .*\(critic\.optim\.max_skipped_steps\)"
    ):
        run.train()
    assert run.skipped_in_a_row == {
        "critic": 4,
        "actor": 0,
    }  # the actor's good steps in between change nothing
    assert lines_of(run)[0]["critic/skipped_steps"] == 2


def test_an_overflow_that_lowers_the_loss_scale_is_counted_and_ends_no_run(make):
    fp16 = {"actor.torch.compute_dtype": "fp16", "actor.torch.loss_scale": 2.0**40}
    run = make({**fp16, "actor.optim.max_skipped_steps": 1})
    run.train()
    assert sum(line["actor/skipped_steps"] for line in lines_of(run)) > 1
    assert run.skipped_in_a_row == {"critic": 0, "actor": 0}


def test_the_critics_rate_follows_the_schedule_of_settings(make):
    run = make({"critic.optim.schedule": "constant", "schedule.critic.optim.lr": [[2, 5e-4], [3, 0.0]]})
    run.train()
    assert [line["critic/lr"] for line in lines_of(run)] == pytest.approx([1e-3, 5e-4, 0.0])


def test_memory_is_traded_with_a_critic_and_nothing_changes(make):
    plain, trading = (
        make({"run.name": "plain"}),
        make({"run.name": "trading", "runtime.local.offload_idle_roles": True}),
    )
    plain.train()
    trading.train()
    assert lines_of(plain) == lines_of(trading)


def test_a_live_model_is_trained_by_the_actor_and_copied_for_the_critic(make, world):
    from transformers import AutoConfig, AutoModelForCausalLM

    live = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(world / "model"))
    run = make(model=live)
    run.train()
    engines = run.runtime.engines
    assert engines["actor"].module is live
    shared = {id(p) for p in live.parameters()} & {id(p) for p in engines["critic"].module.parameters()}
    assert not shared


def test_the_kl_in_the_reward_reaches_each_token_and_the_score_the_last(make):
    """r_t = -kl_coef (log p_old - log p_ref), the score at the last sampled token; the sum is the shaped reward."""
    run = make({"algorithm.kl_coef": 0.3, "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"})
    seen = []
    annotate, advantage = run.annotate, run.with_advantages

    def watching(batch):
        seen.append(batch["rewards"].clone())
        return annotate(batch)

    def then(batch):
        seen.append(advantage(batch))
        return seen[-1]

    run.annotate, run.with_advantages = watching, then
    run.train()
    scores, batch = seen[-2], seen[-1]
    assert batch["ref_log_probs"].ne(batch["old_log_probs"]).any()
    position = 0
    for i, length in enumerate(batch.lengths.tolist()):
        here = range(position, position + length)
        sampled = [t for t in here if batch["loss_mask"][t]]
        kl = [(batch["old_log_probs"][t] - batch["ref_log_probs"][t]).item() for t in sampled]
        rewards = [-0.3 * k for k in kl]
        rewards[-1] += scores[i].item()
        assert batch["rewards"][i].item() == pytest.approx(sum(rewards), abs=1e-5)
        for n, t in enumerate(sampled):
            assert batch["returns"][t].item() == pytest.approx(sum(rewards[n:]), abs=1e-5)
        position += length


def test_values_learn_a_return_that_is_always_the_same(make):
    run = make(
        {
            "critic.optim.lr": 1e-2,
            "critic.optim.schedule": "constant",
            "critic.warmup_steps": 14,
            "run.steps": 15,
            "algorithm.epochs": 2,
        },
        rewards=[lambda completions: [2.0] * len(completions)],
    )
    run.train()
    lines = lines_of(run)
    assert lines[0]["critic/return_mean"] == 2
    assert abs(lines[0]["critic/value_mean"]) < 1
    assert lines[-1]["critic/value_mean"] == pytest.approx(2, abs=0.1)
    assert lines[-1]["critic/loss"] < 0.01 < lines[0]["critic/loss"]


def test_the_policy_learns_from_a_critics_advantages(make):
    run = make(
        {
            "run.steps": 40,
            "algorithm.mini_batch_prompts": 0,
            "data.prompts_per_step": 8,
            "rollout.group_size": 8,
            "actor.optim.lr": 5e-3,
            "actor.optim.schedule": "constant",
            "critic.optim.lr": 5e-3,
            "critic.optim.schedule": "constant",
            "critic.warmup_steps": 2,
        }
    )
    run.train()
    rewards = [line["reward/mean"] for line in lines_of(run)]
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:3]) / 3
    assert sum(rewards[-5:]) / 5 > 0.4


def test_the_values_that_the_advantage_sees_are_the_critics_before_the_update(make):
    run = make({"run.steps": 1})
    run.setup(training=True)
    seen = []
    advantage = run.with_advantages

    def watching(batch):
        done = advantage(batch)
        fresh = run.groups["critic"].call("infer", batch, outputs=("values",)).result()["values"]
        seen.append((done, fresh))
        return done

    run.with_advantages = watching
    run.train()
    batch, fresh = seen[0]
    assert isinstance(batch, Batch)
    torch.testing.assert_close(batch["values"], fresh, rtol=0, atol=0)
    after = run.groups["critic"].call("infer", batch, outputs=("values",)).result()["values"]
    assert not torch.allclose(after, fresh)


def test_a_plugin_replaces_the_critic_alone(make, tmp_path):
    plugin = tmp_path / "flat.py"
    plugin.write_text(
        "import torch\n"
        "from engine_core import hookimpl\n\n\n"
        "class Output:\n"
        "    def __init__(self, values):\n"
        "        self.values = values\n\n\n"
        "class Flat(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.level = torch.nn.Parameter(torch.zeros(()))\n\n"
        "    def forward(self, input_ids, position_ids):\n"
        "        return Output(self.level.expand(input_ids.shape))\n\n\n"
        "@hookimpl\n"
        "def engine_build_model(role):\n"
        "    return Flat() if role == 'critic' else None\n"
    )
    config = {"plugins": [str(plugin)], "critic.optim.lr": 0.05, "run.steps": 2}
    run = make(config)
    run.train()
    assert weights(run, "critic").keys() == {"level"}
    assert lines_of(run)[1]["critic/value_mean"] != 0


def test_an_advantage_that_is_not_finite_names_the_input_that_is_not(make, monkeypatch):
    run = make()
    annotate = run.annotate

    def broken(batch):
        batch, noted = annotate(batch)
        return batch.with_columns(tokens={"values": batch["values"] * torch.nan}), noted

    monkeypatch.setattr(run, "annotate", broken)
    with pytest.raises(
        TrainingFailed, match=r"'gae' gave a value that is not finite.* 'values' is not finite either"
    ):
        run.train()
