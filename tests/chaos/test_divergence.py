"""Rows 9 and 10: losses that are not finite and metrics that run away, in one process."""

import pytest
from safetensors.numpy import load_file

from engine_core.runs.checkpoint import Checkpoints, problems

pytestmark = pytest.mark.chaos

PLUGIN = '''
from engine_core import hookimpl
from engine_core.specs import Loss, Options, Reward

CALLS = iter(range(1, 10**6))


class SickOptions(Options):
    at: list[int] = []
    value: str = "nan"


def sick(outputs, batch, at, value):
    """The clipped loss, but not a number in some of its calls (one a step)."""
    loss = -outputs["log_probs"] * batch["advantages"]
    if next(CALLS) not in at:
        return loss, {}
    return (loss + float("inf") if value == "added inf" else loss * float(value)), {}


@hookimpl
def engine_losses():
    return {"sick": Loss(load=sick, config=SickOptions)}


def bytes_share(completions):
    return [sum(c.isascii() for c in text) / max(len(text), 1) for text in completions]


@hookimpl
def engine_rewards():
    return {"bytes_share": Reward(load=bytes_share)}
'''


@pytest.fixture
def train(engine, tiny):
    def run(at, value="nan", **changes):
        settings = {"run.steps": 8, "algorithm.loss": "sick"} | changes
        settings |= {"algorithm.sick.at": at, "algorithm.sick.value": value}
        return engine("train", tiny(settings, plugin=PLUGIN))

    return run


@pytest.mark.parametrize("value", ["nan", "inf", "added inf"])
def test_a_loss_that_is_not_finite_skips_its_step_and_is_counted(train, metrics, value):
    run = train([2, 3, 6], value)
    assert run.code == 0, run.err
    assert [line["actor/skipped_steps"] for line in metrics()] == [0, 1, 1, 0, 0, 1, 0, 0]
    assert run.err.count("Optimizer step skipped") == 3
    assert metrics()[2]["tracking/non_finite"] >= 1  # the loss and the norm are told as null
    assert metrics()[7]["actor/loss"] is not None


def test_too_many_in_a_row_end_the_run_with_the_last_good_checkpoint(engine, train, metrics):
    run = train([4, 5, 6, 7])
    assert run.code == 6
    assert (
        "3 optimizer steps in a row had gradients that are not finite (actor.optim.max_skipped_steps)"
        in run.err
    )
    assert "Traceback" not in run.err
    assert [line["step"] for line in metrics()] == [1, 2, 3, 4, 5]
    checkpoints = Checkpoints(engine.folder / "runs" / "r" / "checkpoints")
    for step in checkpoints.steps():
        assert problems(checkpoints.path(step)) == []
        weights = load_file(checkpoints.path(step) / "actor" / "weights.safetensors")
        assert all(bool((abs(tensor) < 1e6).all()) for tensor in weights.values())


def test_the_count_in_a_row_goes_on_after_a_resume(engine, train, metrics):
    """Two bad steps, a stop, and the third bad step of the resumed run is one too many."""
    run = train([2, 3], **{"run.steps": 3})
    assert run.code == 0, run.err
    resumed = engine("resume", "r", "--steps", 8, "--set", "algorithm.sick.at=[1]")
    assert resumed.code == 6, resumed.err
    assert "3 optimizer steps in a row" in resumed.err


def test_a_metric_over_its_bound_ends_the_run_and_the_step_is_not_saved(engine, train, metrics):
    run = train([3], "1e6", **{"run.fail_above": {"actor/grad_norm": 1000.0}})
    assert run.code == 6, run.err
    assert "actor/grad_norm is" in run.err
    assert "after step 3, above run.fail_above = 1000" in run.err
    assert [line["step"] for line in metrics()] == [1, 2, 3]
    assert Checkpoints(engine.folder / "runs" / "r" / "checkpoints").steps() == [1, 2]
    resumed = engine("resume", "r", "--set", "algorithm.sick.at=[]")
    assert resumed.code == 0, resumed.err
    assert [line["step"] for line in metrics()] == list(range(1, 9))


def test_responses_that_end_at_once_and_equal_rewards_keep_every_metric_finite(engine, tiny, metrics):
    """Row 25: nothing to learn from is no division by zero."""
    plugin = PLUGIN.replace("sum(c.isascii() for c in text) / max(len(text), 1)", "1.0")
    run = engine("train", tiny({"rollout.stop_token_ids": list(range(258))}, plugin=plugin))
    assert run.code == 0, run.err
    for line in metrics():
        assert line["reward/zero_variance_groups"] == 1
        assert line["response_length/max"] == 1
        assert None not in line.values()
        assert line["actor/grad_norm"] == pytest.approx(0.0, abs=1e-6)
