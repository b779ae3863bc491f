"""Mutations of the source against the conformance kit: which small faults does no contract catch?

    python benchmarks/mutations/run.py --out results                       # a sample of every target
    python benchmarks/mutations/run.py --out results --targets hf --each 5 # a small one
    python benchmarks/mutations/run.py --out results --again               # the survivors of the last run

Each fault is made in a copy of the repository, never in the working tree, and runs its suites in a fresh process until
a contract fails. `results/outcomes.jsonl` gets a line for each, `results/table.md` the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from operators import Mutation, mutations_of
from targets import SUITES, TARGETS, unit_tests

ROOT = Path(__file__).parents[2]
MOST_BROKEN = 8  # tests that may fail without a mutation, such as those of a missing package
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
COMMAND = ["-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", ""]


def chosen(target: str, count: int, seed: int) -> list[tuple[str, Mutation]]:
    """Return a random sample of the mutations of a target, at most one for each line."""
    found: dict[tuple[str, int], list[Mutation]] = {}
    for file in TARGETS[target]:
        for mutation in mutations_of(file, (ROOT / file).read_bytes()):
            found.setdefault((file, mutation.line), []).append(mutation)
    draw = random.Random(f"{seed}/{target}")
    lines = draw.sample(sorted(found), min(count, len(found)))
    return [(target, draw.choice(found[line])) for line in lines]


def key(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells mutations apart."""
    return tuple(fields[name] for name in ("file", "start", "end", "text"))


def copy_tree(folder: Path) -> Path:
    """Copy what the suites need into a folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for part in ("engine_core", "plugins", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for part in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / part, folder / part)
    return folder


def run(tree: Path, arguments: list[str], seconds: float) -> tuple[str, str]:
    """Run Python in a copy; return ("", ""), or the first failed test (or "timeout") and the last lines."""
    paths = [tree, *sorted(tree.glob("plugins/*/src")), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    env |= {"ENGINE_TEST_FORK": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tree / "tmp")}
    (tree / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:  # fmt: skip
        late = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        said = process.stdout.read() if process.stdout else ""
        process.wait()
        late.cancel()
    shutil.rmtree(tree / "tmp", ignore_errors=True)
    if process.returncode == -signal.SIGKILL:
        return "timeout", said[-2000:]
    if process.returncode in (0, 5):  # 5: no test
        return "", ""
    return " ".join(FAILED.findall(said)) or f"exit {process.returncode}", said[-2000:]


def broken_suites(
    trees: SimpleQueue[Path], names: set[str], pool: ThreadPoolExecutor, seconds: float
) -> list[str]:
    """Run the suites on unchanged source; return the tests that fail here, which can catch nothing."""

    def one(name: str) -> list[str]:
        tree, (test, contracts) = trees.get(), SUITES[name]
        try:
            return run(tree, [*COMMAND, "-k", contracts, test], seconds)[0].split()
        finally:
            trees.put(tree)

    return sorted({test for found in pool.map(one, sorted(names)) for test in found})


def outcome_of(
    tree: Path, target: str, mutation: Mutation, without: list[str], arguments: argparse.Namespace
) -> dict[str, object]:
    """Run the suites on one fault, then, if it survives, its unit tests."""
    path, command = tree / mutation.file, [*COMMAND, "-x", *(f"--deselect={test}" for test in without)]
    source = (ROOT / mutation.file).read_bytes()
    found = {"target": target, "file": mutation.file, "line": mutation.line, "what": mutation.what}
    found |= {"start": mutation.start, "end": mutation.end, "text": mutation.text, "caught": "", "unit": ""}
    path.write_bytes(mutation.apply(source))
    try:
        module = re.sub(r"^plugins/\w+/src/", "", mutation.file).removesuffix(".py").replace("/", ".")
        if mutation.at_import and run(tree, ["-c", f"import {module}"], 120)[0]:
            return {**found, "caught": "import"}
        for suite in TARGETS[target][mutation.file]:
            test, contracts = SUITES[suite]
            failed, lines = run(tree, [*command, "-k", contracts, test], arguments.timeout)
            if failed:
                return {**found, "caught": failed.partition("::")[2] or failed, "lines": lines[-600:]}
        if not arguments.no_units and (tests := sorted(map(str, tree.glob(unit_tests(mutation.file))))):
            found["unit"] = run(tree, [*command, *tests], arguments.timeout)[0].rpartition("/")[2]
        return found
    finally:
        path.write_bytes(source)


def table(outcomes: list[dict]) -> str:
    """Return the result as Markdown: the counts by target, then the survivors."""
    lines = ["| target | mutants | import fails | caught | survived | of them caught by unit tests |"]
    lines += ["|---|---|---|---|---|---|"]
    for target in dict.fromkeys(outcome["target"] for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome["target"] == target]
        broken = sum(outcome["caught"] == "import" for outcome in mine)
        left = [outcome for outcome in mine if not outcome["caught"]]
        units = sum(bool(outcome["unit"]) for outcome in left)
        lines.append(
            f"| {target} | {len(mine)} | {broken} | {len(mine) - broken - len(left)} | {len(left)} | {units} |"
        )
    lines += ["", "| place | mutation | caught by | unit test |", "|---|---|---|---|"]
    for outcome in sorted(
        outcomes, key=lambda outcome: (bool(outcome["caught"]), outcome["file"], outcome["line"])
    ):
        place = f"{outcome['file'].split('/src/')[-1]}:{outcome['line']}"
        caught = outcome["caught"] or "SURVIVED"
        lines.append(f"| {place} | {outcome['what']} | {caught} | {outcome['unit']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of outcomes.jsonl and table.md")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--each", type=int, default=30, help="mutations of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one suite")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--no-units", action="store_true", help="do not run unit tests on survivors")
    parser.add_argument("--again", action="store_true", help="run the survivors of outcomes.jsonl once more")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = arguments.out / "outcomes.jsonl"
    before = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    sample = [pair for target in arguments.targets for pair in chosen(target, arguments.each, arguments.seed)]
    last = {key(outcome): outcome for outcome in before}
    if arguments.again:
        sample = [(t, m) for t, m in sample if not last.get(key(vars(m)), {"caught": "not run"})["caught"]]
    else:
        sample = [(t, m) for t, m in sample if key(vars(m)) not in last]
    random.Random(arguments.seed).shuffle(sample)
    trees: SimpleQueue[Path] = SimpleQueue()
    start, lock = time.monotonic(), threading.Lock()
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        for number in range(arguments.jobs):
            trees.put(copy_tree(Path(folder) / str(number)))

        names = {suite for target, mutation in sample for suite in TARGETS[target][mutation.file]}
        without = broken_suites(trees, names, pool, arguments.timeout)
        print("Fail without a mutation:", *without or ["none"], flush=True)
        if len(without) > MOST_BROKEN:
            return 1

        def one(pair: tuple[str, Mutation]) -> None:
            if (begun := time.monotonic()) - start > arguments.until:
                return
            tree = trees.get()
            try:
                outcome = outcome_of(tree, *pair, without, arguments)
            finally:
                trees.put(tree)
            outcome["seconds"] = round(time.monotonic() - begun)
            with lock, record.open("a") as out:
                out.write(json.dumps(outcome) + "\n")
            print(
                f"{outcome['file']}:{outcome['line']} {outcome['what']}: {outcome['caught'] or 'SURVIVED'}",
                flush=True,
            )

        list(pool.map(one, sample))
    last = {key(outcome): outcome for outcome in map(json.loads, record.read_text().splitlines())}
    text = table(list(last.values()))
    (arguments.out / "table.md").write_text(text)
    print(text.partition("\n\n")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
