"""Episodes with slow tools on the virtual clock: a step in closed form, and what running ahead gains."""

import pytest
from virtual_cluster.runs import Setting, simulate
from virtual_cluster.speeds import Lengths, Speeds

TURNS = 4
EQUAL = Lengths(50, 50, 50)  # 0.5 s of a turn

SPEED = Speeds(
    "test", "", token_seconds=0.01, token_seconds_each=0.0, prefill_rate=1e12, train_rate=1000.0,
    optimizer_seconds=0.0, weight_bytes=0, load_seconds=0.0, message_seconds=0.0, controller_bandwidth=1e18,
    reward_seconds=0.0, call_tokens=1,
)  # fmt: skip


def setting(**changes):
    shape = {"workers": 2, "prompts_per_worker": 2, "group_size": 2, "prompt_tokens": 4, "trainer_share": 0.5}
    return Setting(**({"speeds": SPEED, "lengths": EQUAL, "steps": 3} | shape | changes))


def tools(least, most):
    return {"turns": TURNS, "least": least, "most": most, "tokens": 50}


def test_a_step_in_turn_takes_the_turns_and_the_tools_of_an_episode_and_then_the_training():
    found = simulate(setting(tools=tools(5.0, 5.0)))
    for line in found["lines"]:
        # the loop waits up to a few ms for turns that come together
        assert line["time/generate"] == pytest.approx(TURNS * 0.5 + (TURNS - 1) * 5.0, abs=0.05)
        assert line["environment/tool_calls"] == 8 * (TURNS - 1)


@pytest.mark.slow
def test_with_slow_tools_running_ahead_is_at_least_twice_as_fast_as_steps_in_turn():
    slow = tools(1.0, 30.0)
    sync = simulate(setting(tools=slow, steps=6))
    ahead = simulate(setting(mode="async-2", tools=slow, steps=6))
    assert sync["step_s"] / ahead["step_s"] >= 2.0
    assert max(map(int, ahead["staleness"])) <= 2
    again = simulate(setting(mode="async-2", tools=slow, steps=6))
    assert again["step_s"] == ahead["step_s"]  # repeatable
