"""The page of runs: what it embeds, that it loads nothing, and that a completion cannot run in it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json

import pytest
import torch
from report_runs import HOSTILE, make_run, rollout

from engine_core.runs.tracking import RunFolder, write_rollouts
from engine_plugin_tools import stored_rollouts
from engine_plugin_tools.curves import draw_curves
from engine_plugin_tools.report import POINTS, page, page_data, write_report

RL = [
    {
        "reward/mean": 0.2 + i / 100,
        "mismatch/mean_abs": 1e-6,
        "response_length/mean": 14.0,
        "time/generate": 0.5,
        "time/step": 0.75,
        **({"eval/accuracy": 0.30 + i / 100} if i % 10 == 0 else {}),
    }
    for i in range(21)
]


class Tags(html.parser.HTMLParser):
    """A parser that collects tags, the texts of scripts, and everything that a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses, self.scripts = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [
            name
            for name, _ in attributes
            if name in ("src", "href", "data", "style") or name.startswith("on")
        ]
        self.policy = dict(attributes).get("content") if "http-equiv" in dict(attributes) else self.__dict__.get("policy")  # fmt: skip

    def handle_data(self, data):
        if self.tags[-1:] == ["script"] and data.strip():
            self.scripts.append(data)


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


def run_of(folder: RunFolder) -> dict:
    return page_data([folder.path])["runs"][0]


def test_the_conditions_of_a_run_are_on_its_page(tmp_path):
    cut = [line | {"response_length/truncated_share": 0.9} for line in RL]
    assert [*run_of(make_run(tmp_path, cut))["health"]] == ["truncation"]
    assert run_of(make_run(tmp_path, cut[:10] + RL[10:], "late"))["health"] == {}  # the newest steps decide


def test_a_completion_cannot_run_and_is_embedded_unchanged(tmp_path):
    run = make_run(tmp_path, RL)
    write_rollouts(run, 1, [rollout(f"{HOSTILE} first", 0.0)])
    text = write_report([run.path]).read_text()
    tags = parsed(text)
    assert tags.tags.count("script") == 2
    assert {"img", "link", "iframe"}.isdisjoint(tags.tags)
    assert tags.addresses == []
    embedded, script = tags.scripts
    assert "<" not in embedded
    assert embedded.isascii()
    row = json.loads(embedded)["runs"][0]["sets"][0]["steps"][0]["rows"][0]
    assert (row["response"], row["prompt"]) == (f"{HOSTILE} first", f"asked {HOSTILE}")
    assert "innerHTML" not in script.partition("sync: { key")[2]  # the part after uPlot
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in tags.policy
    assert f"script-src 'sha256-{digest}'" in tags.policy
    assert "connect-src" not in tags.policy
    assert "unsafe" not in tags.policy


def test_only_the_live_page_may_connect_and_only_to_its_server():
    policies = [
        parsed(page({"runs": []}, live=live)).policy.partition("connect-src")[2] for live in (False, True)
    ]
    assert policies == ["", " 'self'"]


def test_every_metric_is_embedded_with_its_steps(tmp_path):
    run = run_of(make_run(tmp_path, RL))
    assert run["steps"] == list(range(1, 22))
    assert set(run["metrics"]) == {name for line in RL for name in line}
    assert run["metrics"]["reward/mean"][:2] == [0.2, 0.21]
    assert run["metrics"]["eval/accuracy"][:2] == [0.3, None]
    assert run["phases"] == ["generate"]
    assert run["steps_in_a_point"] == 1
    assert run["about"]["algorithm"] == "grpo, ppo_clip"


def test_a_long_run_has_means_of_several_steps(tmp_path):
    folder = make_run(tmp_path, [])
    lines = [{"step": i, "reward/mean": float(i), **({"eval/x": 1.0} if i == 2 else {})} for i in range(1, 2 * POINTS + 2)]  # fmt: skip
    folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = run_of(folder)
    assert run["steps_in_a_point"] == 3
    assert run["steps"][:2] == [3, 6]
    assert run["metrics"]["reward/mean"][:2] == [2.0, 5.0]
    assert run["metrics"]["eval/x"][:2] == [1.0, None]


def test_the_numbers_at_the_top_are_first_and_last(tmp_path):
    tiles = {label: rest for label, *rest in run_of(make_run(tmp_path, RL))["headline"]}
    assert tiles["held-out accuracy"] == ["0.50", "0.30 before"]
    assert tiles["reward"] == ["0.395", "0.205 at first"]  # means of the first and the last two of 21
    assert tiles["sampler gap"] == ["1.0e-06", "1.0e-06 at first"]
    assert "loss" not in tiles
    facts = dict(run_of(make_run(tmp_path, RL, "other"))["facts"])
    assert facts["time in steps"] == "15.8 s"


def test_histograms_are_of_all_rollouts_with_the_same_bins_in_each_step(tmp_path):
    run = make_run(tmp_path, RL)
    write_rollouts(run, 1, [rollout(f"a{i}", float(i % 2), group=i // 2, length=1 + i) for i in range(4)])
    write_rollouts(run, 2, [rollout("b", 3.0, length=9)])
    training = run_of(run)["sets"][0]
    assert training["ranges"] == {"reward": (0.0, 3.0), "length": (1, 9), "advantage": (-0.5, 0.5)}
    first, second = (step["histograms"] for step in training["steps"])
    assert (first["reward"][0], first["reward"][8], sum(first["reward"])) == (2, 2, 4)
    assert second["reward"][-1] == 1
    assert (first["advantage"][0], first["advantage"][-1]) == (2, 2)
    assert second["advantage"][12] == 1


def test_files_that_are_not_of_a_step_are_left_out(tmp_path):
    run = make_run(tmp_path, RL)
    write_rollouts(run, 1, [rollout("a", 1.0)])
    for file in ("step_000001_good.parquet", "eval/step_000001_good.parquet"):
        write_rollouts(run.rollouts_dir / file, 1, [rollout("b", 0.0)])
    (training,) = run_of(run)["sets"]
    assert [step["step"] for step in training["steps"]] == [1]


def test_ends_have_all_completions_and_steps_between_a_sample_over_the_rewards(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rollouts, "STEPS", 3)
    monkeypatch.setattr(stored_rollouts, "SAMPLE", 3)
    run = make_run(tmp_path, RL)
    for step in range(1, 6):
        write_rollouts(run, step, [rollout(f"text {i}", float(i)) for i in (4, 3, 2, 1, 0)])
    write_rollouts(run.rollouts_dir / "eval", 0, [rollout("evaluated", 1.0)])
    training, held_out = run_of(run)["sets"]
    assert [(step["step"], step["count"], len(step["rows"])) for step in training["steps"]] == [
        (1, 5, 5),
        (3, 5, 3),
        (5, 5, 5),
    ]
    assert [row["reward"] for row in training["steps"][1]["rows"]] == [4.0, 2.0, 0.0]
    assert training["stored"] == 5
    assert held_out["name"] == "held-out"
    assert "advantage" not in held_out["steps"][0]["histograms"]


def test_a_long_text_is_cut_in_the_middle(tmp_path):
    run = make_run(tmp_path, RL)
    write_rollouts(run, 1, [rollout("a" * 5000 + "b" * 5000, 0.0)])
    response = run_of(run)["sets"][0]["steps"][0]["rows"][0]["response"]
    assert response == "a" * 3000 + "\n[... 4,000 characters left out ...]\n" + "b" * 3000


def test_an_episode_has_its_turns_calls_times_rewards_and_branches(tmp_path):
    episode = rollout("all text", float("nan"))
    episode.rewards, episode.branches = {"good": 1.0, "numeric": None}, [rollout("other", 1.0)]
    episode.extras = {"turns": torch.tensor([0, 1], dtype=torch.int32)}
    episode.messages = [
        {"role": "assistant", "content": "I call", "seconds": 0.5},
        {"role": "tool", "content": "4", "seconds": 2.0, "calls": [{"name": "<b>add", "seconds": 1.5}]},
    ]
    run = make_run(tmp_path, RL)
    write_rollouts(run, 1, [episode, rollout("plain", 1.0, group=1)])
    step = run_of(run)["sets"][0]["steps"][0]
    assert step["count"] == 2
    shown = next(row for row in step["rows"] if "turns" in row)
    assert shown["turns"] == [
        {"role": "assistant", "text": "I call", "note": "turn 1, 1 tokens, version 0, 0.5 s"},
        {"role": "tool", "text": "4", "note": "<b>add 1.5 s, 2 s"},
    ]
    assert shown["rewards"] == {"good": 1.0, "numeric": None}
    assert (shown["branches"], shown["reward"], shown["answer"]) == (1, None, "42")
    assert step["histograms"]["reward"][12] == 1


def test_a_run_that_died_and_steps_without_a_number_have_a_page(tmp_path):
    run = make_run(tmp_path, [{"reward/mean": 0.5}, {"reward/mean": float("nan")}])
    with run.metrics_file.open("a") as file:
        file.write('{"step": 3, "rewa')
    run.rollout_file(1).write_bytes(b"no parquet")
    (run.path / "env.json").write_text("{}")
    found = run_of(run)
    assert found["metrics"]["reward/mean"] == [0.5, None]
    assert found["facts"] == [("environment", "env.json cannot be read: 'git'")]
    assert found["sets"] == []
    assert str(run.rollout_file(1)) in found["unreadable"]
    assert write_report([run.path]).exists()
    for text in "[]", "null", '{"git": null}':
        (run.path / "env.json").write_text(text)
        assert run_of(run)["facts"][0][1].startswith("env.json cannot be read: ")


def test_a_run_without_a_step_has_a_page(tmp_path):
    found = run_of(make_run(tmp_path, []))
    assert (found["steps"], found["headline"], found["step"]) == ([], [], 0)
    assert found["about"]["model"] == ""


def test_runs_over_each_other_are_one_page_with_names_that_differ(tmp_path):
    paths = [make_run(tmp_path / part, RL, name).path for part, name in (("a/runs", "x"), ("a/old", "x"), ("a/old", "y"))]  # fmt: skip
    assert [run["name"] for run in page_data(paths)["runs"]] == ["a/runs/x", "a/old/x", "y"]
    assert write_report(paths[1:]) == paths[1] / "report-x-y.html"
    assert write_report(paths, tmp_path / "page.html").read_text().count("<!doctype html>") == 1


@pytest.mark.parametrize("lines", [RL, RL[:1], [{"actor/loss": 1.0}, {"actor/loss": 0.5}]])
def test_the_picture_has_a_panel_for_each_question(lines):
    lines = [{"step": step, **line} for step, line in enumerate(lines)]
    titles = [axes.get_title() for axes in draw_curves(lines).axes]
    assert titles == (["Loss"] if "actor/loss" in lines[0] else ["Held-out accuracy", "Reward", "Response length, tokens", "Mismatch of log-probs"])  # fmt: skip
