import asyncio
import functools
import math
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import ConfigError, DataError
from engine_core.rewards.signatures import BadResult, RewardFunction, arguments, evaluate, number, numbers_of


def given_arguments(function, rollouts, options=()):
    signature = RewardFunction("r", function, dict(options)).signature
    return arguments("r", signature, rollouts)


def outcomes(function, count=2, timeout=1.0, **columns):
    return list(evaluate(RewardFunction("r", function, {}), columns, count, timeout, lambda _: nullcontext()))


# ---- arguments ----------------------------------------------------------------------------------


def test_a_function_receives_only_what_it_names(make_rollout):
    rows = [make_rollout("ab", answer="x", level=3), make_rollout("c", 1, answer="y", level=4)]
    assert given_arguments(lambda completions, level: 0, rows) == {
        "completions": ["ab", "c"],
        "level": [3, 4],
    }


def test_everything_that_is_offered_has_the_value_of_the_rollout(make_rollout):
    def every(
        completions,
        prompts,
        completion_ids,
        prompt_ids,
        token_ids,
        response_lengths,
        finish_reasons,
        group_ids,
    ):
        pass

    assert given_arguments(every, [make_rollout("ab", group=5)]) == {
        "completions": ["ab"],
        "prompts": ["Q"],
        "completion_ids": [[0, 1]],
        "prompt_ids": [[7, 8]],
        "token_ids": [[7, 8, 0, 1]],
        "response_lengths": [2],
        "finish_reasons": ["stop"],
        "group_ids": [5],
    }


def test_trl_s_form_receives_its_three_names_and_all_columns(make_rollout):
    def trl(prompts, completions, **columns):
        pass

    values = given_arguments(trl, [make_rollout("ab", answer="x", task="t")])
    assert values == {
        "prompts": ["Q"],
        "completions": ["ab"],
        "completion_ids": [[0, 1]],
        "answer": ["x"],
        "task": ["t"],
    }


def test_verl_s_form_is_called_for_each_sample_with_the_answer_as_ground_truth(make_rollout):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        pass

    rows = [make_rollout("ab", data_source="gsm8k", answer="4")]
    assert RewardFunction("r", compute_score, {}).signature.per_sample
    assert given_arguments(compute_score, rows) == {
        "data_source": ["gsm8k"],
        "solution_str": ["ab"],
        "ground_truth": ["4"],
    }


def test_a_column_ground_truth_comes_before_the_answer_also_where_a_row_lacks_it(make_rollout):
    rows = [make_rollout("a", answer="5", ground_truth="4"), make_rollout("b", 1, answer="6")]
    values = given_arguments(lambda solution_str, ground_truth, answer=None: 0, rows)
    assert (values["ground_truth"], values["answer"]) == (["4", None], ["5", "6"])


def test_a_column_that_only_some_rows_have_is_none_in_the_others(make_rollout):
    rows = [make_rollout("a", hint="h"), make_rollout("b", 1)]
    assert given_arguments(lambda completion, hint: 0, rows)["hint"] == ["h", None]


def test_an_absent_column_with_a_default_is_left_to_it(make_rollout):
    assert "hint" not in given_arguments(lambda completion, hint="none": 0, [make_rollout("a")])


def test_an_absent_column_is_named_with_the_nearest_one(make_rollout):
    with pytest.raises(DataError) as error:
        given_arguments(lambda completion, anwser: 0, [make_rollout("a", answer="x")])
    assert str(error.value).startswith(
        "Reward 'r' needs 'anwser', which is no column of the data. Did you mean 'answer'?"
    )


def test_an_option_fills_its_argument_also_where_a_column_has_its_name(make_rollout):
    values = given_arguments(lambda completion, answer: 0, [make_rollout("a", answer="x")], {"answer": 1})
    assert values == {"completion": ["a"]}


@pytest.mark.parametrize("how", ["option", "bound"])
def test_options_and_bound_arguments_win_over_columns(how):
    def function(completions, scale=1.0, **columns):
        return [scale] * len(completions)

    part = functools.partial(function, scale=2.0) if how == "bound" else function
    reward = RewardFunction("r", part, {} if how == "bound" else {"scale": 2.0})
    given = {"completions": ["a"], "scale": [99.0]}
    assert [o.value for _, o in evaluate(reward, given, 1, 1.0, lambda _: nullcontext())] == [2.0]
    assert reward.signature.names == ("completions",)


def test_an_option_that_the_function_does_not_take_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"Reward 'r' declares the option 'tol' but has no such argument\. Did you mean 'tole'",
    ):
        RewardFunction("r", lambda completion, tole: 0, {"tol": 1})


def test_two_forms_in_one_function_are_refused():
    with pytest.raises(
        ConfigError, match=r"names 'completion' \(one sample a call\) and 'prompts' \(lists\)"
    ):
        RewardFunction("r", lambda completion, prompts: 0, {})


def test_a_positional_only_argument_is_refused():
    def function(completion, /):
        pass

    with pytest.raises(ConfigError, match="positional-only argument 'completion'"):
        RewardFunction("r", function, {})


def test_a_partial_and_an_object_are_functions():
    class Judge:
        async def __call__(self, completion):
            return 1.0

    assert RewardFunction("r", Judge(), {}).signature.asynchronous
    part = functools.partial(lambda completion, scale: scale, scale=2.0)
    assert outcomes(part, 1, completion=["a"])[0][1].value == 2.0

    async def slow(completion, scale):
        return scale

    wrapped = functools.wraps(slow)(lambda **given: slow(**given))
    assert RewardFunction("r", functools.partial(wrapped, scale=2.0), {}).signature.asynchronous


# ---- results ------------------------------------------------------------------------------------

SCALARS = [
    1,
    1.0,
    True,
    Fraction(1),
    np.float32(1),
    np.bool_(True),
    np.array(1),
    torch.tensor(1),
    {"score": 1},
]


@pytest.mark.parametrize(
    "value", [*SCALARS, torch.tensor(1.0, requires_grad=True), torch.tensor(1, dtype=torch.bfloat16)]
)
def test_any_scalar_is_a_reward(value):
    assert number("r", value) == 1.0


def test_none_is_not_applicable():
    assert number("r", None) is None


@pytest.mark.parametrize(
    "value", ["1", [1.0], (1.0,), {"a": 1}, torch.ones(1), np.ones((1, 1)), b"1", 1j, object]
)
def test_what_is_no_number_is_refused_with_its_type(value):
    with pytest.raises(
        BadResult, match=rf"Reward 'r' must give a number or None .*\({type(value).__name__}\)"
    ):
        number("r", value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan), np.float64("inf"), 10**400]
)
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(BadResult, match="must give a finite number"):
        number("r", value)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1),
    st.sampled_from([list, tuple, np.array, torch.tensor]),
)
def test_a_list_of_the_right_length_is_taken_as_it_is(values, container):
    got = [outcome.value for outcome in numbers_of("r", container(values), len(values))]
    assert got == pytest.approx(values)


@given(st.integers(1, 9), st.integers(0, 9), st.sampled_from([list, tuple, np.array, torch.tensor]))
def test_another_length_is_refused_and_never_broadcast(count, length, container):
    if length == count:
        return
    with pytest.raises(BadResult, match=f"Reward 'r' must return a list of {count} numbers.*got .*{length}"):
        numbers_of("r", container([1.0] * length), count)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (1.0, "1.0 (float)"),
        (None, "None (NoneType)"),
        ("ab", "'ab' (str)"),
        ({"score": [1, 2]}, "{'score': [1, 2]} (dict)"),
        (torch.tensor(1.0), "Tensor of shape ()"),
        (torch.ones(2, 1), "Tensor of shape (2, 1)"),
    ],
)
def test_what_is_no_list_is_refused_with_what_it_is(value, got):
    with pytest.raises(BadResult) as error:
        numbers_of("r", value, 2)
    assert str(error.value) == f"Reward 'r' must return a list of 2 numbers, one for each sample, got {got}."


def test_one_bad_entry_of_a_list_fails_only_its_sample():
    got = numbers_of("r", [1.0, math.nan, "x", None], 4)
    assert [o.failure for o in got] == ["", "error", "error", ""]
    assert [o.value for o in got] == [1.0, None, None, None]


# ---- calls --------------------------------------------------------------------------------------


def test_a_traceback_begins_in_the_function():
    def raising(completion):
        raise ValueError("this one")

    (_, outcome), _ = outcomes(raising, completion=["a", "b"])
    assert outcome.message == "ValueError: this one"
    assert outcome.trace.splitlines()[1].endswith("in raising")


def test_an_asynchronous_function_in_plural_form_is_awaited():
    async def function(completions):
        return [1.0, 2.0]

    assert [o.value for _, o in outcomes(function, completions=["a", "b"])] == [1.0, 2.0]


def test_changed_options_do_not_reach_the_next_call():
    def function(completion, seen):
        seen.append(completion)
        return len(seen)

    reward = RewardFunction("r", function, {"seen": []})
    got = list(evaluate(reward, {"completion": ["a", "b"]}, 2, 1.0, lambda _: nullcontext()))
    assert [o.value for _, o in got] == [1.0, 1.0]


def test_an_exception_in_a_list_fails_its_sample_alone():
    found = numbers_of("r", [1.0, ValueError("no such word"), TimeoutError("late"), None], 4)
    assert [(o.value, o.failure, o.message) for o in found] == [
        (1.0, "", ""),
        (None, "error", "ValueError: no such word"),
        (None, "timeout", "TimeoutError: late"),
        (None, "", ""),
    ]
    assert not any(o.contract or o.trace for o in found)


@pytest.mark.parametrize("argument", ["completion", "completions"])
def test_an_asynchronous_reward_is_called_within_a_running_loop_as_in_a_notebook(argument):
    async def one(completion):
        return float(len(completion))

    async def several(completions):
        return [float(len(text)) for text in completions]

    async def cell():
        return outcomes({"completion": one, "completions": several}[argument], 2, **{argument: ["a", "bc"]})

    assert [outcome.value for _, outcome in asyncio.run(cell())] == [1.0, 2.0]
