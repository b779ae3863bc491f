"""The scripts below benchmarks/ start: what they import is there, and they tell how to call them.

They are for machines that CI does not have; without this, a name that moved is noticed on such a machine.
"""

import json
import subprocess
import sys
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
