"""Runs that learn from complete groups while others are sampled: the same update as after sampling."""

import json
import logging
import shutil

import pytest
import torch

from engine_core import Trainer, builtin, load_config
from engine_core.errors import ConfigError, TrainingFailed
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_trainers import stream_update
from engine_plugin_trainers.plugin import engine_advantages

pytestmark = pytest.mark.usefixtures("forked_workers")

LOSSES = sorted(builtin.engine_losses())
ADVANTAGES = {**builtin.engine_advantages(), **engine_advantages()}
PER_GROUP = sorted(name for name, spec in ADVANTAGES.items() if spec.per_group)
AGGREGATIONS = (
    *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"),
    "seq-mean-token-sum-norm",
)


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def tails(grpo):
    """Two steps of four groups, whose responses end anywhere between 1 and 40 tokens."""
    return grpo | {
        "data.validation": None,
        "rollout.max_response_tokens": 40,
        "rollout.stop_token_ids": list(range(2, 24)),
        "rollout.hf.tokens_per_step": 3,
        "rollout.weights": "own",
        "actor.optim.lr": 0.02,
        "actor.max_tokens_per_rank": 256,
    }


@pytest.fixture
def together(monkeypatch):
    """Lets the update stream with a sampler in this process, which saves the start of another."""
    monkeypatch.setattr(stream_update, "_placement_problems", lambda trainer: iter(()))


@pytest.fixture
def gradients(monkeypatch):
    """The gradient of each optimizer step, as one vector."""
    found = []
    step = TorchEngine.optimizer_step

    def noted(engine):
        found.append(torch.cat([grad.flatten() for grad in engine._grads()]).clone())
        return step(engine)

    monkeypatch.setattr(TorchEngine, "optimizer_step", noted)
    return found


def _set(settings):
    return {key: value for key, value in settings.items() if value is not None}


def trained(settings, name="r", resume=None, watch=None, rewards=(digits,)):
    run = Trainer(load_config(overrides=_set(settings) | {"run.name": name}), rewards=[*rewards])
    if watch is not None:
        watch(run)
    try:
        run.train(resume=resume)
    finally:
        run.close()
    return run.folder.path


def lines_of(folder):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def same_metrics(one, other):
    """Compare the metrics of a step, except those of streaming and of the number of micro-batches."""
    names = {name for line in (one, other) for name in line}
    for name in sorted(n for n in names if not n.startswith("stream/") and n != "actor/micro_batches"):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def case(kind, name):
    """Settings of an algorithm."""
    if kind == "advantage":
        return {"algorithm.advantage": name}
    return {"algorithm.loss": name} if kind == "loss" else {"algorithm.loss_aggregation": name}


OTHERS = {
    "kl in the reward": {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"},
    "kl in the loss, entropy": {"algorithm.kl_coef": 0.1, "algorithm.entropy_coef": 0.01},
    "truncated responses masked": {"algorithm.mask_truncated": True},
    "log-probs of the sampler": {"algorithm.correction.bypass": True},
}


def other_model(path, folder):
    """Write a model of the same shape with other random weights; return its folder."""
    shutil.copytree(path, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"initializer_range": 0.05}))
    return str(folder)


QUICK = {"grpo", "distill", "gspo", "token-sum", "seq-mean-token-mean", "kl in the reward"}


def cases():
    every = [case("advantage", name) | {"": name} for name in PER_GROUP]
    every += [case("loss", name) | {"": name} for name in LOSSES]
    every += [case("aggregation", name) | {"": name} for name in AGGREGATIONS]
    every += [changes | {"": name} for name, changes in OTHERS.items()]
    for changes in every:
        name = changes.pop("")
        yield pytest.param(changes, id=name, marks=[] if name in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize("changes", cases())
def test_the_gradient_is_that_of_the_update_after_sampling(tails, together, gradients, tmp_path, changes):
    settings = tails | {"run.steps": 1} | changes
    rewards = [digits]
    if settings.get("algorithm.advantage") == "distill":
        settings["teacher.path"] = other_model(settings["model.path"], tmp_path / "teacher")
        rewards = []  # the teacher suffices
    plain = trained(settings, "plain", rewards=rewards)
    streamed = trained(settings | {"rollout.stream_update": True}, "streamed", rewards=rewards)
    (line,) = lines_of(streamed)
    assert line["stream/parts"] > 1
    assert line["stream/overlap_share"] > 0
    one, other = gradients
    assert float(one.norm()) > 0
    assert float((one - other).norm()) <= 1e-5 * float(one.norm())
    same_metrics(lines_of(plain)[0], line)


DETERMINISTIC = {"rollout.stream_deterministic": True}


def test_in_order_it_is_the_update_after_sampling_bit_for_bit(tails, together, gradients, monkeypatch):
    """Streamed from a sampler in another process, whose responses arrive at any time; after sampling; resumed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = tails | DETERMINISTIC | {"checkpoint.every_steps": 1, "tracking.rollouts_every_steps": 0}
    streaming = settings | {"rollout.stream_update": True}
    after = lines_of(trained(settings, "after"))
    folder = trained(streaming | {"rollout.process": {}}, "streamed")
    streamed = lines_of(folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000002")
    resumed = lines_of(trained(streaming, "streamed", resume=folder))
    torch.set_num_threads(threads)
    assert [line["stream/parts"] for line in streamed] == [4, 4]
    assert max(line.pop("stream/overlap_share") for line in streamed) > 0
    assert not any(line.pop("stream/overlap_share") for line in after)
    assert resumed[-1].pop("stream/overlap_share") > 0
    assert streamed == after
    assert resumed[-1] == after[-1]
    for found, expected in zip(gradients[2:], [*gradients[:2], gradients[1]], strict=True):
        assert torch.equal(found, expected)


# -- faults that are planted -----------------------------------------------------


def twice(update):
    """A group is counted twice."""
    learn, done = update._learn, []

    def hurt(rollouts):
        learn(rollouts)
        if not done:
            done.append(True)
            learn(rollouts)

    update._learn = hurt


def dropped(update):
    """A group that was learned from is not in the batch."""
    finish = update.finish
    update.finish = lambda rollouts: finish(rollouts[4:])


def early(update):
    """The divisor is taken when half of the tokens have been learned from."""
    finish, batch = update.finish, update.trainer.batch

    def hurt(rollouts):
        half = rollouts[: len(rollouts) // 2]
        update.trainer.batch = lambda _: batch(half)
        return finish(rollouts)

    update.finish = hurt


def moved(update):
    """The weights change between two groups."""
    learn, trainer = update._learn, update.trainer

    def hurt(rollouts):
        learn(rollouts)
        if not trainer.weights_changed:
            trainer.optimizer_step()

    update._learn = hurt


def stale(update):
    """The sampler has other weights than those that learn."""
    draw, trainer = update.draw, update.trainer

    def hurt(requests, step):
        trainer.version += 1
        return draw(requests, step)

    update.draw = hurt


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (twice, "2 times in the gradient, 1 times in the batch"),
        (dropped, "1 times in the gradient, 0 times in the batch"),
        (early, "loss tokens, and the batch has"),
        (moved, "over a change of the weights"),
        (stale, "the weights changed during the step"),
    ],
)
def test_a_gradient_that_is_not_of_the_step_is_refused(tails, together, fault, said):
    def watch(run):
        prepare = run.prepare

        def prepared():
            prepare()
            fault(run.stream_update)

        run.prepare = prepared

    with pytest.raises(TrainingFailed, match=said):
        trained(tails | {"rollout.stream_update": True}, watch=watch)


# -- where it is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm.advantage": "batch_mean"}, "'batch_mean' depends on the whole batch"),
        ({"algorithm.advantage": "gae"}, "needs a critic"),
        ({"algorithm.advantage": "remax"}, "needs greedy responses"),
        ({"algorithm.mini_batch_prompts": 2}, "a batch has 2 optimizer steps"),
        ({"algorithm.epochs": 3}, "a batch has 3 optimizer steps"),
        ({"algorithm.top_entropy_quantile": 0.5}, "algorithm.top_entropy_quantile is a quantile"),
        (
            {"algorithm.correction.normalize": True, "algorithm.correction.level": "token"},
            "correction.normalize divides",
        ),
        ({"stage": [{"name": "dynamic_sampling"}]}, "stage 'dynamic_sampling' receives all rollouts"),
        ({"rollout.over_sampling": 1.5}, "stops responses"),
        ({}, "the sampler works in the actor's processes"),
    ],
)
def test_what_cannot_stream_is_refused_and_auto_logs_why(tails, caplog, changes, said):
    run = Trainer(
        load_config(overrides=_set(tails | changes | {"rollout.stream_update": True})), rewards=[digits]
    )
    with pytest.raises(ConfigError, match=f"rollout.stream_update: got true, but .*{said}"):
        run.setup()
    run.close()
    caplog.set_level(logging.INFO, "engine")
    run = Trainer(
        load_config(overrides=_set(tails | changes | {"rollout.stream_update": "auto"})), rewards=[digits]
    )
    run.setup(training=True)
    assert run.stream_update is None
    run.close()
    assert said in caplog.text


def test_a_reward_that_reads_all_samples_is_refused(tails):
    def ranks(completions, group_ids):
        return [0.0 for _ in completions]

    config = load_config(overrides=_set(tails | {"rollout.stream_update": True, "rollout.process": {}}))
    with pytest.raises(ConfigError, match="reward 'ranks' receives all samples of a step"):
        Trainer(config, rewards=[ranks]).setup()


def test_a_trainer_that_changes_a_part_of_the_step_must_say_that_it_streams(tails):
    class Whitened(Trainer):
        def with_advantages(self, batch):
            return super().with_advantages(batch)

    config = load_config(overrides=_set(tails | {"rollout.stream_update": True, "rollout.process": {}}))
    with pytest.raises(ConfigError, match="changes 'with_advantages', and does not declare streams = True"):
        Whitened(config, rewards=[digits]).setup()


@pytest.mark.slow
def test_auto_streams_where_it_is_possible(tails):
    assert (
        lines_of(trained(tails | {"rollout.stream_update": "auto", "rollout.process": {}}))[1]["stream/parts"]
        > 1
    )


POOLS = {
    "runtime.backend": "torchrun",
    "actor.backend": "fsdp",
    "actor.max_tokens_per_rank": 64,
    "placement.pools": {"train": 2, "serve": 1},
    "placement.actor": "train",
    "placement.rollout": "serve",
}


@pytest.mark.slow
def test_ranks_of_fsdp_stream_from_a_pool_of_samplers(tails):
    def trained_apart(name, **changes):
        config = load_config(
            overrides=_set(tails | POOLS | changes | {"run.name": name, "rollout.weights": "auto"})
        )
        run = Trainer(config, rewards=[digits])
        try:
            run.train()
        finally:
            run.close()
        return lines_of(run.folder.path)

    plain, streamed = trained_apart("plain"), trained_apart("streamed", **{"rollout.stream_update": True})
    for one, other in zip(plain, streamed, strict=True):
        assert other["stream/overlap_share"] > 0
        same_metrics(one, other)
