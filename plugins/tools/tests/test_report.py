"""The page of a run."""

from __future__ import annotations

import html.parser
import re

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.errors import DataError
from engine_core.runs.tracking import RunFolder, TrackerHub, write_rollouts
from engine_core.types import Prompt, Rollout
from engine_plugin_tools.report import draw_curves, write_report

HOSTILE = "<script>alert(1)</script>&<b>"


def make_run(tmp_path, lines, name="arithmetic") -> RunFolder:
    config = EngineConfig(run={"dir": str(tmp_path), "name": name}, tracking={"trackers": []})
    run = RunFolder.create(config)
    hub = TrackerHub(run, config, None)
    hub.start()
    for step, line in enumerate(lines, 1):
        hub.log(step, line)
    hub.close()
    run.close()
    return run


def rollout(text: str, reward: float) -> Rollout:
    return Rollout(
        "r", Prompt("p", [1], f"asked {HOSTILE}", {"answer": "42"}), torch.tensor([1, 2]), torch.tensor([False, True]),
        torch.zeros(2), torch.zeros(2, dtype=torch.int32), "stop", text=text, reward=reward,
    )  # fmt: skip


RL = [
    {
        "reward/mean": 0.2 + i / 100,
        "mismatch/kl": -1e-9,  # k3 of nearly equal numbers may round below zero
        "mismatch/mean_abs": 1e-6,
        "response_length/mean": 14.0,
        "time/generate": 0.5,
        "time/step": 0.75,
        **({"eval/accuracy": 0.30 + i / 100} if i % 10 == 0 else {}),
    }
    for i in range(21)
]


class Addresses(html.parser.HTMLParser):
    """A parser that collects everything that a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "link", "iframe", "object", "embed", "image", "img"):
            self.found.append(tag)
        self.found += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href", "data") and not value.startswith("#")
        ]
        self.found += [name for name, _ in attributes if name.startswith("on")]


def test_the_page_fetches_nothing_runs_nothing_and_shows_what_was_said(tmp_path):
    run = make_run(tmp_path, RL)
    write_rollouts(run, 1, [rollout(f"first {HOSTILE}", 0.0)])
    write_rollouts(run, 2, [rollout("in between", 0.0)])
    write_rollouts(run, 21, [rollout("last answer", 1.0)])
    text = write_report(run.path).read_text()
    addresses = Addresses()
    addresses.feed(text)
    assert addresses.found == []
    assert "@import" not in text
    assert "<!DOCTYPE svg" not in text
    assert "url(http" not in text
    assert "first &lt;script&gt;alert(1)&lt;/script&gt;&amp;&lt;b&gt;" in text
    assert "asked &lt;script&gt;" in text
    assert "last answer" in text
    assert "in between" not in text
    assert "expected 42" in text
    assert "prompts_per_step" in text


def test_an_episode_is_shown_with_its_turns_calls_times_and_rewards(tmp_path):
    episode = rollout("all text", 1.0)
    episode.rewards, episode.branches = {"good": 1.0, "numeric": None}, [rollout("other", 1.0)]
    episode.extras = {"turns": torch.tensor([0, 1], dtype=torch.int32)}
    episode.messages = [
        {"role": "assistant", "content": f"I call {HOSTILE}", "seconds": 0.5},
        {"role": "tool", "content": "4", "seconds": 2.0, "calls": [{"name": "<b>add", "seconds": 1.5}]},
    ]
    run = make_run(tmp_path, [{"reward/mean": 0.5, "environment/turns": 2.0, "time/episode_tool": 1.0}])
    write_rollouts(run, 1, [episode])
    text = write_report(run.path).read_text()
    assert "assistant: turn 1, 1 tokens, version 0, 0.5 s" in text
    assert "I call &lt;script&gt;" in text
    assert "tool: &lt;b&gt;add 1.5 s, 2 s" in text
    assert re.search(r"good 1,\s+numeric -", text)
    assert "1 further conversations" in text
    assert "all text" not in text


def test_the_numbers_at_the_top_are_first_and_last(tmp_path):
    text = write_report(make_run(tmp_path, RL).path).read_text()
    tiles = dict(re.findall(r"<span>([^<]+)</span><b>([^<]+)</b>", text))
    assert tiles["steps"] == "21"
    assert tiles["held-out accuracy"] == "0.50"
    assert "0.30 before" in text
    assert tiles["reward"] == "0.395"  # mean of the last two of 21: (0.39 + 0.40) / 2
    assert tiles["sampler gap"] == "1.0e-06"
    assert "15.8 s" in text  # 21 * 0.75


def test_completions_of_evaluations_are_preferred(tmp_path):
    run = make_run(tmp_path, RL)
    write_rollouts(run, 1, [rollout("of a step", 0.0)])
    for step in (0, 10, 20):
        write_rollouts(run.rollouts_dir / "eval", step, [rollout(f"evaluated at {step}", 0.0)])
    text = write_report(run.path).read_text()
    assert "of a step" not in text
    assert "evaluated at 10" not in text
    before, after = (
        text.index("<h3>held-out, after step 0</h3>"),
        text.index("<h3>held-out, after step 20</h3>"),
    )
    assert before < text.index("evaluated at 0") < after < text.index("evaluated at 20")


def test_sft_shows_its_loss(tmp_path):
    lines = [{"actor/loss": 2.0 / step, "time/train": 0.1} for step in range(1, 11)]
    text = write_report(make_run(tmp_path, lines).path).read_text()
    assert "<span>loss</span><b>0.2000</b>" in text
    assert "<span>reward</span>" not in text


def test_a_run_that_died_and_steps_without_a_number_are_drawn(tmp_path):
    run = make_run(tmp_path, [{"reward/mean": 0.5}, {"reward/mean": float("nan")}])
    with run.metrics_file.open("a") as file:
        file.write('{"step": 3, "rewa')
    assert "<b>2</b>" in write_report(run.path).read_text()


def test_one_step_is_enough_and_is_drawn_as_dots(tmp_path):
    run = make_run(tmp_path, RL[:1])
    assert write_report(run.path).exists()
    for axes in draw_curves(run.read_metrics()).axes[:-1]:  # the last panel is a stack of phases
        assert all(line.get_marker() == "o" for line in axes.lines if line.get_alpha() is None), (
            axes.get_title()
        )


def test_a_run_without_a_step_has_no_report(tmp_path):
    run = make_run(tmp_path, [])
    with pytest.raises(DataError, match="the run has not finished a step, so there is nothing to report"):
        write_report(run.path)
    assert not (run.path / "report.html").exists()


def test_the_picture_has_a_panel_a_question(tmp_path):
    from matplotlib import image

    make_run(tmp_path, RL)
    write_report(tmp_path / "arithmetic")
    picture = image.imread(tmp_path / "arithmetic" / "curves.png")
    assert picture.shape[0] > 300
    assert picture.shape[1] > 900
    assert len({tuple(pixel) for pixel in picture[::7, ::7, :3].reshape(-1, 3).round(2)}) > 5  # not blank
