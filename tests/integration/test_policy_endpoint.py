"""Existing agents are trained through the policy endpoint: the example of its page learns."""

import json
import re
import runpy
from pathlib import Path

import pytest

from engine_core.cli.main import main
from engine_core.runs.rollout_files import read_rollouts
from engine_core.types import sequences_of

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


BRANCHING = """
from openai import OpenAI

from engine_core import hookimpl
from engine_core.specs import Environment
from engine_plugin_agents import endpoint


def agent(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    texts = []
    for number in range(1 + row["number"] % 3):
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "user", "content": str(number)}]
        texts.append(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)
    return {"long": float(len(texts[-1]))}


@hookimpl
def engine_environments():
    return {"agent": Environment(load=endpoint(agent), rewards=frozenset({"long"}))}
"""


def test_all_branches_of_an_agent_are_trained_and_recorded(tiny):
    (tiny / "agent.py").write_text(BRANCHING)
    (tiny / "agent.toml").write_text(block("reference/endpoint.md", "toml tiny/agent.toml"))
    rows = [{"prompt": f"{i} + 1 = ", "answer": str(i), "number": i} for i in range(8)]
    (tiny / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [
        "train",
        "tiny/agent.toml",
        "--steps",
        "2",
        "--set",
        "environment.max_turns=3",
        "--set",
        "run.name=agent",
    ]
    assert main([*asked, "--set", "rollout.group_size=2"]) == 0
    lines = [json.loads(line) for line in Path("runs/agent/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "environment/branches" in line]
    conversations = 2 * sum(1 + row["number"] % 3 for row in rows)
    for number, line in enumerate(steps, 1):
        assert (line["rollouts"], line["environment/branches"]) == (16, conversations)
        assert line["mismatch/max_abs"] < 1e-3
        rollouts = read_rollouts(Path(f"runs/agent/rollouts/step_{number:06d}.parquet"))
        sequences = sequences_of(rollouts)
        assert (len(rollouts), len(sequences)) == (16, conversations)
        assert line["tokens/generated"] == sum(r.sampled_length for r in sequences)
        assert all(r.sampled_length for r in sequences)
    assert len(steps) == 2
    assert main(["replay", "runs/agent", "--step", "2"]) == 0  # the same update from the recorded rollouts


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "needs"), [("agent.py", "openai"), ("swe_agent.py", "minisweagent")])
def test_the_reward_of_the_pages_agents_rises(tiny, monkeypatch, name, needs):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    pytest.importorskip(needs)
    page = "reference/endpoint.md"
    agent = block(page, "python tiny/agent.py") if name == "agent.py" else block(page, "py")
    (tiny / "agent.py").write_text(agent)
    (tiny / "agent.toml").write_text(block(page, "toml tiny/agent.toml"))
    assert main(["train", "tiny/agent.toml", "--steps", "25", "--set", "run.name=agent"]) == 0
    lines = [json.loads(line) for line in Path("runs/agent/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "environment/branches" in line]
    digits = [line["reward/digits"] for line in steps]
    assert len(steps) == 25
    assert sum(digits[-5:]) / 5 >= sum(digits[:5]) / 5 + 0.25
    for line in steps:
        assert line["environment/turns"] == 2
        assert line["environment/branches"] == line["rollouts"]
        assert line["environment/reencoded_tokens"] == 0
        assert line["mismatch/max_abs"] < 1e-3  # the trainer sees the tokens that were sampled
