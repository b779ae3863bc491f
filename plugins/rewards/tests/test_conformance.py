from engine_core.testing import RewardSuite

FOUR = {"completion": "2 + 2 = 4", "answer": "4"}


class TestExactMatch(RewardSuite):
    name = "exact_match"
    options = {"after": "=", "ignore_case": True}
    examples = [
        (FOUR, 1.0),
        (FOUR | {"answer": "5"}, 0.0),
        (FOUR | {"answer": None}, None),
        (FOUR | {"completion": "4"}, 0.0),
    ]


class TestNumeric(RewardSuite):
    name = "numeric"
    examples = [(FOUR, 1.0), (FOUR | {"answer": "... #### 5"}, 0.0), (FOUR | {"answer": None}, None)]


class TestMath(RewardSuite):
    name = "math"
    examples = [
        ({"completion": r"so \boxed{\frac{2}{4}}", "answer": r"\frac12"}, 1.0),
        (FOUR | {"answer": "5"}, 0.0),
    ]


class TestFormat(RewardSuite):
    name = "format"
    examples = [("<think>a</think> <answer>4</answer>", 1.0), ("4", 0.0)]


class TestLength(RewardSuite):
    name = "length"
    options = {"max_tokens": 20, "buffer_tokens": 10, "penalty": 0.5}
    examples = [
        ({"response_length": 10}, 0.0),
        ({"response_length": 15}, -0.25),
        ({"response_length": 30}, -0.5),
    ]


class TestPython(RewardSuite):
    name = "python"
    options = {"path": "short_answers.py", "allow_local_code": True, "arguments": {"most": 3}}
    examples = [("abc", 1.0), ("abcd", 0.0)]
