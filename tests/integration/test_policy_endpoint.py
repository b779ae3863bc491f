"""Existing agents are trained through the policy endpoint: the example of its page learns."""

import json
import re
import runpy
from pathlib import Path

import pytest

from engine_core.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


def block(page, head):
    """The code block of a page whose first line begins like this, without its fences."""
    return re.search(rf"^```{re.escape(head)}\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.M | re.S)[1]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The folder of the pages' tiny chat model, data and run file."""
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"^```python\n(.*?)^```", (DOCS / "first_run.md").read_text("utf-8"), re.M | re.S)
    for number, program in enumerate(programs[:2]):
        (tmp_path / f"make_{number}.py").write_text(program)
        runpy.run_path(str(tmp_path / f"make_{number}.py"))
    (tmp_path / "tiny" / "run.toml").write_text(block("first_run.md", "toml tiny/run.toml"))
    return tmp_path / "tiny"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_reward_of_the_pages_agent_rises(tiny):
    for name, language in (("agent.py", "python"), ("agent.toml", "toml")):
        (tiny / name).write_text(block("reference/endpoint.md", f"{language} tiny/{name}"))
    assert main(["train", "tiny/agent.toml", "--steps", "25", "--set", "run.name=agent"]) == 0
    lines = [json.loads(line) for line in Path("runs/agent/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "environment/branches" in line]
    digits = [line["reward/digits"] for line in steps]
    assert len(steps) == 25
    assert sum(digits[-5:]) / 5 >= sum(digits[:5]) / 5 + 0.25
    for line in steps:
        assert line["environment/turns"] == 2
        assert line["environment/branches"] == line["rollouts"]
        assert line["environment/untrained_turns"] == line["environment/reencoded_tokens"] == 0
        assert line["mismatch/max_abs"] < 1e-3  # the trainer sees the tokens that were sampled
