"""Tests of a program, from the forms in which data sets have them.

========================================================================= =====================
form                                                                      seen in
========================================================================= =====================
``{"inputs": [...], "outputs": [...]}``, with ``fn_name``: of a function    APPS, TACO, PRIME
``[{"input": ..., "output": ..., "testtype": "stdin" | "functional"}]``     LiveCodeBench
``{"test_cases": [{"input", "output", "type", "fn_name"}]}``                verification_info
``["assert f(1) == 2", ...]``, or ``{"test_list": ...}``                    MBPP, AceCode
``"def check(candidate): ..."`` and the column ``entry_point``              HumanEval
``"def test_a(): ..."`` with ``from solution import f``                     KodCode, pytest
``[{"stdin", "stdout"}, {"function", "arguments", "expected"}]``            written by hand
========================================================================= =====================

Each may be JSON text. An assertion that compares with a literal, or asserts an expression alone, becomes an
``Expression``: the program returns the value and the engine compares it, so that the program cannot know the expected
value. Other assertions run in the program's process (``Assertions``). Functions ``test_...`` may use the parts of pytest
that are in ``sandbox/inside/pytest_stub.py``.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine_plugin_rewards.sandbox.inside import pytest_stub
from engine_plugin_rewards.sandbox.inside.python_tests import encode

IMPORTABLE = {*sys.stdlib_module_names, "solution", "pytest"}  # by the code of a test
PYTEST = re.compile(r"pytest\.([\w.]+)")
ASSERTING = re.compile(r"assert|check|raises|test|exit", re.IGNORECASE)
JSON_STARTS = ("{", "[")
FUNCTION_NAMES = ("fn_name", "func_name", "function", "entry_point")
LISTS = ("test_cases", "test_list", "tests", "cases")
FORMS = (
    '{"inputs": [...], "outputs": [...]}, {"test_cases": [...]} or a list of {"input", "output"}, {"stdin", "stdout"} or '
    '{"function", "arguments", "expected"}; ["assert f(1) == 2"]; code with functions test_..., or check(candidate) and the '
    "column entry_point"
)
"""For messages; the whole table is above and in docs/code_reward.md."""
SETUPS = ("setup", "test_setup_code", "test_imports")


class _Shown:
    """The base of all cases: ``shown`` names the fields that the program's process gets; never the expected value."""

    kind: ClassVar[str]
    shown: ClassVar[tuple[str, ...]] = ()

    def asked(self) -> dict[str, Any]:
        """Return the fields for the program's process."""
        return {name: getattr(self, name) for name in self.shown}


@dataclass(frozen=True)
class Stdin(_Shown):
    """A test in which the program reads one text and must print another."""

    stdin: str
    stdout: str

    kind = "stdin"


@dataclass(frozen=True)
class Call(_Shown):
    """A test in which a function of the program must return a value."""

    function: str
    arguments: Sequence[Any]
    expected: Any
    also: Sequence[Any] = ()  # further values that count as the expected one

    kind = "call"
    shown = ("function", "arguments")

    def __post_init__(self) -> None:
        """Raise TypeError for a value that cannot be compared."""
        for value in (self.expected, *self.also):
            encode(value)


@dataclass(frozen=True)
class Expression(_Shown):
    """A test in which an expression over the program's names must have a value."""

    expression: str
    setup: str = ""
    expected: Any = None
    truth: bool | None = None  # compare only the value's truth

    kind = "expression"
    shown = ("expression", "setup")


@dataclass(frozen=True)
class Assertions(_Shown):
    """A test of Python code that raises if the program is wrong; it runs in the program's process."""

    test: str
    entry_point: str = ""
    functions: Sequence[str] = ()

    kind = "assert"
    shown = ("test", "entry_point", "functions")


Case = Stdin | Call | Expression | Assertions


class BadTests(ValueError):
    """An error: tests have no known form; the message says what was found."""


def parse(
    tests: Any, entry_point: str | None = None, setup: str | None = None, packages: bool = True
) -> list[Case]:
    """Parse the tests of one row.

    Args:
        tests: in one of the forms above.
        entry_point: the function under test, if ``tests`` does not name it.
        setup: Python code that precedes assertions.
        packages: whether programs can import more than Python's library.

    Raises:
        BadTests: ``tests`` is empty, has no known form, or imports what programs cannot import.
    """
    try:
        cases = list(_cases(tests, entry_point or "", setup or ""))
        hidden = "" if packages else next(filter(None, map(_hidden, cases)), "")
    except BadTests:
        raise
    except (TypeError, ValueError) as exc:  # a number where a list should be; a NUL in code
        raise BadTests(f"{exc}: {_shown(tests)}") from exc
    except (RecursionError, MemoryError) as exc:  # what json and ast raise
        raise BadTests("they are nested too deeply") from exc
    if not cases:
        raise BadTests("there are no tests")
    if hidden:
        raise BadTests(
            f"they use {hidden}, which the sandbox hides. Name the package's folder in [reward.code] readable, and add it "
            "to sys.path in prelude"
        )
    return cases


def _cases(tests: Any, entry_point: str, setup: str) -> Iterator[Case]:
    if isinstance(tests, str) and tests.lstrip().startswith(JSON_STARTS):
        tests = _value(tests)
    if isinstance(tests, str):
        yield from _of_code(tests, entry_point, setup)
        return
    if isinstance(tests, Mapping):
        entry_point = next((str(tests[name]) for name in FUNCTION_NAMES if tests.get(name)), entry_point)
        setup = "\n".join([setup, *(_lines(tests[name]) for name in SETUPS if tests.get(name))]).strip()
        if "inputs" in tests and "outputs" in tests:
            yield from _of_columns(tests["inputs"], tests["outputs"], entry_point)
        elif found := [tests[name] for name in LISTS if name in tests]:
            yield from _cases(found[0], entry_point, setup)
        else:
            yield _of_table(tests, entry_point)
    elif isinstance(tests, Sequence) and not isinstance(tests, bytes):
        for test in tests:
            if isinstance(test, str):
                yield from _of_code(test, entry_point, setup)
            elif isinstance(test, Mapping):
                yield _of_table(test, entry_point)
            else:
                raise BadTests(f"a test is {_shown(test)}; expected text or a table")
    else:
        raise BadTests(f"got {_shown(tests)}; expected text, a list or a table")


def _of_table(test: Mapping[str, Any], entry_point: str) -> Case:
    function = next((str(test[name]) for name in FUNCTION_NAMES if test.get(name)), entry_point)
    if "stdin" in test and "stdout" in test:
        return Stdin(_lines(test["stdin"]), _lines(test["stdout"]))
    if "arguments" in test and "expected" in test:
        if not function:
            raise BadTests(f"a test has arguments and no function: {_shown(test)}")
        return Call(function, list(test["arguments"]), test["expected"])
    if "input" in test and "output" in test:
        kind = str(test.get("testtype") or test.get("type") or "")
        if kind in ("stdin", "stdin_stdout") or not (kind or function):
            return Stdin(_lines(test["input"]), _lines(test["output"]))
        if not function:
            raise BadTests(f"a test of a function does not name it: {_shown(test)}")
        return _call(function, test["input"], test["output"], is_json="testtype" in test)
    raise BadTests(f"a test has the keys {', '.join(map(str, test)) or 'none'}: none of the known forms")


def _of_columns(inputs: Sequence[Any], outputs: Sequence[Any], function: str) -> Iterator[Case]:
    if len(inputs) != len(outputs):
        raise BadTests(f"{len(inputs)} inputs and {len(outputs)} outputs")
    for given, expected in zip(inputs, outputs, strict=True):
        if function:
            yield _call(function, given, expected)
        else:
            yield Stdin(_lines(given), _lines(expected))


def _call(function: str, given: Any, output: Any, is_json: bool = False) -> Call:
    """Return a test of a function from a data set, which may hold the value in a list of length 1.

    Args:
        function: its name.
        given: the arguments.
        output: the value; a text may be the value itself or JSON.
        is_json: a text is always JSON, as in LiveCodeBench.
    """
    expected, also = _value(output), []
    if expected is not output and not is_json:
        also.append(output)
    if isinstance(expected, list) and len(expected) == 1:
        also.append(expected[0])
    return Call(function, _arguments(given), expected, tuple(also))


def _arguments(given: Any) -> list[Any]:
    """Return a list as it is; parse a text as one JSON value a line."""
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines() if line.strip()]
    return list(given) if isinstance(given, Sequence) else [given]


def _value(text: Any) -> Any:
    """Parse a text that is JSON; return any other value as it is."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(value: Any) -> str:
    """Return a text as it is; join the items of a list to lines."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(map(str, value))
    return str(value)


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


# -- assertions ---------------------------------------------------------------


def _of_code(test: str, entry_point: str, setup: str) -> Iterator[Case]:
    """Yield expressions if the engine can judge all assertions of the code, else the code as ``Assertions``."""
    for code in (setup, test):
        try:
            tree = ast.parse(code)
        except SyntaxError as exc:
            raise BadTests(f"{exc.msg} in line {exc.lineno} of a test: {_shown(code)}") from exc
    tree.body = [node for node in tree.body if not _is_main(node)]
    imports: list[str] = []
    found: list[Expression] = []
    if all(_judged(node, entry_point, setup, imports, found) for node in tree.body) and found:
        yield from found
        return
    if not any(_asserts(node) for node in ast.walk(tree)):
        raise BadTests(f"code that asserts nothing: {_shown(test)}")
    functions = tuple(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _is_test(node))
    checks = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    calls = any("check(" in ast.unparse(node) for node in tree.body if isinstance(node, ast.Expr))
    if checks and not (calls or entry_point or functions):
        raise BadTests("code with check(candidate), and nothing in the column 'entry_point'")
    entry_point = entry_point if checks and not calls else ""
    if not (functions or entry_point or any(map(_runs, tree.body))):
        raise BadTests(f"code in which nothing calls what asserts: {_shown(test)}")
    yield Assertions(f"{setup}\n{test}", entry_point, functions)


def _asserts(node: ast.AST) -> bool:
    """Return whether a node may raise for a wrong program."""
    calls = isinstance(node, ast.Call) and ASSERTING.search(ast.unparse(node.func)) is not None
    return calls or isinstance(node, ast.Assert | ast.Raise)


def _runs(node: ast.stmt) -> bool:
    """Return whether a statement of a module does more than define or assign."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    acting = (ast.Assert, ast.Raise, ast.Call)
    return not isinstance(node, defined) and any(isinstance(part, acting) for part in ast.walk(node))


def _is_main(node: ast.stmt) -> bool:
    """Return whether a statement is ``if __name__ == "__main__": ...``, which a test does not run."""
    return isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")


def _is_test(node: ast.stmt) -> bool:
    """Return whether a statement is a test function whose arguments, if any, come from ``parametrize``."""
    if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
        return False
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    names = {name for mark in marks if "parametrize" in mark for name in re.findall(r"\w+", mark)}
    return all(argument.arg in names for argument in node.args.args)


def _hidden(case: Case) -> str:
    """Return what the code of a test imports or uses that a box without packages lacks; "" if it lacks nothing."""
    if isinstance(case, Expression):
        return _hidden_from(case.setup)
    return _hidden_from(case.test) if isinstance(case, Assertions) else ""


@functools.lru_cache(maxsize=256)
def _hidden_from(code: str) -> str:
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if not _is_main(node)]
    if "sys.path" in code or any(isinstance(node, ast.Try) for node in ast.walk(tree)):
        return ""  # the code may find the package, or do without it
    for name in (name for node in ast.walk(tree) for name in _names(node)):
        of_pytest = PYTEST.fullmatch(name)
        if name.partition(".")[0] not in IMPORTABLE or (of_pytest and not _in_stub(of_pytest[1])):
            return name
    return ""


def _names(node: ast.AST) -> list[str]:
    """Return the dotted names that a node imports, or takes from pytest."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    return [name] if PYTEST.fullmatch(name) else []


def _in_stub(name: str) -> bool:
    try:
        operator.attrgetter(name)(pytest_stub)
    except AttributeError:
        return False
    return True


def _judged(
    node: ast.stmt, entry_point: str, setup: str, imports: list[str], found: list[Expression]
) -> bool:
    """Return whether the engine can judge a statement without running it; append its assertions to ``found``."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        imports.append(ast.unparse(node))
        return True
    if isinstance(node, ast.Assert):
        before = "\n".join([setup, *imports]).strip()
        asserted = _expression(node.test, before)
        if asserted is not None:
            found.append(asserted)
        return asserted is not None
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "METADATA":
        return True
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        names = [argument.arg for argument in node.args.args]
        if node.name == "check" and len(names) == 1 and entry_point:
            inner = f"{setup}\n{names[0]} = {entry_point}".strip()
            return all(_judged(line, entry_point, inner, imports, found) for line in node.body)
        if _is_test(node):
            return all(_judged(line, entry_point, setup, imports, found) for line in node.body)
    return False


def _expression(asserted: ast.expr, setup: str) -> Expression | None:
    """Convert ``E == literal``, ``E is literal``, ``E`` or ``not E``; None if the engine could not judge the value."""
    if isinstance(asserted, ast.UnaryOp) and isinstance(asserted.op, ast.Not):
        return Expression(ast.unparse(asserted.operand), setup, truth=False)
    if isinstance(asserted, ast.Constant):
        return Expression("True", setup, truth=True) if asserted.value else None
    if isinstance(asserted, ast.Call) and _calls_the_program(asserted, setup):
        return Expression(ast.unparse(asserted), setup, truth=True)
    if not (isinstance(asserted, ast.Compare) and len(asserted.ops) == 1):
        return None
    left, (operator,), (right,) = asserted.left, asserted.ops, asserted.comparators
    if not isinstance(operator, ast.Eq | ast.Is):
        return None
    for value, literal in ((left, right), (right, left)):
        try:
            expected = ast.literal_eval(literal)
            encode(expected)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return Expression(ast.unparse(value), setup, expected=expected)
    return None


def _calls_the_program(call: ast.Call, setup: str) -> bool:
    """Return whether a call's truth is the program's own answer: of ``f(...)``, not of ``all`` or ``math.isclose``."""
    imports = [node for node in ast.walk(ast.parse(setup)) if isinstance(node, ast.ImportFrom)]
    others = {
        alias.asname or alias.name for node in imports if node.module != "solution" for alias in node.names
    }
    return isinstance(call.func, ast.Name) and call.func.id not in others | {*dir(builtins), *dir(math)}
