"""The scripts below benchmarks/ start: what they import is there, and they tell how to call them.

They are for machines that CI does not have; without this, a name that moved is noticed on such a machine.
"""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"benchmarks/trl/trl_run.py"}  # runs in an environment that has TRL
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.glob("benchmarks/*/*.py")
    if 'if __name__ == "__main__"' in path.read_text()
)
SCRIPTS = [script for script in SCRIPTS if script not in ELSEWHERE]
HELP = """
import io, json, os, runpy, sys, traceback
from contextlib import redirect_stdout

found = {}
for script in sys.argv[1:]:
    before = list(sys.path), set(sys.modules)
    sys.path.insert(0, os.path.dirname(script))
    sys.argv = [script, "--help"]
    told = io.StringIO()
    try:
        with redirect_stdout(told):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        found[script] = told.getvalue() if not end.code else f"exit {end.code}"
    except BaseException:
        found[script] = traceback.format_exc()
    sys.path[:] = before[0]
    here = [m for m in set(sys.modules) - before[1] if "benchmarks" in str(getattr(sys.modules[m], "__file__", ""))]
    for module in here:  # each script has neighbours of its own with names such as `cases`
        del sys.modules[module]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def told():
    """What each script says to --help: one process, because most of the time goes into imports of torch and transformers."""
    command = [sys.executable, "-c", HELP, *SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_script_starts_and_tells_its_options(told, script):
    assert told[script].startswith("usage:"), told[script]


ENGINE = """
import json, os, shutil, time
from pathlib import Path

def main(words):
    run = Path(os.environ["TMPDIR"], "bench", "run")
    run.mkdir(parents=True)
    print("INFO engine.py: Initializing with compilation_config={'level': 3, 'cache': {}}")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(4):
            file.write(json.dumps({"step": step + 1, "time/step": 1.0 + step, "reward/mean": 0.5}) + "\\n")
    while not Path(os.environ["TMPDIR"], "heard").exists():
        time.sleep(0.05)
    shutil.rmtree(run.parent)
    print(json.dumps({"part": "step", "time/step": 3.5, "devices": {"cpu": 1}}, indent=2))
    print("INFO core.py: {shutting down}")
"""


def test_the_benchmark_of_whole_steps_reads_a_result_among_the_log_lines_of_vllm(tmp_path, monkeypatch):
    (tmp_path / "engine_core" / "cli").mkdir(parents=True)
    for file, text in {"__init__.py": "", "cli/__init__.py": "", "cli/main.py": ENGINE}.items():
        (tmp_path / "engine_core" / file).write_text(text)
    monkeypatch.chdir(tmp_path)  # where `python -c` looks first
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "vllm"))
    step, heard = importlib.import_module("step"), []

    def tell(so_far):
        heard.append(so_far)
        (tmp_path / "heard").touch()

    try:
        found = step.run(tmp_path, Namespace(steps=2, budget=60), tell)
    finally:
        for name in ("step", "setting"):
            sys.modules.pop(name, None)
    assert (found["part"], found["time/step"], found["devices"]) == ("step", 3.5, {"cpu": 1})
    assert [each["time/step"] for each in found["all_steps"]] == [1.0, 2.0, 3.0, 4.0]
    assert heard[-1]["time/step"] == 3.5
