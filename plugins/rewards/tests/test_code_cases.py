"""Every form of tests becomes cases that the engine can judge, or an error that says what is wrong."""

import json

import pytest

from engine_plugin_rewards.code_cases import Assertions, BadTests, Call, Expression, Stdin, parse


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        ({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", "5"]}, [Stdin("1\n", "2\n"), Stdin("2\n3", "5")]),
        (
            {"fn_name": "f", "inputs": [[1, [2]], "3\n[4]"], "outputs": [[5], "true"]},
            [Call("f", [1, [2]], [5], also=(5,)), Call("f", [3, [4]], True, also=("true",))],
        ),
        (
            [
                {"input": "1", "output": "2", "testtype": "stdin"},
                {"input": "1\n2", "output": "3", "testtype": "functional", "func_name": "g"},
            ],
            [Stdin("1", "2"), Call("g", [1, 2], 3)],
        ),
        (
            [{"input": '"a"', "output": '"12"', "testtype": "functional", "fn_name": "g"}],
            [Call("g", ["a"], "12")],
        ),
        (
            {"test_cases": [{"input": ["a"], "output": "[7]", "type": "function_call", "fn_name": "g"}]},
            [Call("g", ["a"], [7], also=("[7]", 7))],
        ),
        (
            {"language": "python", "test_cases": [{"input": "a", "output": "b", "type": "stdin_stdout"}]},
            [Stdin("a", "b")],
        ),
        (
            [{"stdin": "a", "stdout": "b"}, {"function": "f", "arguments": [1], "expected": [2]}],
            [Stdin("a", "b"), Call("f", [1], [2])],
        ),
        (["assert f(1) == (2, {3})"], [Expression("f(1)", expected=(2, {3}))]),
        (["assert -1 == f(1), 'why'"], [Expression("f(1)", expected=-1)]),
        (["assert f(1) is None"], [Expression("f(1)", expected=None)]),
        (
            ["assert not f(4)", "assert f(5)"],
            [Expression("f(4)", truth=False), Expression("f(5)", truth=True)],
        ),
        (
            {"test_list": ["assert f(1) == 2"], "test_setup_code": "import math"},
            [Expression("f(1)", "import math", expected=2)],
        ),
    ],
)
def test_forms_of_data_sets(tests, cases):
    assert parse(tests) == cases
    assert parse(json.dumps(tests)) == cases


def test_check_of_one_candidate_becomes_expressions():
    test = "METADATA = {'a': 1}\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2)\n"

    assert parse(test, "double") == [
        Expression("candidate(1)", "candidate = double", expected=2),
        Expression("candidate(2)", "candidate = double", truth=True),
    ]


def test_functions_of_pytest_become_expressions():
    test = "from solution import f\n\ndef test_a():\n    assert f(1) == 2\n\ndef test_b():\n    assert f(2) == 4\n"

    assert [case.expression for case in parse(test)] == ["f(1)", "f(2)"]
    assert {case.setup for case in parse(test)} == {"from solution import f"}


@pytest.mark.parametrize(
    "test",
    [
        "for i in range(3): assert f(i) == i",
        "x = f(1)\nassert x == 2",
        "assert abs(f(1) - 0.5) < 1e-6",
        "assert math.isclose(f(1), 0.5)",
        "assert isclose(f(1), 0.5)",
        "from numpy import allclose as close\nassert close(f(1), 0.5)",
        "assert all(f(i) for i in range(3))",
        "assert f(1) == g(2)",
    ],
)
def test_other_code_runs_as_it_stands(test):
    assert parse([test]) == [Assertions(f"\n{test}")]


def test_other_code_with_a_candidate_or_functions_is_told_what_to_call():
    check = "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i\n"

    assert parse(check, "f") == [Assertions(f"\n{check}", "f")]
    assert parse(f"{check}\ncheck(f)", "f") == [Assertions(f"\n{check}\ncheck(f)", "")]
    (case,) = parse("def test_a():\n    x = f(1)\n    assert x == 2\n")
    assert case.functions == ("test_a",)


@pytest.mark.parametrize(
    "case", [*parse({"inputs": ["1"], "outputs": ["SECRET"]}), *parse(["assert f(1) == 'SECRET'"])]
)
def test_what_is_expected_is_not_told(case):
    assert "SECRET" not in json.dumps(case.asked())
    assert "SECRET" not in json.dumps(Call("f", [1], "SECRET").asked())


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "no tests"),
        (7, "expected text, a list or a table"),
        ([7], "expected text or a table"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"arguments": [1], "expected": 2}, "no function"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "does not name it"),
        ({"a": 1}, "the keys a"),
        (
            {"function": "f", "arguments": [], "expected": json.loads("[" * 150 + "]" * 150)},
            "nested more than",
        ),
        ({"test_list": ["assert f(1) == 2"], "setup": "import"}, "in line 1 of a test: 'import'"),
        (["assert f(1) =="], "invalid syntax"),
        ({"inputs": 1, "outputs": 2}, r"object of type 'int' has no len\(\)"),
        ([{"function": "f", "arguments": 5, "expected": 5}], "'int' object is not iterable"),
        (["assert f() == 1\0"], "null bytes"),
        ("[" * 100_000, "nested too deeply"),
        (["assert f(" + "(" * 50_000], "too many nested parentheses|nested too deeply"),
    ],
)
def test_what_has_no_known_form_is_told(tests, message):
    with pytest.raises(BadTests, match=message):
        parse(tests)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("42", "asserts nothing: '42'"),
        ("def f(x):\n    return x", "asserts nothing"),  # a solution where tests should be
        ("x = f(1)\nprint(x)", "asserts nothing"),
        ("def check(candidate):\n    assert candidate(1) == 2", "nothing in the column 'entry_point'"),
        ("def test_a(x):\n    assert f(x) == 2", "nothing calls what asserts"),
        ("class TestF:\n    def test_a(self):\n        assert f(1) == 2", "nothing calls what asserts"),
        ("async def test_a():\n    assert f(1) == 2", "nothing calls what asserts"),
        ("def helper():\n    assert f(1) == 2", "nothing calls what asserts"),
        (
            "class TestF(TestCase):\n    def test_a(self):\n        assert f(1) == 2\n"
            "if __name__ == '__main__':\n    unittest.main()",
            "nothing calls what asserts",
        ),
    ],
)
def test_code_that_every_program_would_pass_is_no_test(test, message):
    with pytest.raises(BadTests, match=message):
        parse([test])


def test_functions_with_arguments_of_parametrize_are_called():
    test = "import pytest\n\n@pytest.mark.parametrize('a, b', [(1, 2)])\ndef test_a(a, b):\n    assert f(a) == b\n"

    (case,) = parse(test)
    assert case.functions == ("test_a",)
    with pytest.raises(BadTests, match="nothing calls what asserts"):
        parse(test.replace("test_a(a, b)", "test_a(a, b, tmp_path)"))


NUMPY = "import numpy as np\nfrom solution import f\nassert np.allclose(f(1), 2.0)"
FIXTURE = "import pytest\n@pytest.fixture\ndef two():\n    return 2\ndef test_a():\n    assert f(1) == 2"


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (NUMPY, "numpy"),
        ("from numpy.linalg import norm\ndef test_a():\n    assert f(1) == 2", "numpy.linalg.norm"),
        ("def check(candidate):\n    import torch\n    assert candidate(1) == 2\ncheck(f)", "torch"),
        ("from .solution import f\nassert f(1) == 2", r"\.solution\.f"),
        (FIXTURE, "pytest.fixture"),
        (
            "from pytest import warns\ndef test_a():\n    with warns(UserWarning):\n        assert f(1) == 2",
            "pytest.warns",
        ),
        ("import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f(1) == 2", "pytest.mark.skip"),
    ],
)
def test_what_a_sandbox_without_packages_cannot_import_is_no_test(test, name):
    with pytest.raises(
        BadTests, match=rf"they use {name}, which the sandbox hides.*readable.*sys\.path in prelude"
    ):
        parse([test], packages=False)
    assert parse([test])


@pytest.mark.parametrize(
    "test",
    [
        "import math, collections.abc\nfrom solution import f\nassert f(1) == 2",
        "try:\n    import numpy\nexcept ImportError:\n    pass\nassert f(1) == 2",
        f"import sys\nsys.path.append('/packages')\n{NUMPY}",
        "import pytest\ndef test_a():\n    with pytest.raises(ValueError) as info: f(1)\n    assert info.type",
        "import pytest\ndef test_a():\n    assert f(1) == pytest.approx(2)\n"
        "if __name__ == '__main__':\n    pytest.main()",
    ],
)
def test_what_a_sandbox_without_packages_can_import_is_a_test(test):
    assert parse([test], packages=False) == parse([test])


@pytest.mark.parametrize(
    "test",
    [
        "import numpy\nnumpy.testing.assert_allclose(f(1), 2.0)",
        "if f(1) != 2:\n    raise ValueError",
        "def run():\n    assert f(1) == g(2)\nrun()",
        "import sys\nif f(1) != 2:\n    sys.exit(1)",
        "with pytest.raises(ValueError):\n    f(1)",
    ],
)
def test_code_that_checks_in_its_own_way_is_a_test(test):
    assert parse([test]) == [Assertions(f"\n{test}")]
