"""The reward ``code``: runs the program in a response against the tests of its row.

The program runs in a sandbox (``sandbox``), in a separate process for each test. Where the engine can judge a test
itself, the expected value never enters the sandbox: the engine compares what was printed, or a value that came back as
data.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine_core.errors import ConfigError, EnvironmentProblem, did_you_mean
from engine_plugin_rewards import code_cases
from engine_plugin_rewards.code_cases import Assertions, Case, Stdin
from engine_plugin_rewards.code_options import CodeOptions
from engine_plugin_rewards.code_verdicts import PASSED, verdict
from engine_plugin_rewards.sandbox import tiers
from engine_plugin_rewards.sandbox.box import Box, BoxProblem, Ended

DEFAULT_SHARE, LARGEST_SHARE = 0.5, 0.9  # of the time limit of a sample
LEAST_SECONDS = 0.01
SHOWN_CHARACTERS = 200
FENCE = re.compile(r"(?P<indent>\s*)(?P<ticks>`{3,})(?P<name>[^`]*)")
LANGUAGES = ("python", "python3", "py")  # words after the backticks
NEVER_SHOWN = ("/proc", "/sys", "/dev", "/run")


def make_code(timeout: float, **options: Any) -> Callable[..., dict[str, float | str] | None]:
    """Make the reward function of one worker, with its own sandbox.

    Args:
        timeout: seconds that a sample may take.
        options: the fields of ``CodeOptions``.

    Raises:
        EnvironmentProblem: this machine's sandbox is weaker than `min_isolation`.
        ConfigError: the timeouts contradict each other, or `readable` names what cannot be shown.
    """
    chosen = CodeOptions.model_validate(options)
    return Judge(chosen, total_seconds(chosen, timeout)).score


def make_check(timeout: float, **options: Any) -> Callable[[Mapping[str, Any]], None]:
    """Make the function that checks rows before a run begins; the arguments and errors are those of ``make_code``.

    The function raises LookupError for a row without tests, and ValueError for tests that cannot be used.
    """
    chosen = CodeOptions.model_validate(options)
    total_seconds(chosen, timeout)
    check_readable(chosen.readable)
    tiers.demand(chosen.min_isolation)

    def check(columns: Mapping[str, Any]) -> None:
        """Raise LookupError for a row without tests, ValueError for tests that cannot be used."""
        column = next((name for name in ("tests", "answer") if columns.get(name) is not None), None)
        if column is None:
            raise LookupError(
                "finds no tests: the row has no value in a column 'tests' or 'answer'."
                f'{did_you_mean("tests", [str(name) for name in columns])} Name their column in [data.columns]: answer = "...". '
                f"Forms of tests: {code_cases.FORMS}."
            )
        try:
            parse(chosen, columns[column], columns.get("entry_point"), columns.get("test_setup"))
        except code_cases.BadTests as error:
            raise ValueError(
                f"cannot use the tests in column '{column}': {error}. Forms of tests: {code_cases.FORMS}."
            ) from None

    return check


def parse(chosen: CodeOptions, tests: Any, entry_point: str | None, setup: str | None) -> list[Case]:
    """Parse the tests of one row; see ``code_cases.parse``.

    Raises:
        BadTests: the tests cannot be used.
    """
    packages = "sys.path" in chosen.prelude + chosen.template
    return code_cases.parse(tests, entry_point, setup, packages)


def total_seconds(chosen: CodeOptions, timeout: float) -> float:
    """Return the seconds for all tests of a response.

    Raises:
        ConfigError: they leave too little of ``timeout``, the seconds that a sample may take.
    """
    total = timeout * DEFAULT_SHARE if chosen.total_timeout_seconds is None else chosen.total_timeout_seconds
    if total > timeout * LARGEST_SHARE:
        raise ConfigError(
            f"[reward.code] total_timeout_seconds = {total:g} is more than nine tenths of timeout_seconds = {timeout:g} "
            "of the [[reward]], so a slow program would count as a failure of the reward. Raise timeout_seconds."
        )
    return total


def check_readable(paths: Sequence[str], key: str = "[reward.code] readable") -> None:
    """Raise ``ConfigError``, which names ``key``, for a path that does not exist, or that would open the sandbox."""
    for path in paths:
        said, real = f"{key}: '{path}'", os.path.realpath(path)
        if not os.path.exists(path):
            raise ConfigError(f"{said} does not exist on this machine.")
        if real == "/" or any(f"{real}/".startswith(f"{open_}/") for open_ in NEVER_SHOWN):
            raise ConfigError(
                f"{said} is {real if real != path else 'what no program may see'}: what processes, devices and all users keep lies there. "
                "Name the folder of a package or of data."
            )


class Judge:
    """A judge of programs, with a sandbox in which it runs them.

    Args:
        options: the reward's options.
        total_timeout_seconds: time limit for all tests of one response.

    Raises:
        EnvironmentProblem: the sandbox does not start, or is weaker than `min_isolation`.
        ConfigError: `readable` names what cannot be shown.
    """

    def __init__(self, options: CodeOptions, total_timeout_seconds: float) -> None:
        self.options, self.total_timeout_seconds = options, total_timeout_seconds
        check_readable(options.readable)
        self.tier = tiers.demand(options.min_isolation)
        try:
            self.box = Box(self.tier, options.readable, options.memory_mb, options.output_kb, options.disk_mb)
        except (BoxProblem, OSError) as exc:
            raise EnvironmentProblem(f"[reward.code] The sandbox cannot be started: {exc}.") from exc

    def score(
        self,
        completion: str,
        tests: Any = None,
        answer: Any = None,
        entry_point: str | None = None,
        test_setup: str | None = None,
    ) -> dict[str, float | str] | None:
        """Return the share of the tests that pass, or 1 and 0; None for a row without tests.

        ``pred`` counts the verdicts.

        Args:
            completion: the response.
            tests: the tests, in a form of ``code_cases``.
            answer: the tests, if there is no column ``tests``.
            entry_point: the function that assertions are about.
            test_setup: Python code before assertions.

        Raises:
            BadTests: the tests have no known form.
        """
        given = tests if tests is not None else answer
        if given is None:
            return None
        cases = parse(self.options, given, entry_point, test_setup)[: self.options.max_tests or None]
        program = extract(completion, self.options.block)
        if program is None:
            return {"score": 0.0, "pred": "no program"}
        options = self.options
        source = options.template.replace("{code}", program)
        source = f"{options.prelude}\n{source}" if options.prelude else source
        return self._judge(source, cases)

    def _judge(self, source: str, cases: Sequence[Case]) -> dict[str, float | str]:
        deadline = time.monotonic() + self.total_timeout_seconds
        verdicts: list[str] = []
        first = ""
        for case in cases:
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS or (self.options.score == "all" and verdicts and verdicts[-1] != PASSED):
                verdicts.append("not run")
                continue
            found, ended = self._try(source, case, min(left, self.options.test_timeout_seconds))
            verdicts.append(found)
            if found != PASSED and not first:
                first = f"; test {len(verdicts)}: {found} {_last_line(ended.errors)}".rstrip()
        passed = verdicts.count(PASSED)
        score = passed / len(cases) if self.options.score == "share" else float(passed == len(cases))
        counts = ", ".join(f"{count} {name}" for name, count in Counter(verdicts).items())
        return {"score": score, "pred": counts + first}

    def _try(self, source: str, case: Case, seconds: float) -> tuple[str, Ended]:
        nonce = secrets.token_hex(16) if isinstance(case, Assertions) else ""
        what = {"kind": case.kind, "source": source, "nonce": nonce, **case.asked()}
        stdin = case.stdin.encode() if isinstance(case, Stdin) else b""
        ended = self.box.run(what, stdin, seconds)
        return verdict(case, ended, self.options.tolerance, nonce), ended


def _last_line(errors: bytes) -> str:
    """Return the last line of a program's stderr, as text that is safe to show."""
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    return "".join(c if c.isprintable() else "?" for line in last for c in line[:SHOWN_CHARACTERS])


def extract(completion: str, block: str) -> str | None:
    """Return the program in a response; None if it contains none.

    Blocks that say they are Python take precedence over those that say nothing; others are ignored. As in Markdown, a
    block ends at a line of at least as many backticks as its first fence, whose indentation its lines lose.

    Args:
        completion: the response.
        block: ``last`` or ``first`` fenced block, or ``whole``.
    """
    if block == "whole":
        return completion
    found: dict[bool, list[str]] = {True: [], False: []}
    begun: re.Match[str] | None = None
    lines: list[str] = []
    for line in completion.splitlines():
        fence = FENCE.fullmatch(line)
        if begun is None:
            begun, lines = fence, []
        elif fence and not fence["name"].strip() and len(fence["ticks"]) >= len(begun["ticks"]):
            name = begun["name"].strip().lower()
            if name in LANGUAGES or not name:
                found[bool(name)].append(_without_indent(lines, len(begun["indent"])))
            begun = None
        else:
            lines.append(line)
    chosen = found[True] or found[False]
    return None if not chosen else chosen[0 if block == "first" else -1]


def _without_indent(lines: Sequence[str], most: int) -> str:
    """Remove the indentation of the first line of text, at most ``most`` characters, from all lines of a block."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    first = next((indent for line, indent in zip(lines, indents, strict=True) if line.strip()), 0)
    return "\n".join(line[min(first, most, indent) :] for line, indent in zip(lines, indents, strict=True))


def health() -> str:
    """Return the tier of the sandbox, for ``engine doctor``.

    Raises:
        EnvironmentProblem: it is weaker than the default of `min_isolation`.
    """
    tiers.demand(CodeOptions().min_isolation)
    return tiers.health()
