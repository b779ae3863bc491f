"""The advice against times for which the answer is known."""

import pytest

from engine_plugin_tools.advice import advice


def run(count=6, **times):
    """Return steps with these seconds; the first one is slow, as first steps are."""
    line = {f"time/{name}": value for name, value in times.items()}
    lengths = {"response_length/mean": 100.0, "response_length/max": 100.0}
    slow = {name: 50 * value for name, value in line.items()}
    return [{**slow, **lengths, "step": 1}, *({**line, **lengths, "step": n} for n in range(2, count + 1))]


def test_equal_halves_would_be_twice_as_quick_apart_and_no_quicker_on_the_same_devices():
    said = advice(run(generate=4.0, train=3.0, reward=1.0, step=8.0))
    assert "takes 8 s, 4 of them for sampling and 4 for the rest" in said
    assert "4 s at best, 2.00x" in said
    assert "no quicker, and slower where the two get in each other's way" in said


def test_where_rewards_take_most_of_the_step_they_are_named():
    said = advice(run(generate=0.06, train=0.07, reward=1.4, step=1.54))
    assert "1.4 of them for rewards. What would help is a quicker reward: of a function with more" in said
    assert "of a model with a smaller one" in said  # it has no workers
    assert "1.4 of them for rewards" in advice(
        run(generate=0.1, train=0.07, reward=1.4, step=1.6, sampling=1.5)
    )


def test_a_long_tail_is_what_the_same_devices_could_gain():
    lines = run(generate=6.0, train=2.0, step=8.0)
    lines = [line | {"response_length/mean": 25.0} for line in lines]
    assert "at most 2.29x by filling" in advice(lines)  # 8 / (2 + 6 / 4)


@pytest.mark.parametrize(("generate", "train", "who"), [(9.5, 0.5, "samplers"), (0.3, 9.7, "trainers")])
def test_where_one_side_has_nearly_all_the_time_running_ahead_gains_little(generate, train, who):
    said = advice(run(generate=generate, train=train, step=10.0))
    assert "would gain little" in said
    assert f"more {who}" in said


def test_ahead_the_side_that_is_waited_for_is_the_one_to_strengthen():
    said = advice(run(generate=6.0, train=3.5, step=10.0, sampling=10.0))
    assert "the trainer works for 4 and waits 6 for rollouts" in said
    assert "more samplers, at best 2.50x with 2.5 times as many" in said
    said = advice(run(generate=0.0, train=9.5, step=10.0, sampling=4.0))
    assert "more trainers, at best 2.50x" in said
    assert "at best 1.40x" in said  # than in turn
    assert "The two sides are even" in advice(run(generate=0.2, train=9.0, step=10.0, sampling=9.8))


def test_an_update_that_waits_for_the_sampler_is_no_work_of_the_trainers():
    said = advice(run(generate=0.0, train=1.0, sync=9.0, sync_wait=9.0, step=10.0, sampling=9.9))
    assert "the trainer works for 1 and waits 9 for rollouts (9 of them before an update of weights" in said
    assert "at best 1.09x" in said
    assert 'trainer = "rl" would do as well' in said
    assert "more samplers" in said
    assert "before an update" not in advice(
        run(generate=5.0, train=4.9, sync_wait=0.1, step=10.0, sampling=9.9)
    )


def test_ahead_it_is_said_where_it_gains_nothing():
    said = advice(run(generate=9.8, train=0.2, step=10.0, sampling=9.9))
    assert 'trainer = "rl" would do as well' in said


def test_nothing_is_said_of_a_run_that_only_trains_or_is_too_short():
    assert advice(run(train=9.0, step=10.0)) == ""
    assert advice(run(generate=1.0, train=1.0, step=2.0, count=2)) == ""
    assert advice([]) == ""


def test_episodes_that_call_tools_are_not_taken_for_work_of_the_sampler():
    lines = [line | {"environment/tool_calls": 9.0} for line in run(generate=9.5, train=0.5, step=10.0)]
    said = advice(lines)
    assert "9.5 of them for episodes, their tools included" in said
    assert "more samplers" not in said
    assert advice([line | {"time/sampling": 9.0} for line in lines]) == ""
