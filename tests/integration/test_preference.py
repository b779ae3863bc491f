"""DPO and its relatives, KTO and reward models as whole runs: what they learn, what resumes, what splits."""

import json
import random
import shutil

import pytest
import torch
from variants import variants

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.errors import ConfigError, PluginError
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_plugin_trainers.options import PAIR_LOSSES

TRAINERS = ("dpo", "kto", "reward_model")


def sums(count, seed):
    """Small sums with the right answer and one that is one or two too high."""
    rng = random.Random(seed)
    drawn = [(rng.randint(0, 4), rng.randint(0, 4), rng.choice((1, 2))) for _ in range(count)]
    return [
        {"prompt": f"{a} + {b} = ", "chosen": str(a + b), "rejected": str(a + b + off)} for a, b, off in drawn
    ]


def rows_of(trainer, count, seed):
    if trainer != "kto":
        return sums(count, seed)
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in sums(count // 2, seed)
        for side in ("chosen", "rejected")
    ]


@pytest.fixture
def made(world, tmp_path):
    """A trainer by name with its rows and these settings; all are closed at the end."""
    trainers = []

    def make(name, changes=None, rows=96):
        heldout = tmp_path / f"{name}.jsonl"
        heldout.write_text("".join(json.dumps(row) + "\n" for row in rows_of(name, 48, 1)))
        settings = {
            "trainer": name,
            "model.path": str(world / "model"),
            "data.validation": str(heldout),
            "data.prompts_per_step": 8,
            "actor.optim.lr": 3e-3,
            "run.dir": str(tmp_path / "runs"),
            "run.steps": 2,
            "tracking.trackers": [],
            **(changes or {}),
        }
        config = load_config(overrides=settings)
        trainer = plugins_for(config).resolve("trainers", name)(config, data=rows_of(name, rows, 0))
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


def lines_of(folder):
    dropped = ("time", "throughput", "memory")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


LEARNS = {
    "dpo": ({"dpo.beta": 0.5}, "eval/rewards/accuracy", 0.8),
    "kto": ({"kto.beta": 0.5}, "eval/rewards/margin", 0.4),
    "reward_model": ({}, "eval/rewards/accuracy", 0.8),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_learns_what_is_right_for_sums_that_it_has_not_seen(made, name):
    options, metric, least = LEARNS[name]
    run = {"run.steps": 30, "data.prompts_per_step": 32, "eval.at_start": True, "eval.at_end": True}
    trainer = made(name, {**run, **options}, rows=256)
    trainer.train()
    lines = lines_of(trainer.folder.path)
    assert lines[0][metric] < 0.7 * least
    assert lines[-1][metric] > least
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]


OFTEN = ("apo_zero", "cpo", "exo_pair", "orpo", "robust", "sigmoid", "simpo")


@pytest.mark.parametrize("loss", variants(PAIR_LOSSES, OFTEN))
def test_every_pair_loss_trains(made, loss):
    smoothing = {"dpo.label_smoothing": 0.01} if loss == "exo_pair" else {}
    trainer = made("dpo", {"dpo.loss": loss, "eval.at_end": True, "run.name": loss, **smoothing})
    before = None
    trainer.setup(training=True)
    before = [w.clone() for w in trainer.runtime.engines["actor"].module.parameters()]
    metrics = trainer.train()
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    after = trainer.runtime.engines["actor"].module.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert ("ref" in trainer.groups) == PAIR_LOSSES[loss].reference


@pytest.mark.parametrize(("name", "options"), [("dpo", {}), ("kto", {}), ("reward_model", {})])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(made, tmp_path, name, options):
    settings = {"run.steps": 4, "checkpoint.every_steps": 2, "checkpoint.keep_last": 2, "eval.every_steps": 2}
    straight = made(name, {**settings, **options, "run.name": "straight"})
    straight.train()
    straight.close()
    folder = straight.folder.path
    copy = tmp_path / "runs" / "again"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000004")
    again = made(name, {**settings, **options, "run.name": "again"})
    again.train(resume=copy)
    assert lines_of(copy) == lines_of(folder)
    states = []
    for run in (folder, copy):
        path = Checkpoints(run / "checkpoints").latest()
        state = read_state(path)
        files = {f.name: f.read_bytes() for f in sorted((path / straight.role).iterdir())}
        states.append(({key: state[key] for key in ("step", "data", "trainer", "random")}, files))
    assert states[0] == states[1]


def gradient(trainer, budget):
    """Loss, metrics and gradient of one mini-batch with micro-batches of this many tokens."""
    trainer.setup(training=True)
    engine = trainer.runtime.engines[trainer.role]
    engine.set_token_budget(budget)
    items = trainer.source_of("validation", trainer.config.data, None).all(8)
    batch, _ = trainer.annotate(trainer.batch(items))
    output = engine.forward_backward(batch, trainer.loss_call())
    flat = torch.cat([w.grad.flatten() for w in engine.module.parameters() if w.grad is not None])
    engine.module.zero_grad()
    return output, flat.clone()


CASES = [("dpo", {"dpo.loss": loss, "dpo.sft_coef": 0.3}) for loss in ("sigmoid", "orpo")]
CASES += [("dpo", {"dpo.wpo": True}), ("dpo", {"dpo.ld_alpha": 0.5, "dpo.loss": "robust"})]
CASES += [
    ("kto", {}),
    ("kto", {"kto.loss": "apo_zero_unpaired"}),
    ("reward_model", {"reward_model.center_coef": 0.01}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_micro_batches_of_any_size_give_one_gradient(made, name, options):
    trainer = made(name, options)
    trainer.setup(training=True)
    with torch.no_grad():  # away from the reference, so that no log-ratio is 0
        for weight in trainer.runtime.engines[trainer.role].module.parameters():
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            weight.add_(0.05 * noise.to(weight.device))
    (whole, expected), (parts, found) = gradient(trainer, 10_000), gradient(trainer, 20)
    assert (whole.num_micro_batches, parts.num_micro_batches > 2) == (1, True)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_the_first_step_of_dpo_starts_at_the_reference(made):
    trainer = made("dpo", {"run.steps": 1})
    metrics = trainer.train()
    assert metrics["actor/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert metrics["rewards/margin"] == 0.0


def test_margins_of_the_data_reach_the_reward_model(made):
    trainer = made("reward_model")
    rows = [{**row, "margin": 3.0} for row in sums(8, 0)]
    batch = trainer.batch(trainer_items(trainer, rows))
    assert batch["margin"].tolist() == [3.0] * 16
    assert int(batch["loss_mask"].sum()) == 16  # one score a sequence, at its last token


def trainer_items(trainer, rows):
    trainer.load_inputs()
    return trainer.source_of("train", trainer.config.data, rows).all()


def test_an_exported_reward_model_scores_as_in_training(made, tmp_path):
    from transformers import AutoModelForSequenceClassification

    trainer = made("reward_model")
    trainer.train()
    trainer.export(tmp_path / "scorer")
    items = trainer.source_of("validation", trainer.config.data, None).all(2)
    found = trainer.groups["reward_model"].call("infer", trainer.batch(items), outputs=("scores",)).result()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer")
    with torch.no_grad():
        score = model(torch.tensor([items[0].chosen_ids])).logits.item()
    assert found["scores"][len(items[0].chosen_ids) - 1].item() == pytest.approx(score, abs=1e-4)


def test_kto_needs_a_second_row_for_its_kl(made):
    with pytest.raises(ConfigError, match=r"data\.prompts_per_step: got 1, expected at least 2"):
        made("kto", {"data.prompts_per_step": 1}).setup()


def test_kto_without_its_kl_takes_one_row_and_makes_no_further_pass(made):
    metrics = made(
        "kto", {"data.prompts_per_step": 1, "kto.loss": "apo_zero_unpaired", "run.steps": 1}
    ).train()
    assert metrics["rewards/kl"] == 0.0
    assert metrics["actor/loss"] == pytest.approx(0.5)  # the policy is the reference


@pytest.mark.parametrize("options", [{"dpo.wpo": True}, {"dpo.ld_alpha": 0.0}])
def test_weights_of_pairs_and_of_tails_train_and_are_evaluated(made, options):
    metrics = made("dpo", {**options, "run.steps": 2, "eval.at_end": True}).train()
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    if "dpo.wpo" in options:
        assert 0 < metrics["rewards/pair_weight"] <= 1
        assert 0 < metrics["eval/rewards/pair_weight"] <= 1
    else:
        assert metrics["rewards/margin"] != 0


PLUGIN = """
from engine_core import hookimpl
from engine_plugin_trainers.tables import PairLoss


def squared(chosen, rejected, beta):
    return (1 - beta * (chosen - rejected)) ** 2


@hookimpl
def engine_pair_losses():
    free = PairLoss(load=squared, reference=False, normalized=True)
    return {"squared": PairLoss(load=squared), "free": free, "uncallable": PairLoss(load=lambda chosen: chosen)}
"""


@pytest.fixture
def with_plugin(made, tmp_path, monkeypatch):
    """``made`` with a plugin in one file that offers pair losses."""
    (tmp_path / "losses.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    return lambda loss, changes=None: made(
        "dpo", {"plugins": ["./losses.py"], "dpo.loss": loss, **(changes or {})}
    )


def test_a_pair_loss_of_a_plugin_trains_is_evaluated_and_resumed(with_plugin, tmp_path):
    changes = {"run.steps": 2, "checkpoint.every_steps": 1, "eval.at_end": True, "run.name": "mine"}
    trainer = with_plugin("squared", changes)
    trainer.train()
    lines = lines_of(trainer.folder.path)
    assert lines[0]["actor/loss"] == pytest.approx(1.0)  # the policy is the reference
    assert lines[-1]["eval/loss"] != lines[0]["actor/loss"]
    shutil.rmtree(tmp_path / "runs" / "mine" / "checkpoints" / "step_00000002")
    trainer.close()
    again = with_plugin("squared", changes)
    again.train(resume=tmp_path / "runs" / "mine")
    assert lines_of(tmp_path / "runs" / "mine") == lines


def test_what_a_plugin_says_of_its_pair_loss_is_followed(with_plugin):
    trainer = with_plugin("free", {"run.steps": 1})
    trainer.train()
    assert "ref" not in trainer.groups
    assert trainer.options.normalizes(trainer.spec)
    with pytest.raises(ConfigError, match=r"dpo: loss = 'squared' does not read label_smoothing"):
        with_plugin("squared", {"dpo.label_smoothing": 0.1}).setup()


def test_a_pair_loss_that_is_unknown_or_cannot_be_called_is_refused(with_plugin):
    with pytest.raises(
        PluginError, match=r"dpo\.loss: Unknown pair loss 'squard'\. Did you mean 'squared'\?"
    ):
        with_plugin("squard")
    with pytest.raises(
        PluginError, match=r"pair loss 'uncallable' must be callable as f\(chosen, rejected, \*, beta\)"
    ):
        with_plugin("uncallable").setup()
