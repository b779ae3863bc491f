"""Reward models inside RL: trained, exported, plugged in, resumed, awake in their phase alone."""

import json
import logging
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine_core import Trainer, load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import ConfigError, DataError, TrainingFailed
from engine_core.runs.checkpoint import Checkpoints
from engine_core.runs.rollout_files import read_rollouts

pytestmark = pytest.mark.usefixtures("forked_workers")


def pairs(count):
    """The better response has a 7 where the worse one has another digit."""
    return [
        {"prompt": f"Say it {i % 7}: ", "chosen": f" 7{i % 10}7", "rejected": f" {i % 6}{i % 10}{i % 5}"}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def scorer(world, tmp_path_factory):
    """What ``trainer = "reward_model"`` exports after a few steps."""
    root = tmp_path_factory.mktemp("scorer")
    settings = {
        "trainer": "reward_model",
        "model.path": str(world / "model"),
        "data.prompts_per_step": 16,
        "actor.optim.lr": 3e-3,
        "run.dir": str(root / "runs"),
        "run.steps": 20,
        "tracking.trackers": [],
    }
    config = load_config(overrides=settings)
    run = plugins_for(config).resolve("trainers", "reward_model")(config, data=pairs(200))
    metrics = run.train()
    assert metrics["rewards/accuracy"] > 0.9
    run.export(root / "model")
    run.close()
    return root / "model"


@pytest.fixture
def make(grpo, scorer):
    """A trainer whose rewards are given by these tables (name -> changes); closed at the end."""
    made = []

    def of(changes=None, tables=None, **live):
        entries = [
            {"name": name, "model": {"path": str(scorer), **table.pop("model", {})}, **table}
            for name, table in (tables or {"helpful": {}}).items()
        ]
        made.append(Trainer(load_config(overrides={**grpo, "reward": entries, **(changes or {})}), **live))
        return made[-1]

    yield of
    for trainer in made:
        trainer.close()


def lines_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def test_the_exported_folder_is_plugged_in_and_its_score_rises(make):
    run = make({"run.steps": 12, "data.prompts_per_step": 8, "actor.optim.lr": 1e-2})
    run.train()
    scores = [line["reward/helpful"] for line in lines_of(run)]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 1.0
    assert set(run.groups) == {"actor", "rollout", "reward.helpful"}
    assert all(
        line["reward/helpful/errors"] == line["reward/helpful/timeouts"] == 0 for line in lines_of(run)
    )


def test_a_dry_run_names_the_model_of_a_reward_and_checks_its_engine(make):
    run = make({"run.steps": 1})
    assert "Roles in this process: actor, rollout, reward.helpful" in run.plugins.require("parts", "dry_run")(
        run
    )
    absent = make({"run.steps": 1}, {"helpful": {"model": {"torch": {"device": "cuda:99"}}}})
    with pytest.raises(ConfigError, match=r"reward\.model\.torch\.device: 'cuda:99' cannot be used here"):
        absent.plugins.require("parts", "dry_run")(absent)


def test_the_rewards_of_a_run_are_transformers_scores_of_its_rollouts(make, scorer):
    run = make({"run.steps": 1})
    run.train()
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    end = AutoTokenizer.from_pretrained(scorer).eos_token_id
    (file,) = run.folder.rollouts_dir.glob("*.parquet")
    for rollout in read_rollouts(file):
        ids = rollout.token_ids.tolist()
        ids += [] if ids[-1] == end else [end]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0, 0].item()
        assert rollout.rewards["helpful"] == pytest.approx(expected, abs=1e-4)


def test_weights_and_clips_are_those_of_any_reward_and_several_models_stand_side_by_side(
    make, scorer, tmp_path
):
    shutil.copytree(scorer, tmp_path / "other")
    rewards = {
        "helpful": {"weight": 2.0, "clip": [-0.5, 0.5]},
        "other": {"weight": 0.5, "model": {"path": str(tmp_path / "other")}},
    }
    run = make({"run.steps": 1}, rewards)
    run.train()
    assert {"reward.helpful", "reward.other"} < set(run.groups)
    (file,) = run.folder.rollouts_dir.glob("*.parquet")
    rollouts = read_rollouts(file)
    raw = torch.tensor([r.rewards["other"] for r in rollouts], dtype=torch.float64)
    assert [r.rewards["helpful"] for r in rollouts] == [r.rewards["other"] for r in rollouts]
    expected = 2.0 * raw.clamp(-0.5, 0.5) + 0.5 * raw
    assert [r.reward for r in rollouts] == pytest.approx(expected.tolist(), rel=1e-5)


def test_it_stands_beside_functions_and_failures_follow_the_policy(make, caplog):
    def lengths(response_lengths):
        return [float(n) for n in response_lengths]

    run = make(
        {"rollout.max_response_tokens": 24, "run.steps": 1},
        {"helpful": {"on_error": "zero", "max_failure_share": 1.0, "model": {"max_tokens": 12}}},
        rewards=[lengths],
    )
    with caplog.at_level(logging.WARNING, "engine"):
        run.train()
    line = lines_of(run)[0]
    assert line["reward/helpful/errors"] == line["reward/failures"] > 0
    assert "tokens, and the reward's model takes 1 to 12 (max_tokens)" in caplog.text
    assert line["reward/lengths"] > 0
    with pytest.raises(TrainingFailed, match=r"Reward 'helpful' failed .*max_failure_share = 0.5"):
        make(
            {"run.name": "s", "rollout.max_response_tokens": 24}, {"helpful": {"model": {"max_tokens": 12}}}
        ).train()


def test_it_is_awake_in_the_reward_phase_alone(make, monkeypatch):
    from engine_plugin_torch.engine import TorchEngine

    seen = []
    infer = TorchEngine.infer

    def watched(self, batch, outputs, **more):
        seen.append(
            (
                self.context.role,
                sorted(guests().store.asleep),
                sorted(run.runtime.engines["actor"].store.asleep),
            )
        )
        return infer(self, batch, outputs, **more)

    def guests():
        return run.runtime.engines["reward.helpful"]

    run = make(
        {
            "runtime.local.offload_idle_roles": True,
            "algorithm.kl_coef": 0.1,
            "run.steps": 1,
            "eval.at_end": True,
            "eval.max_prompts": 2,
        }
    )
    monkeypatch.setattr(TorchEngine, "infer", watched)
    run.setup(training=True)
    whole = ["gradients", "optimizer", "weights"]
    assert sorted(guests().store.asleep) == whole  # from the start: room for what is built after it
    run.train()
    assert ("reward_model", [], ["gradients", "optimizer"]) in seen
    assert all(asleep == whole for role, asleep, _ in seen if role != "reward_model")
    assert {role for role, _, _ in seen} == {"reward_model", "actor", "ref"} or {
        role for role, _, _ in seen
    } == {
        "reward_model",
        "ref",
    }


def test_a_resumed_run_goes_on_bit_for_bit_and_its_checkpoint_holds_no_reward_model(make):
    whole = make({"run.name": "whole", "run.steps": 3, "checkpoint.every_steps": 1})
    whole.train()
    folder = Checkpoints(whole.folder.checkpoints).latest()
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"actor"}
    half = make({"run.name": "half", "run.steps": 2, "checkpoint.every_steps": 1})
    half.train()
    half.close()
    again = make({"run.name": "half", "run.steps": 3, "checkpoint.every_steps": 1})
    again.train(resume=half.folder.path)
    kept = ("reward/", "actor/", "response_length/")
    expected, found = (
        {k: v for k, v in lines_of(r)[-1].items() if k.startswith(kept)} for r in (whole, again)
    )
    assert found == expected


def test_conversations_are_ended_as_the_template_ends_them(make, scorer, world, tmp_path):
    """The actor's template and the reward model's differ: the text is rendered with the reward model's."""
    template = "{% for m in messages %}%s{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    for name, mark in (("actor", ""), ("judge", "* ")):
        shutil.copytree(world / "model" if name == "actor" else scorer, tmp_path / name)
        own = AutoTokenizer.from_pretrained(tmp_path / name)
        own.chat_template = template.replace("%s", mark)
        own.save_pretrained(tmp_path / name)
    rows = [{"prompt": [{"role": "user", "content": f"{i} + {i}"}], "answer": str(2 * i)} for i in range(8)]
    run = make(
        {"model.path": str(tmp_path / "actor"), "run.steps": 1},
        {"helpful": {"model": {"path": str(tmp_path / "judge")}}},
        data=rows,
    )
    run.train()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge").eval()
    (file,) = run.folder.rollouts_dir.glob("*.parquet")
    for rollout in read_rollouts(file):
        question = rollout.prompt.columns["messages"][0]["content"]
        text = f"* user: {question}<eos>* assistant: {rollout.text}<eos>"
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([own(text, add_special_tokens=False)["input_ids"]])).logits
        assert rollout.rewards["helpful"] == pytest.approx(logits[0, 0].item(), abs=1e-4)


def test_what_cannot_work_is_refused_before_a_model_is_built(make, world):
    with pytest.raises(
        DataError, match=r"reward\.helpful\.model\.path: .* holds a \w+ForCausalLM, which gives no score"
    ):
        make(tables={"helpful": {"model": {"path": str(world / "model")}}}).load_inputs()
    with pytest.raises(ConfigError, match=r"reward\.twice: 'twice' is listed 2 times"):
        load_config(overrides={"reward": [{"name": "twice", "model": {"path": "x"}}] * 2})


def test_judges_ask_models_of_their_own_beside_the_actor_and_sleep_when_they_are_not_asked(
    grpo, world, scorer, tmp_path, monkeypatch
):
    """All three kinds in one run; the judges are the random model, the actor is another one."""
    from engine_plugin_hf_rollout.engine import HFRolloutEngine

    seen = set()
    generate = HFRolloutEngine.generate

    def watched(self, requests):
        judge = run.runtime.engines["reward.wrote"]
        seen.add((self is judge, judge._asleep, bool(run.runtime.engines["reward.read"].store.asleep)))
        return generate(self, requests)

    shutil.copytree(world / "model", tmp_path / "actor")
    config = json.loads((tmp_path / "actor" / "config.json").read_text())
    (tmp_path / "actor" / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    shutil.copytree(world / "model", tmp_path / "judge")
    own = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(world / "model"))
    own.save_pretrained(tmp_path / "judge")
    judge = str(tmp_path / "judge")
    tables = [
        {"name": "helpful", "model": {"path": str(scorer)}},
        {
            "name": "read",
            "verdict": {
                "path": judge,
                "prompt": "{question}{completion} is it {answer}? ",
                "verdicts": {"1": 1.0, "0": 0.0},
            },
        },
        {
            "name": "wrote",
            "on_error": "zero",
            "max_failure_share": 1.0,
            "judge": {
                "path": judge,
                "prompt": "{completion}",
                "max_response_tokens": 4,
                "votes": 2,
                "temperature": 1.0,
            },
        },
    ]
    changes = {
        "reward": tables,
        "run.steps": 2,
        "runtime.local.offload_idle_roles": True,
        "model.path": str(tmp_path / "actor"),
    }
    run = Trainer(load_config(overrides=grpo | changes))
    monkeypatch.setattr(HFRolloutEngine, "generate", watched)
    run.train()
    assert seen == {(False, True, True), (True, False, False)}  # the actor's sampler, the judge
    for line in lines_of(run):
        assert 0 < line["reward/read"] < 1
        assert 0 <= line["reward/wrote/unreadable"] <= 1
        assert 0 < line["reward/read/other_mass"] < 1
        assert "reward/helpful" in line
    tokenizer, model = (
        AutoTokenizer.from_pretrained(judge),
        AutoModelForCausalLM.from_pretrained(judge).eval(),
    )
    ids = [tokenizer.convert_tokens_to_ids(digit) for digit in "10"]
    for rollout in read_rollouts(sorted(run.folder.rollouts_dir.glob("*.parquet"))[0]):
        answer = rollout.prompt.columns["answer"]
        asked = tokenizer(f"{rollout.prompt.text}{rollout.text} is it {answer}? ", return_tensors="pt")[
            "input_ids"
        ]
        with torch.no_grad():
            p = model(input_ids=asked).logits[0, -1].softmax(-1)[ids]
        assert rollout.rewards["read"] == pytest.approx((p[0] / p.sum()).item(), abs=1e-5)
    run.close()


@pytest.mark.slow
def test_the_rewards_are_the_same_in_a_process_of_their_own_and_over_two_ranks(make):
    """The actor's first rollouts are those of one process: they have the same scores wherever the model lies."""
    launched = {"run.steps": 1, "runtime.backend": "torchrun"}
    here = make({"run.name": "here", "run.steps": 1}).train()["reward/helpful"]
    apart = make(launched | {"run.name": "apart", "runtime.torchrun.processes": 1}).train()["reward/helpful"]
    sharded = make(
        launched
        | {
            "run.name": "two",
            "runtime.torchrun.processes": 2,
            "runtime.torchrun.offload_idle_roles": True,
            "actor.backend": "fsdp",
        },
        {"helpful": {"model": {"backend": "fsdp"}}},
    ).train()["reward/helpful"]
    assert apart == here
    assert sharded == pytest.approx(here, abs=1e-5)
