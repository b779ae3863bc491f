"""Conditions of a run's health."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine_plugin_tools.health import CONDITIONS, WINDOW, Health, conditions

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "health.md"


def steps(**metrics):
    return [{name.replace("__", "/"): value for name, value in metrics.items()}] * WINDOW


FOUND = {
    "entropy_collapse": (
        {"actor__entropy": 0.04},
        {"actor__entropy": 0.041},
        "is 0.04 nats, at first it was 0.82",
    ),
    "truncation": (
        {"response_length__truncated_share": 0.26},
        {"response_length__truncated_share": 0.25},
        "26% of the responses are cut.",
    ),
    "zero_variance_groups": (
        {"reward__zero_variance_groups": 0.81},
        {"reward__zero_variance_groups": 0.8},
        "81% of the groups have equal rewards",
    ),
    "mismatch": (
        {"mismatch__mean_abs": 0.3},
        {"mismatch__mean_abs": 0.3, "mismatch__fresh_share": 0.5, "mismatch__fresh_mean_abs": 0.1},
        "differ by 0.3 nats",
    ),
    "idle_sampler": (
        {"time__sampling": 4.9, "time__step": 10.0},
        {"time__sampling": 5.0, "time__step": 10.0},
        "has work for 4.9 of 10 s",
    ),
    "reward_failures": (
        {"reward__failures": 6, "rollouts": 100},
        {"reward__failures": 5, "rollouts": 100},
        "Rewards failed 30 times on 500 rollouts.",
    ),
    "skipped_updates": ({"actor__skipped_steps": 1}, {"actor__skipped_steps": 0}, "5 updates were skipped"),
}


def test_a_mismatch_of_tokens_of_older_policies_alone_is_expected():
    stale = steps(mismatch__mean_abs=0.3, mismatch__fresh_share=0.0)
    assert "mismatch" not in dict(conditions(steps(), stale))


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_found_beyond_its_bound_and_not_at_it(name):
    beyond, at, text = FOUND[name]
    first = steps(actor__entropy=0.82)
    found = conditions(first, steps(**beyond))
    assert list(found) == [name]
    assert text in found[name]
    assert CONDITIONS[name].fix in found[name]
    assert found[name].endswith(f"See '{name}' on the page 'Health' of the documentation.")
    assert conditions(first, steps(**at)) == {}


def test_the_median_of_the_newest_steps_decides():
    share = "response_length/truncated_share"
    assert conditions([], [{share: value} for value in (0.0, 0.9, 0.9, 0.0, 0.9)])
    assert not conditions([], [{share: value} for value in (0.0, 0.9, 0.9, 0.0, 0.0)])
    assert not conditions([], [{share: 0.9}] * (WINDOW - 1))
    assert not conditions([], [{share: 0.9}] * (WINDOW - 1) + [{}])  # a step did not measure it


def test_a_policy_that_is_sure_from_the_start_has_not_collapsed():
    assert conditions(steps(actor__entropy=0.02), steps(actor__entropy=0.01)) == {}


def test_a_condition_holds_from_the_fifth_step_to_its_end_and_the_tenth_step_has_advice():
    health, cut = Health(), "response_length/truncated_share"
    line = {"time/generate": 6.0, "time/train": 1.0, "time/step": 7.0}
    found = [list(health(line | {cut: share})) for share in [1.0] * 5 + [0.0] * 5]
    assert found == [[]] * 4 + [["truncation"]] * 3 + [[], [], ["step_time"]]


def test_the_page_has_a_heading_for_each_condition():
    assert re.findall(r"^## (.*)", PAGE.read_text("utf-8"), re.MULTILINE) == [*CONDITIONS, "step_time"]


def test_health_is_judged_without_torch():
    code = "import sys, engine_plugin_tools.health; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_run_logs_a_condition_once_and_sends_it_to_observers(engine, rl_run, tmp_path):
    (tmp_path / "spy.py").write_text(
        "from pathlib import Path\n"
        "from engine_core import hookimpl\n\n\n"
        "@hookimpl\n"
        "def engine_on_event(event, step, data):\n"
        "    if event == 'condition_found':\n"
        "        with Path('seen').open('a') as file:\n"
        "            file.write(f\"{step} {data['name']}\\n\")\n"
    )
    (tmp_path / "dice.py").write_text(
        (tmp_path / "dice.py").read_text().replace('finish_reason="stop"', 'finish_reason="length"')
    )
    more = ("--set", "plugins=['dice.py', 'spy.py']", "--steps", "7", "--set", "checkpoint.every_steps=0")
    answer = engine("train", "rl.toml", *more)
    assert answer.code == 0, answer.err
    lines = [
        line
        for line in answer.err.splitlines()
        if "Advice (truncation): 100% of the responses are cut." in line
    ]
    assert len(lines) == 1
    assert (tmp_path / "seen").read_text().splitlines().count("5 truncation") == 1
