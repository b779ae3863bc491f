"""The reward ``code``: runs the program in a response against the tests of its row.

The program runs in a sandbox (``sandbox``), in a separate process for each test. Where the engine can judge a test
itself, the expected value never enters the sandbox: the engine compares what was printed, or a value that came back as
data.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EnvironmentProblem, PluginError, did_you_mean
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_rewards import code_cases
from engine_plugin_rewards.code_cases import Assertions, Case, Stdin
from engine_plugin_rewards.code_options import CodeOptions
from engine_plugin_rewards.code_verdicts import PASSED, verdict
from engine_plugin_rewards.sandbox import tiers
from engine_plugin_rewards.sandbox.box import Box, BoxProblem, Ended, Limits

if TYPE_CHECKING:
    from engine_plugin_rewards.code_languages import Language

DEFAULT_SHARE, LARGEST_SHARE = 0.5, 0.9  # of the time limit of a sample
LEAST_SECONDS = 0.01
SHOWN_CHARACTERS = 200
FENCE = "```"
NEVER_SHOWN = ("/proc", "/sys", "/dev", "/run")


def make_code(
    timeout: float, modules: Sequence[str], root: Path, allow_code: bool, **options: Any
) -> Callable[..., dict[str, float | str] | None]:
    """Make the reward function of one worker, with its own sandbox.

    Args:
        timeout: seconds that a sample may take.
        modules: the run file's plugins, which may offer the language.
        root: folder of the run file.
        allow_code: plugin files outside of ``root`` are allowed.
        options: the fields of ``CodeOptions``.

    Raises:
        EnvironmentProblem: this machine's sandbox is weaker than `min_isolation`.
        ConfigError: the timeouts contradict each other.
        PluginError: no plugin offers the language.
    """
    chosen = CodeOptions.model_validate(options)
    total, language = settled(chosen, timeout, modules, root, allow_code)
    return Judge(chosen, language, total).score


def settled(
    chosen: CodeOptions, timeout: float, modules: Sequence[str], root: Path, allow_code: bool
) -> tuple[float, Language]:
    """Return the seconds for all tests of a response, and the language. The arguments are those of ``make_code``.

    Raises:
        ConfigError: the timeouts contradict each other.
        PluginError: no plugin offers the language.
    """
    total = timeout * DEFAULT_SHARE if chosen.total_timeout_seconds is None else chosen.total_timeout_seconds
    if total > timeout * LARGEST_SHARE:
        raise ConfigError(
            f"[reward.code] total_timeout_seconds = {total:g} is more than nine tenths of timeout_seconds = {timeout:g} "
            "of the [[reward]], so a slow program would count as a failure of the reward. Raise timeout_seconds."
        )
    try:
        plugins = PluginSet.load({"code_languages": [chosen.language]}, modules, root, allow_code)
    except PluginError as error:
        raise PluginError(f"[reward.code] language = '{chosen.language}': {error}") from None
    return total, plugins.resolve("code_languages", chosen.language)()


def least_tier(options: CodeOptions, language: Language) -> str:
    """Return the weakest tier that satisfies the options and the language.

    Raises:
        ConfigError: the options do not suit the language, or show what no sandbox may show.
    """
    for path in options.readable:
        _check_shown(path)
    if language.file is None:
        return options.min_isolation
    if options.disk_mb == 0:
        raise ConfigError(f"[reward.code] disk_mb = 0, but language '{options.language}' needs files.")
    if language.build and options.max_processes == 1:
        raise ConfigError(
            f"[reward.code] max_processes = 1, but language '{options.language}' is compiled by other processes. "
            "Set 16 or so."
        )
    return max(options.min_isolation, "namespaces", key=tiers.TIERS.index)


def _check_shown(path: str) -> None:
    """Raise ``ConfigError`` for a path of ``readable`` that does not exist, or that would open the sandbox."""
    said = f"[reward.code] readable: '{path}'"
    if not os.path.exists(path):
        parent = os.path.dirname(path.rstrip("/"))
        siblings = os.listdir(parent) if os.path.isdir(parent) else []
        known = did_you_mean(os.path.basename(path.rstrip("/")), siblings)
        raise ConfigError(f"{said} does not exist on this machine.{known.partition(' Known:')[0]}")
    real = os.path.realpath(path)
    if real == "/" or any(f"{real}/".startswith(f"{open_}/") for open_ in NEVER_SHOWN):
        raise ConfigError(
            f"{said} is {real if real != path else 'what no program may see'}: what processes, devices and all users keep lies there. "
            "Name the folder of a package or of data."
        )


class Judge:
    """A judge of programs, with a sandbox in which it runs them.

    Args:
        options: the reward's options.
        language: the programs' language.
        total_timeout_seconds: time limit for all tests of one response.

    Raises:
        EnvironmentProblem: the sandbox does not start, or is weaker than `min_isolation`.
    """

    def __init__(self, options: CodeOptions, language: Language, total_timeout_seconds: float) -> None:
        self.options, self.language, self.total_timeout_seconds = options, language, total_timeout_seconds
        self.tier = tiers.demand(least_tier(options, language))
        limits = Limits(
            memory_mb=options.memory_mb,
            output_kb=options.output_kb,
            disk_mb=options.disk_mb,
            processes=options.max_processes,
        )
        shows = (*options.readable, *language.shows)
        try:
            self.box = Box(self.tier, limits, shows, executing=language.file is not None)
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
        cases = code_cases.parse(given, entry_point, test_setup)
        cases = cases[: self.options.max_tests or None]
        check_kinds(cases, self.options.language, self.language)
        program = extract(completion, self.options.block, self.language.fences)
        if program is None:
            return {"score": 0.0, "pred": "no program"}
        options = self.options
        source = options.template.replace("{code}", program)
        source = f"{options.prelude}\n{source}" if options.prelude else source
        return self._judge(source, cases)

    def _judge(self, source: str, cases: Sequence[Case]) -> dict[str, float | str]:
        deadline = time.monotonic() + self.total_timeout_seconds
        verdicts, first = [], ""
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
        what = {"kind": case.kind, "source": source, **case.asked()}
        nonce = secrets.token_hex(16) if isinstance(case, Assertions) else ""
        if nonce:
            what["nonce"] = nonce
        if self.language.file is not None:
            what |= {
                "kind": "command",
                "file": self.language.file,
                "build": self.language.build,
                "run": self.language.run,
            }
        stdin = case.stdin.encode() if isinstance(case, Stdin) else b""
        ended = self.box.run(what, stdin, seconds)
        return verdict(case, ended, self.options.tolerance, nonce), ended


def check_kinds(cases: Sequence[Case], name: str, language: Language) -> None:
    """Raise for tests that programs of a language cannot run.

    Raises:
        BadTests: a test is of a kind that the language does not have.
    """
    for case in cases:
        if case.kind not in language.kinds:
            raise code_cases.BadTests(f"language '{name}' has no tests of kind '{case.kind}'")


def _last_line(errors: bytes) -> str:
    """Return the last line of a program's stderr, as text that is safe to show."""
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    return "".join(c if c.isprintable() else "?" for line in last for c in line[:SHOWN_CHARACTERS])


def extract(completion: str, block: str, fences: Collection[str]) -> str | None:
    """Return the program in a response; None if it contains none.

    Args:
        completion: the response.
        block: ``last`` or ``first`` fenced block, or ``whole``.
        fences: names of the language. Blocks with such a name take precedence over those without a name; others are
            ignored.
    """
    if block == "whole":
        return completion
    found: dict[bool, list[str]] = {True: [], False: []}
    name, lines = None, []
    for line in completion.splitlines():
        mark = line.strip()
        if name is None:
            if mark.startswith(FENCE):
                name, lines = mark.lstrip("`").strip().lower(), []
        elif mark == FENCE:
            if name in fences or not name:
                found[bool(name)].append("\n".join(lines))
            name = None
        else:
            lines.append(line)
    chosen = found[True] or found[False]
    return None if not chosen else chosen[0 if block == "first" else -1]


def health() -> str:
    """Return the tier of the sandbox, for ``engine doctor``.

    Raises:
        EnvironmentProblem: it is weaker than the default of `min_isolation`.
    """
    tiers.demand(CodeOptions().min_isolation)
    return tiers.health()
