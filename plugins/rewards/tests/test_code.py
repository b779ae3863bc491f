"""The reward ``code``: its values, its refusals, and that a program cannot give itself a better one."""

import textwrap

import pytest

from engine_core.config.rewards import RewardConfig
from engine_core.errors import ConfigError, EnvironmentProblem
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_plugin_rewards.code import Judge, extract, make_code
from engine_plugin_rewards.code_cases import BadTests
from engine_plugin_rewards.code_options import CodeOptions
from engine_plugin_rewards.sandbox import tiers
from engine_plugin_rewards.sandbox.box import BoxProblem
from engine_plugin_testing import RewardSuite

ADD = {"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [3, 10]}
LOOP = "for a in range(3):\n    for b in range(3):\n        assert add(a, b) == a + b"
STYLES = {
    "call": ADD,
    "expression": ["assert add(1, 2) == 3", "assert add(5, 5) == 10"],
    "truth": ["assert add(1, 2)", "assert not add(5, -5)"],
    "assert": [LOOP],
    "check": [f"def check(candidate):\n{textwrap.indent(LOOP.replace('add', 'candidate'), '    ')}"],
}


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


class TestCode(RewardSuite):
    name = "code"
    worker_context = "forked_children:forked"
    examples = [
        (
            {"completion": fenced("print(int(input()) + 1)"), "tests": {"inputs": ["1"], "outputs": ["2"]}},
            1.0,
        ),
        ({"completion": fenced("def add(a, b): return 3"), "tests": ADD}, 0.5),
        ({"completion": "no program", "tests": ADD}, 0.0),
        ({"completion": fenced("def add(a, b): return a + b"), "tests": None, "answer": LOOP}, 1.0),
        ({"completion": "", "tests": None}, None),
    ]


@pytest.fixture(scope="module")
def judge():
    """Return ``judge(program, tests)``: the share of the tests that pass, and the report."""
    made = Judge(
        CodeOptions(block="whole", test_timeout_seconds=4.0), 30.0
    )  # other tests keep the machine busy

    def score(program, tests, **columns):
        result = made.score(program, tests, **columns)
        return result["score"], result["pred"]

    yield score
    made.box.close()


@pytest.mark.parametrize("style", STYLES)
def test_right_and_wrong_programs_in_every_style(judge, style):
    columns = {"entry_point": "add"} if style == "check" else {}

    assert judge("def add(a, b): return a + b", STYLES[style], **columns)[0] == 1.0
    assert judge("def add(a, b): return a * b + 1000", STYLES[style], **columns)[0] < 1.0
    assert judge("def sub(a, b): return a - b", STYLES[style], **columns)[0] == 0.0
    assert judge("class Solution:\n  def add(self, a, b): return a + b", ADD)[0] == 1.0


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("def f(text): return text[::-1]", 1.0),
        ("def f(text): return int(text[::-1])", 0.5),  # the text may be JSON, too
        ("def f(text): return text", 0.0),
    ],
)
def test_a_text_that_a_function_must_return_may_look_like_json(judge, program, score):
    tests = {"fn_name": "f", "inputs": [["21"], ["]1["]], "outputs": ["12", "[1]"]}
    assert judge(program, tests)[0] == score


PYTEST = """
import pytest
from solution import root


def test_a():
    with pytest.raises(ValueError, match="negative"):
        root(-1)


def test_b():
    assert root(2) == pytest.approx(1.4142136)


@pytest.mark.parametrize("square, side", [(4, 2), (9, 3)])
def test_c(square, side):
    assert root(square) == side


if __name__ == "__main__":
    pytest.main()
"""
ROOT = """
def root(x):
    if x < 0:
        raise ValueError("negative")
    return x ** 0.5
"""


@pytest.mark.parametrize(
    ("program", "score", "said"),
    [
        (ROOT, 1.0, "1 passed"),
        (ROOT.replace("ValueError", "TypeError"), 0.0, "1 error; test 1: error TypeError: negative"),
        (
            ROOT.replace("negative", "no"),
            0.0,
            "1 error; test 1: error AssertionError: 'negative' is not in 'no'",
        ),
        (ROOT.replace("raise", "return"), 0.0, "1 error; test 1: error pytest_stub.Failed: DID NOT RAISE"),
        (ROOT.replace("0.5", "0.51"), 0.0, "1 error; test 1: error AssertionError"),
        (ROOT.replace("return x", "return 3 if x == 4 else x"), 0.0, "1 error; test 1: error AssertionError"),
    ],
)
def test_a_test_may_use_what_pytest_offers_to_functions(judge, program, score, said):
    found, report = judge(program, PYTEST)
    assert (found, report[: len(said)]) == (score, said)


def test_a_test_that_imports_a_hidden_package_fails_its_sample(judge):
    with pytest.raises(BadTests, match="they use numpy, which the sandbox hides"):
        judge("x = 1", ["import numpy\nassert numpy.sum(x) == 1"])


FORGERIES = {
    "exit": "import os\nos._exit(0)",
    "exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "system exit": "raise SystemExit(0)",
    "prints": "print('passed', 3, 10)\nprint('{\"value\": 3}')\ndef add(a, b): pass",
    "an object that equals everything": """
class Any:
    def __eq__(self, other): return True
    def __bool__(self): return True
    def __int__(self): return 3
def add(a, b): return Any()
""",
    "a list that equals everything": """
class Any(list):
    def __eq__(self, other): return True
def add(a, b): return Any()
""",
    "patched comparison and assertion": """
import builtins, operator
builtins.AssertionError = None
operator.eq = lambda a, b: True
builtins.all = builtins.any = builtins.bool = lambda *a: True
def add(a, b): return None
""",
    "patched encoder and streams": """
import sys, json, os
for module in list(sys.modules.values()):
    if hasattr(module, "encode") and hasattr(module, "tell"):
        module.encode = lambda value, depth=0: "passed"
json.dumps = lambda *a, **k: '{"value": true, "passed": true}'
def add(a, b): return None
""",
    "invented lines on every descriptor": """
import os
for number in range(1, 64):
    try:
        os.write(number, b'{"passed": true, "score": 1}\\n{"value": "3"}\\n')
    except OSError:
        pass
os._exit(0)
""",
    "exit handlers and threads": """
import atexit, os, threading
atexit.register(os._exit, 0)
threading.Thread(target=os._exit, args=(0,)).start()
def add(a, b): return None
""",
    "looks for what is expected": """
import gc, sys
def add(a, b):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [v for k, v in frame.f_locals.items() if "expected" in k or "output" in k]
        frame = frame.f_back
    found = [o for o in gc.get_objects() if isinstance(o, dict) and ("expected" in o or "outputs" in o)]
    return (seen or [d.get("expected", d.get("outputs")) for d in found] or [None])[0]
""",
}


@pytest.mark.parametrize("style", ["call", "expression"])
@pytest.mark.parametrize("name", FORGERIES)
def test_what_the_engine_compares_cannot_be_forged(judge, style, name):
    score, said = judge(FORGERIES[name], STYLES[style])

    assert (score, "passed" in said.split(";")[0]) == (0.0, False)


@pytest.mark.parametrize(
    "name", ["exit", "exit in the function", "system exit", "prints", "exit handlers and threads"]
)
def test_assertions_in_the_program_s_process_must_come_to_their_end(judge, name):
    assert judge(FORGERIES[name], [LOOP])[0] == 0.0


def test_the_truth_of_an_object_is_not_asked(judge):
    always = "class Yes:\n  def __bool__(self): return True\ndef add(a, b): return Yes()"

    assert judge(always, STYLES["truth"])[0] == 0.0
    assert judge("def add(a, b): return True", STYLES["truth"])[0] == 0.5


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("while True: pass", "1 timeout; test 1: timeout"),
        ("while True: print('x' * 1000)", "1 too much output; test 1: too much output"),
        ("x = bytearray(10 ** 10)", "1 error; test 1: error MemoryError"),
        ("import ctypes; ctypes.string_at(0)", "1 crashed; test 1: crashed"),
        ("1 / 0", "1 error; test 1: error ZeroDivisionError: division by zero"),
        ("def f(:", "1 error; test 1: error SyntaxError: invalid syntax"),
        ("\x00", "1 error; test 1: error"),
        ("print(\ud800)", "1 error; test 1: error"),
        ("import os; os.fork()", "1 error; test 1: error PermissionError: [Errno 1] Operation not permitted"),
        ("print(1)", "1 wrong; test 1: wrong"),
        ("", "1 wrong; test 1: wrong"),
        ("import sys; sys.exit('\\x1b[2J')", "1 error; test 1: error ?[2J"),
        ("print(2)", "1 passed"),
    ],
)
def test_the_verdict_says_what_happened(judge, program, said):
    assert judge(program, [{"stdin": "", "stdout": "2"}])[1].startswith(said)


def made(**options):
    return Judge(CodeOptions(block="whole", test_timeout_seconds=4.0, **options), 30.0)


def test_all_or_nothing_stops_at_the_first_failure():
    judge = made(score="all")
    tests = [{"stdin": str(i), "stdout": str(i)} for i in range(4)]

    assert judge.score("print(input())", tests) == {"score": 1.0, "pred": "4 passed"}
    result = judge.score("print(min(1, int(input())))", tests)
    assert result == {"score": 0.0, "pred": "2 passed, 1 wrong, 1 not run; test 3: wrong"}
    judge.box.close()


def test_tests_that_the_total_time_does_not_reach_have_failed():
    judge = Judge(CodeOptions(block="whole", test_timeout_seconds=0.4), 1.0)
    result = judge.score("while True: pass", [{"stdin": "", "stdout": ""}] * 20)

    assert result["score"] == 0.0
    assert "not run" in result["pred"]
    judge.box.close()


def test_prelude_template_and_number_of_tests():
    judge = made(
        prelude="from typing import *", template="def f(xs: List[int]):\n    return {code}", max_tests=1
    )
    tests = [
        {"function": "f", "arguments": [[1, 2]], "expected": 3},
        {"function": "f", "arguments": [[]], "expected": 1},
    ]

    assert judge.score("sum(xs)", tests) == {"score": 1.0, "pred": "1 passed"}
    assert judge.score("0)\nprint(", tests)["score"] == 0.0
    judge.box.close()


@pytest.mark.parametrize(
    ("text", "block", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", "last", "b"),
        ("```python\na\n```\n```py\nb\n```", "first", "a"),
        ("```\na\n```\n```text\nb\n```", "last", "a"),
        ("```python\na\n```\n```\nb\n```", "last", "a"),
        ("```python\n  a\n\n  b\n```", "last", "  a\n\n  b"),
        ("```python\na", "last", None),
        ("a", "last", None),
        ("a", "whole", "a"),
        ("", "last", None),
        ("  ```Python\na\n  ```", "last", "a"),
        ("```python\n```", "last", ""),
        ("1. So:\n   ```python\n   if a:\n       b\n\n     \n   ```", "last", "if a:\n    b\n\n  "),
        ("  ```\n\n  a('\\\nb')\n```", "last", "\na('\\\nb')"),
        ("    ```python\nif a:\n    b\n    ```", "last", "if a:\n    b"),  # only the fence is indented
        ("````python\na\n````", "last", "a"),
        ("````python\n'a\n```\nb\n```'\n```\n`````", "last", "'a\n```\nb\n```'\n```"),
        ("````python\na\n```", "last", None),
        ("```a```\n```python\nb\n```", "last", "b"),
    ],
)
def test_the_program_is_a_fenced_block(text, block, program):
    assert extract(text, block) == program


# -- refusals -----------------------------------------------------------------


def test_tests_of_no_known_form_fail_their_sample_alone(judge):
    with pytest.raises(BadTests, match="none of the known forms"):
        judge("x = 1", {"a": 1})
    assert judge("def add(a, b): return a + b", ADD)[0] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "x"}, "template must contain {code} once"),
        ({"readable": ["data"]}, "'data' must be absolute"),
        ({"min_isolation": "docker"}, "'limits', 'landlock' or 'namespaces'"),
        ({"memory_mb": 1}, "greater than or equal to 64"),
        ({"language": "c"}, "Extra inputs"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CodeOptions(**options)


def test_times_that_do_not_fit_are_refused():
    with pytest.raises(
        ConfigError, match=r"total_timeout_seconds = 9.5 is more than nine tenths of timeout_seconds = 10"
    ):
        make_code(10.0, total_timeout_seconds=9.5)


def runner(tmp_path, options, **settings):
    plugins = PluginSet.load({"rewards": ["code"]}, (), root=tmp_path)
    config = RewardConfig(name="code", options=CodeOptions(**options), timeout_seconds=20.0, **settings)
    return RewardRunner([config], plugins)


def test_a_run_that_demands_more_than_the_machine_has_does_not_start(monkeypatch):
    monkeypatch.setattr(tiers, "strongest", lambda: ("limits", {"landlock": "none"}))
    with pytest.raises(EnvironmentProblem, match=r"min_isolation = 'landlock', but this machine has only"):
        make_code(10.0, min_isolation="landlock")


def test_a_box_that_cannot_be_started_is_the_machine_s_problem(monkeypatch):
    def start(self):
        raise BoxProblem("no memory")

    tier = tiers.demand("limits")
    monkeypatch.setattr(tiers, "demand", lambda least: tier)
    monkeypatch.setattr("engine_plugin_rewards.sandbox.box.Box._start", start)
    with pytest.raises(EnvironmentProblem, match=r"cannot be started: no memory"):
        Judge(CodeOptions(), 8.0)


def test_programs_that_hang_cost_their_time_and_no_worker(tmp_path):
    rewards = runner(tmp_path, {"test_timeout_seconds": 1.0}, workers=2)
    completions = [fenced("while True: pass"), fenced("def add(a, b): return a + b")] * 4
    try:
        rewards.ask(
            {"code": {"completion": completions, "tests": [ADD] * 8}}, 8, lambda *f: pytest.fail(str(f))
        )
        assert [outcome.value for outcome in rewards.scorers[0].runner.outcomes] == [0.0, 1.0] * 4
        assert rewards.pools[0].restarts == 0
    finally:
        rewards.close()
