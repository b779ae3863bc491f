"""How many of our files one row of the data passes in the simplest run: one process, ``torch`` and ``hf``."""

import json
import sys
import threading
from pathlib import Path

from engine_core.types import Batch, Prompt, Request, Rollout

ROOT = Path(__file__).parents[2]
MOST_FILES = 25


def carries_a_row(value, prompts, depth=2):
    """Return whether a value is a row with one of these prompts, was made of a row, or holds such a value."""
    if isinstance(value, Prompt | Request | Rollout | Batch):
        return True
    if isinstance(value, dict):
        known = isinstance(value.get("prompt"), str) and value["prompt"] in prompts
        return known or bool(depth and carries_a_row(list(value.values()), prompts, depth - 1))
    if isinstance(value, list | tuple) and depth:
        return any(carries_a_row(item, prompts, depth - 1) for item in value[:3])
    return False


class RowTrace:
    """Notes the files of which a function is called with a row in its arguments, in all threads."""

    def __init__(self, prompts):
        self.prompts, self.files = prompts, set()

    def __call__(self, frame, event, argument):
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT) or not {"engine_core", "src"} & set(path.parts):
            return
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        if any(carries_a_row(value, self.prompts) for value in arguments):
            self.files.add(str(path.relative_to(ROOT)))

    def __enter__(self):
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *exception):
        sys.setprofile(None)
        threading.setprofile(None)


def test_one_row_passes_at_most_25_files(grpo, trained):
    grpo |= {"reward": [{"name": "numeric", "workers": 0}], "run.steps": 1}
    lines = Path(grpo["data.train"]).read_text().splitlines()
    prompts = {json.loads(line)["prompt"] for line in lines}
    with RowTrace(prompts) as trace:
        trained(grpo)
    on_the_way = {
        "engine_core/data/layouts.py",
        "engine_core/train/sampled_run.py",
        "engine_core/train/update.py",
    }
    engines = {f"plugins/{p}/src/engine_plugin_{p}/engine.py" for p in ("torch", "hf_rollout")}
    assert on_the_way | engines <= trace.files
    assert len(trace.files) <= MOST_FILES, "\n".join(sorted(trace.files))
