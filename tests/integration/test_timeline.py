"""The timeline of whole runs: what runs where and when, in one trace."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest

from engine_core.cli.main import main
from engine_plugin_tools.timeline import read_spans

pytestmark = pytest.mark.usefixtures("forked_workers")

ECHO = """
from engine_core import hookimpl
from engine_core.specs import Environment


async def echo(episode):
    turn = await episode.sample(max_tokens=3)
    episode.append(await episode.call(str.upper, turn.text))
    turn = await episode.sample(max_tokens=3)
    return episode.rollout({"short": float(len(turn.text) < 8)})


@hookimpl
def engine_environments():
    return {"echo": Environment(load=echo, rewards=frozenset({"short"}))}
"""
NUMERIC = {"reward": [{"name": "numeric", "workers": 2}]}
PROCESSES = {"runtime.backend": "torchrun", "runtime.torchrun.processes": 2, "actor.backend": "fsdp"}


@pytest.fixture
def trace_of(trained, capsys):
    """``trace_of(settings)``: trains, writes the trace, and gives its spans as (group, lane, name, start, end) and the folder."""

    def run(settings, *words):
        folder = trained(settings)
        capsys.readouterr()
        assert main(["trace", str(folder), *words]) == 0
        trace = json.loads((folder / "trace.json").read_text())
        assert capsys.readouterr().out == f"{folder / 'trace.json'}\n"
        return checked(trace), folder

    return run


def checked(trace):
    """Check a trace against the Chrome trace event format; return its spans, and check that those of a lane nest."""
    named = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            named[event["pid"], event.get("tid")] = event["args"]["name"]
    spans, lanes = [], defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            group, lane = named[event["pid"], None], named[event["pid"], event["tid"]]
            span = (group, lane, event["name"], event["ts"], event["ts"] + event["dur"])
            spans.append(span)
            lanes[group, lane].append(span)
    for spans_of_lane in lanes.values():
        open_spans = []
        for span in spans_of_lane:
            while open_spans and open_spans[-1] <= span[3] + 0.2:  # rounding
                open_spans.pop()
            assert not open_spans or span[4] <= open_spans[-1] + 0.2, span
            open_spans.append(span[4])
    return spans


def of(spans, group, name=""):
    return [span for span in spans if span[0] == group and span[2].startswith(name)]


def outside_of_steps(spans):
    """Return the spans since the first step that lie in no step."""
    steps = of(spans, "controller", "step ")
    return [
        span
        for span in spans
        if span[3] >= steps[0][3] and not any(s[3] <= span[3] and span[4] <= s[4] + 0.2 for s in steps)
    ]


def test_a_run_in_one_process_shows_its_phases_calls_requests_rewards_transfers_and_saves(grpo, trace_of):
    spans, folder = trace_of(grpo | NUMERIC | {"eval.every_steps": 2, "checkpoint.every_steps": 1})
    assert [span[2] for span in of(spans, "controller", "step")] == ["step 1", "step 2"]
    names = {span[2] for span in of(spans, "controller")}
    assert names >= {"generate", "reward", "train", "sync", "eval", "save step 1", "save step 2"}
    assert len(of(spans, "requests", "1:")) == len(of(spans, "requests", "2:")) == 16
    assert {span[1] for span in of(spans, "actor")} == {"rank 0"}
    assert len(of(spans, "actor", "optimizer_step")) == 2
    assert {span[1] for span in of(spans, "rewards")} == {"numeric 0", "numeric 1"}
    assert [span[2] for span in of(spans, "transfers")] == ["weights 0", "weights 1", "weights 2"]
    assert outside_of_steps(spans) == []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert 0 < line["time/idle/actor"] < 1
        assert 0 < line["time/idle/rollout"] < 1
        assert 0 < line["throughput/requests_in_flight"] <= 16


@pytest.mark.slow
def test_a_sampler_in_its_own_process_sends_its_calls_and_requests(grpo, trace_of):
    spans, folder = trace_of(grpo | NUMERIC | {"rollout.process.engines": 2})
    assert {span[1] for span in of(spans, "rollout", "flow")} == {"sampler 0", "sampler 1"}
    assert len(of(spans, "requests", "2:")) == 32  # as the controller and as the processes see them
    assert outside_of_steps(spans) == []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        assert 0 < json.loads(line)["throughput/requests_in_flight"] <= 16


def test_two_ranks_have_a_lane_each_and_their_spans_lie_in_the_step(grpo, trace_of):
    spans, folder = trace_of(grpo | NUMERIC | PROCESSES | {"checkpoint.every_steps": 2, "profile.steps": [2]})
    for method in ("forward_backward", "optimizer_step", "save"):
        assert {span[1] for span in of(spans, "actor", method)} == {"rank 0", "rank 1"}
    assert {span[1] for span in of(spans, "rollout", "generate")} == {"rank 0", "rank 1"}
    assert len(of(spans, "requests", "1:")) == 16
    assert outside_of_steps(spans) == []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["time/idle/actor"] < 1 for line in lines)
    check_profile(folder, ranks=2)


def test_rollouts_that_run_ahead_overlap_the_training(grpo, trace_of):
    ahead = {"trainer": "async", "rollout.weights": "own", "run.steps": 3}
    spans, _ = trace_of(grpo | NUMERIC | ahead)
    sampled = of(spans, "requests")
    assert len(sampled) == 48
    steps = of(spans, "controller", "step")
    assert any(span[3] < steps[1][3] and span[2].startswith("2:") for span in sampled)  # before its step


def test_an_episode_holds_its_turns_and_tool_calls(grpo, trace_of, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    environment = {"plugins": [str(tmp_path / "echo.py")], "environment.name": "echo"}
    spans, folder = trace_of(grpo | environment | {"model.override.max_position_embeddings": 256})
    episodes = [span for span in of(spans, "episodes") if span[2].count(":") == 2]
    assert len(episodes) == 32
    for _, lane, _, start, end in episodes:
        inside = [s[2] for s in of(spans, "episodes") if s[1] == lane and start <= s[3] and s[4] <= end + 0.2]
        assert inside[1:] == ["turn", "tool upper", "turn"]
    assert outside_of_steps(spans) == []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        assert 0 < json.loads(line)["throughput/episodes_in_flight"] <= 16


def test_a_run_that_failed_keeps_its_timeline_and_a_resumed_one_continues_it(
    grpo, trained, monkeypatch, capsys
):
    settings = grpo | NUMERIC | {"checkpoint.every_steps": 1}
    monkeypatch.setenv("ENGINE_FAULT", "step.train@2:raise")
    with pytest.raises(RuntimeError, match="ENGINE_FAULT"):
        trained(settings)
    monkeypatch.delenv("ENGINE_FAULT")
    folder = Path(grpo["run.dir"]) / "r"
    with (folder / "timeline.jsonl").open("a") as file:
        file.write('\n["actor", "rank 0", "cu')  # as after a crash in the middle of a line
    before = read_spans(folder)
    assert [span[2] for span in of(before, "controller", "step")] == ["step 1", "step 2"]
    assert main(["resume", str(folder)]) == 0
    after = read_spans(folder)
    assert after[: len(before)] == before
    assert [span[2] for span in of(after, "controller", "step")] == ["step 1", "step 2", "step 2"]
    capsys.readouterr()
    assert main(["trace", str(folder), "--steps", "2", "-o", str(folder / "two.json")]) == 0
    spans = checked(json.loads((folder / "two.json").read_text()))
    assert [span[2] for span in of(spans, "controller", "step")] == ["step 2", "step 2"]
    assert outside_of_steps(spans) == []
    assert main(["trace", str(folder), "--steps", "7:9"]) == 4
    assert "--steps 7:9: the timeline has steps 1 to 2" in capsys.readouterr().err
    assert main(["trace", str(folder), "--steps", "x"]) == 2


def test_a_profiled_step_has_a_trace_of_torch_and_others_have_none(grpo, trained):
    check_profile(trained(grpo | NUMERIC | {"profile.steps": [2], "run.steps": 3}), ranks=1)


def check_profile(folder, ranks):
    """Check that step 2 alone has a trace of each rank, and that the traces have a forward and a backward pass."""
    files = {str(path.relative_to(folder / "profile")) for path in (folder / "profile").rglob("*.*")}
    assert files == {f"step_000002/rank_{rank}.json.gz" for rank in range(ranks)}
    for name in files:
        events = json.loads(gzip.decompress((folder / "profile" / name).read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        assert names & {"aten::mm", "aten::addmm", "aten::bmm"}
        assert any("Backward" in name for name in names)
