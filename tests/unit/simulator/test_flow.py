"""A simulated sampler's flow: ended at the end of its engine's call, with every token once."""

import dataclasses

import pytest
from virtual_cluster.runs import Setting, simulate
from virtual_cluster.runtime import Stretch
from virtual_cluster.speeds import Lengths


@pytest.mark.parametrize(
    ("moment", "tokens"), [(10.0, 8), (12.0, 8), (12.7, 8), (12.9, 16), (14.0, 20), (99.0, 20)]
)
def test_it_is_left_when_the_call_that_is_under_way_is_over(moment, tokens):
    stretch = Stretch(start=10.0, prefill=2.0, each=0.1, count=20)
    assert stretch.tokens_by(moment, at_once=8) == tokens
    assert stretch.end == pytest.approx(14.0)


def test_the_controllers_messages_are_as_many_as_responses_however_long_these_are():
    found = {}
    for length in (100, 1000):
        setting = Setting(workers=8, mode="async-1", lengths=Lengths(length, length, 8192), steps=2)
        found[length] = simulate(setting)
    assert found[1000]["step_s"] > 2 * found[100]["step_s"]
    assert found[1000]["messages"] < 1.5 * found[100]["messages"]
    for each in found.values():
        assert each["idle_samplers"] >= 0


def test_early_stop_has_a_flow_as_accelerators_do_and_rounds_where_they_are_asked_for():
    setting = Setting(workers=8, mode="early-stop", lengths=Lengths(1000, 3000, 8192), steps=2)
    flow, rounds = (
        simulate(dataclasses.replace(setting, mode=mode)) for mode in ("early-stop", "early-stop-rounds")
    )
    assert rounds["messages"] > 3 * flow["messages"]
    assert flow["step_s"] < 1.05 * rounds["step_s"]  # none waits for another
    for each in (flow, rounds):
        assert set(map(int, each["staleness"])) > {0}  # stopped responses continue with newer weights
