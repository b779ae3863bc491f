"""The timeline of a run: its file, metrics of its spans, and how they are laid out in a trace."""

import json

import pytest

from engine_core import timeline
from engine_core.config import EngineConfig
from engine_core.errors import DataError
from engine_plugin_tools import timeline as written
from engine_plugin_tools.timeline import (
    FILE,
    OLDER,
    TimelineFile,
    as_trace,
    busy_seconds,
    joined,
    laid_out,
    of_steps,
    ranks_of,
    read_spans,
)


@pytest.fixture
def file(tmp_path):
    timeline.add("actor", "rank 0", "of another run", 0.0, 1.0)
    return TimelineFile(tmp_path, EngineConfig())


def names(spans):
    return [span[2] for span in spans]


def test_the_files_of_a_run_hold_the_newest_spans_within_their_bound(file, tmp_path, monkeypatch):
    monkeypatch.setattr(written, "MOST_BYTES", 2000)
    for step in range(200):
        timeline.add("controller", "run", f"step {step}", step, step + 1.0)
        file.write({}, {"time/step": 1.0})
    sizes = [(tmp_path / name).stat().st_size for name in (FILE, OLDER)]
    assert max(sizes) < 2000 + 100  # a step's spans more
    kept = names(read_spans(tmp_path))
    assert kept == [f"step {step}" for step in range(200 - len(kept), 200)]
    assert len(kept) >= 2000 // 100


@pytest.fixture
def now(monkeypatch):
    """The time is 18 s."""
    monkeypatch.setattr(timeline, "now", lambda: 18.0)


def test_metrics_say_how_long_each_role_had_no_command_and_how_many_requests_were_in_flight(file, now):
    timeline.add("actor", "rank 0", "forward_backward", 10.0, 12.0)
    timeline.add("actor", "rank 0", "save", 11.0, 13.0)  # 3 s in all
    timeline.add("actor", "rank 1", "forward_backward", 10.0, 11.0)
    timeline.add("requests", "#1:0:0", "1:0:0", 10.0, 16.0)
    timeline.add("requests", "#1:0:1", "1:0:1", 12.0, 16.0)
    found = file.write({"actor": 2, "rollout": 1}, {"time/step": 8.0})
    assert found == {
        "time/idle/actor": 1 - (3 + 1) / 8 / 2,
        "time/idle/rollout": 1.0,
        "throughput/requests_in_flight": (6 + 4) / 8,
    }


def test_time_before_the_step_counts_in_no_metric(file, now):
    for start, end in ((0.0, 9.0), (8.0, 12.0)):  # of an evaluation or the start, and across the beginning
        timeline.add("actor", "rank 0", "score", start, end)
        timeline.add("requests", "#1:0:0", "1:0:0", start, end)
    found = file.write({"actor": 1}, {"time/step": 8.0})
    assert found == {"time/idle/actor": 1 - 2 / 8, "throughput/requests_in_flight": 2 / 8}
    timeline.add("requests", "#2:0:0", "2:0:0", 0.0, 9.0)
    assert file.write({}, {"time/step": 8.0}) == {"throughput/requests_in_flight": 0.0}


def test_a_request_that_a_samplers_process_records_too_counts_once_and_that_process_is_no_rank(file, now):
    for lane in ("rank 0", "sampler 0", "rank 0 pool"):
        timeline.add("rollout", lane, "flow", 11.0, 15.0)
    timeline.add("requests", "#1:0:0", "1:0:0", 11.0, 15.0)
    timeline.add("requests", "#1:0:0", "1:0:0", 11.1, 14.9)
    found = file.write({"rollout": 1}, {"time/step": 8.0})
    assert found == {"time/idle/rollout": 1 - 4 / 8, "throughput/requests_in_flight": 4 / 8}


def test_an_episode_counts_once_with_its_turns_and_tools(file, now):
    timeline.add("episodes", "#1:0:0", "turn", 10.0, 13.0)
    timeline.add("episodes", "#1:0:0", "tool upper", 13.0, 14.0)
    timeline.add("episodes", "#1:0:0", "1:0:0", 10.0, 14.0)
    assert file.write({}, {"time/step": 8.0}) == {"throughput/episodes_in_flight": 4 / 8}


def test_spans_that_end_after_the_last_step_are_written_at_the_end(file, tmp_path):
    timeline.add("controller", "run", "step 1", 1.0, 2.0)
    file.close()
    assert read_spans(tmp_path) == [("controller", "run", "step 1", 1.0, 2.0)]


def test_a_line_that_a_crash_has_cut_is_left_out_and_the_next_one_is_whole(file, tmp_path):
    (tmp_path / FILE).write_text('["controller", "run", "step 1", 1.0, 2.0]\n["actor", "rank 0", "cu')
    timeline.add("controller", "run", "step 2", 2.0, 3.0)
    file.close()
    assert names(read_spans(tmp_path)) == ["step 1", "step 2"]


def test_a_file_that_cannot_be_written_is_a_warning(file, tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    timeline.add("controller", "run", "step 1", 1.0, 2.0)
    file.close()
    assert "The timeline lacks 1 spans, which could not be written" in caplog.text


def test_a_run_without_a_finished_step_has_no_timeline(tmp_path):
    with pytest.raises(DataError, match="has no span: no step of this run has ended"):
        read_spans(tmp_path)


def test_calls_that_follow_each_other_are_one_span():
    calls = [("rollout", "rank 0", "advance", n * 0.1, n * 0.1 + 0.0999) for n in range(10)]
    apart = ("rollout", "rank 0", "advance", 2.0, 2.1)
    other = ("rollout", "rank 0", "pause", 0.31, 0.32)
    found = joined([apart, *calls, other])
    assert names(found) == ["advance", "pause", "advance"]
    assert found[0][3:] == (0.0, pytest.approx(0.9999))


def test_time_that_spans_of_a_lane_share_counts_once():
    spans = [
        ("a", "rank 0", "x", 0.0, 4.0),
        ("a", "rank 0", "y", 1.0, 2.0),
        ("a", "rank 0", "z", 3.0, 5.0),
        ("a", "rank 1", "x", 0.0, 1.0),
    ]
    assert busy_seconds(spans, 0.0, 9.0) == {"a": 6.0}
    assert busy_seconds(spans, 0.5, 4.5) == {"a": 4.5}


def test_the_ranks_of_a_run_are_those_of_its_lanes():
    lanes = ["rank 0", "rank 1", "rank 1", "rank 11", "rank 0 math", "sampler 3", "#1:0:0", "7"]
    assert ranks_of([("actor", lane, "x", 0.0, 1.0) for lane in lanes]) == 3


def test_spans_of_any_lane_get_the_first_free_one_and_those_of_an_id_stay_together():
    spans = [
        ("episodes", "#a", "a", 0.0, 3.0),
        ("episodes", "#a", "turn", 0.0, 1.0),
        ("episodes", "#b", "b", 0.5, 2.0),
        ("episodes", "#a", "tool", 2.1, 2.9),
        ("episodes", "#c", "c", 2.5, 4.0),
        ("episodes", "#d", "d", 3.0, 4.0),
    ]
    lanes = ["episodes 0", "episodes 0", "episodes 1", "episodes 0", "episodes 1", "episodes 0"]
    assert laid_out(spans) == lanes


def test_spans_of_a_lane_that_do_not_nest_are_shown_in_a_lane_more():
    spans = [
        ("rewards", "math", "a", 0.0, 2.0),
        ("rewards", "math", "b", 1.0, 3.0),
        ("rewards", "math", "c", 2.0, 3.0),
    ]
    assert laid_out(spans) == ["math", "math (2)", "math"]


def test_a_trace_has_named_lanes_and_microseconds():
    trace = as_trace(
        [("controller", "run", "step 1", 100.0, 102.0), ("actor", "rank 1", "save", 101.0, 101.5)]
    )
    assert [e for e in trace["traceEvents"] if e["ph"] == "X"] == [
        {"ph": "X", "name": "step 1", "pid": 1, "tid": 1, "ts": 0.0, "dur": 2e6},
        {"ph": "X", "name": "save", "pid": 2, "tid": 2, "ts": 1e6, "dur": 5e5},
    ]
    named = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in trace["traceEvents"]
        if "name" in e.get("args", {})
    }
    assert named == {(1, None): "controller", (2, None): "actor", (1, 1): "run", (2, 2): "rank 1"}
    json.dumps(trace, allow_nan=False)


def test_the_spans_of_steps_are_those_that_overlap_them():
    steps = [("controller", "run", f"step {n}", float(n), n + 1.0) for n in range(1, 5)]
    ahead = ("requests", "#3:0:0", "3:0:0", 1.5, 2.5)
    spans = sorted([*steps, ahead], key=lambda span: span[3])
    assert names(of_steps(spans, 2, 2)) == ["3:0:0", "step 2"]
    assert names(of_steps(spans, 3, 4)) == ["step 3", "step 4"]
    with pytest.raises(DataError, match="--steps 5:6: the timeline has steps 1 to 4"):
        of_steps(spans, 5, 6)
    with pytest.raises(DataError, match="has no whole step"):
        of_steps([ahead], 1, 1)
