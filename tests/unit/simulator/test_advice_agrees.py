"""The advice after a run's first steps, compared with the simulator's result when the advice is followed."""

import dataclasses
import re

import pytest
from virtual_cluster.runs import Setting, simulate
from virtual_cluster.speeds import Lengths, Speeds

from engine_plugin_tools.advice import advice

SPEED = Speeds(
    "test", "", token_seconds=0.01, token_seconds_each=0.0005, prefill_rate=1e5, train_rate=1000.0,
    optimizer_seconds=0.01, weight_bytes=10**8, load_seconds=0.01, capacity=32,
)  # fmt: skip
TAILED, EQUAL = Lengths(30, 300, 400), Lengths(50, 50, 50)
REGIMES = {
    "long tails": (TAILED, 1000.0, "async-4"),
    "short and equal": (EQUAL, 1000.0, "sync"),
    "mostly training": (Lengths(10, 10, 10), 40.0, "sync"),
}
"""Lengths, rate of training, and the mode that is quicker on the same devices."""


def of(lengths, rate, speeds=SPEED, **changes):
    speeds = dataclasses.replace(speeds, train_rate=rate)
    given = {"workers": 4, "prompts_per_worker": 2, "group_size": 2, "prompt_tokens": 4, "steps": 4}
    return simulate(Setting(lengths=lengths, speeds=speeds, **(given | changes)))


@pytest.mark.parametrize("regime", REGIMES)
def test_on_the_same_devices_the_advice_names_the_mode_that_the_simulator_finds_quicker(regime):
    lengths, rate, quicker = REGIMES[regime]
    in_turn, ahead = of(lengths, rate), of(lengths, rate, mode="async-4")
    found = min((in_turn, ahead), key=lambda result: result["step_s"])
    assert found["mode"] == quicker
    said = advice([{"step": 1}, *in_turn["lines"]])
    filling = re.search(r"at most (\d+\.\d+)x by filling", said)
    assert ("async-4" if filling else "sync") == quicker, said
    if filling:
        assert 1.1 < in_turn["step_s"] / ahead["step_s"] <= float(filling[1])  # a bound, and it holds
    if regime == "mostly training":
        assert "would gain little" in said
        assert "more trainers" in said


def test_with_devices_of_its_own_for_the_sampler_the_advised_bound_is_reached_by_equal_lengths():
    in_turn = of(EQUAL, 600.0)
    said = advice([{"step": 1}, *in_turn["lines"]])
    bound = float(re.search(r"separate devices: ([\d.]+) s at best", said)[1])
    full = dataclasses.replace(
        SPEED, capacity=4
    )  # more at a time would beat the bound, which assumes full batches
    ahead = of(EQUAL, 600.0, full, mode="async-1", workers=8, prompts_per_worker=1, trainer_share=0.5)
    assert bound * 0.97 <= ahead["step_s"] <= bound * 1.25
    assert ahead["step_s"] < in_turn["step_s"] * 0.8
