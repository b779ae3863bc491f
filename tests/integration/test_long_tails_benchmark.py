"""The benchmark of long tails: its lengths are those that it tells of, and each of its runs is a valid one."""

import argparse
import json
import runpy
import shutil
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core import load_config

FOLDER = Path(__file__).parents[2] / "benchmarks" / "async"


def _script(name):
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def lengths():
    pytest.importorskip("vllm")
    return _script("forced_lengths")


@pytest.fixture(scope="module")
def runs():
    return _script("tail_runs")


@pytest.fixture(scope="module")
def summary():
    return _script("tail_summary")


def given(**changes):
    found = {
        "gpus": 2, "device": "cpu", "runtime": "torchrun", "train_gpus": 1, "transport": "broadcast", "sampler": "vllm",
        "serve": "process", "prompts": 64, "prompt": 256, "group_size": 8, "median": 300, "p99": 4096, "cap": 8192,
        "staleness": 2, "updates": "keep", "short_steps": 2, "short_cap": 128, "steps": 6,
        "sync_seqs": 256, "async_seqs": 128, "eager": False,
        "sync_without_log_probs": False, "token_ms": 0.0,
    }  # fmt: skip
    return argparse.Namespace(**found | changes)


def test_lengths_are_lognormal_with_the_median_and_the_percentile_that_are_asked_for(lengths):
    options = lengths.ForcedHFOptions()
    drawn = sorted(
        lengths.length_of(f"{step}:{group}:{index}", options)
        for step in range(1, 41)
        for group in range(64)
        for index in range(8)
    )
    assert statistics.median(drawn) == pytest.approx(300, rel=0.03)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(4096, rel=0.1)
    assert drawn[-1] == 8192
    assert drawn[0] >= 1


def test_a_response_has_its_length_by_its_id_and_the_seed_alone(lengths):
    options = lengths.ForcedHFOptions()
    ids = [f"3:{group}:1" for group in range(40)]
    assert [lengths.length_of(id, options) for id in ids] == [lengths.length_of(id, options) for id in ids]
    other = lengths.ForcedHFOptions(length_seed=1)
    assert [lengths.length_of(id, options) for id in ids] != [lengths.length_of(id, other) for id in ids]


def test_the_first_steps_are_short(lengths):
    options = lengths.ForcedHFOptions(short_steps=2, short_cap=16)
    assert max(lengths.length_of(f"2:{group}:0", options) for group in range(200)) == 16
    assert max(lengths.length_of(f"3:{group}:0", options) for group in range(200)) > 16


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("sync", {}),
        ("sync", {"device": "auto", "gpus": 4}),
        ("sync", {"sync_without_log_probs": True}),
        ("early", {}),
        ("early", {"device": "auto"}),
        ("async", {}),
        ("pools", {}),
        ("stream", {}),
        ("async", {"device": "auto", "gpus": 4}),
        ("async", {"gpus": 4, "train_gpus": 2}),
        ("async", {"gpus": 4, "serve": "worker"}),
        ("async", {"runtime": "ray", "transport": "tcp", "updates": "abort"}),
        ("colocated", {"device": "auto", "eager": True}),
        ("colocated", {"sampler": "hf"}),
    ],
)
def test_each_case_is_a_valid_run(lengths, runs, tmp_path, case, changes):
    if changes.get("runtime") == "ray":
        pytest.importorskip("ray")
    shutil.copy(FOLDER / "forced_lengths.py", tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "t2"}\n')
    text, first, last = runs.settings(case, given(**changes))
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml")
    assert config.trainer == ("rl" if case in ("sync", "early", "pools", "stream") else "async")
    assert config.rollout.stream_update == (case == "stream")
    assert config.rollout.partial_rollouts == (case == "early")
    assert sum(config.placement.pools.values() or [config.runtime.options.processes]) == given(**changes).gpus
    # ahead: whatever counts has as many groups sampled beside it as in a run that goes on
    assert config.run.steps == last + (2 if config.trainer == "async" else 0)
    # ahead: what counts was sampled after the short steps, but for the first that is learned from; in turn the same steps count
    assert (first, last) == (6, 11)
    # and one long step goes before them
    assert config.rollout.options.short_steps == (4 if case in ("sync", "pools", "stream") else 2)


def test_the_rate_is_steps_by_elapsed_time_and_compared_in_the_steps_that_count_in_both_on_as_many_gpus(
    summary, tmp_path, capsys
):
    def lines(*seconds):
        return [
            {"step": step, "time/step": value, "tokens/generated": 100.0, "async/staleness_max": float(step)}
            for step, value in enumerate(seconds, 1)
        ]

    sync, ahead = summary.summary(lines(50, 4, 4), 2, 3), summary.summary(lines(50, 1, 1, 4), 2, 4)
    assert (sync["steps_per_s"], sync["tokens_per_s"], sync["counted"]) == (0.25, 25.0, 2)
    assert (ahead["steps_per_s"], ahead["step_s_median"], ahead["async/staleness_max"]) == (0.5, 1, 4)
    for case, found in (("sync", sync), ("async", ahead)):
        told = found | {"case": case, "gpus": 2, "ended": "done"}
        (tmp_path / f"long_tails_2_{case}.json").write_text(json.dumps(told))
    nothing = summary.summary(lines(50), 2, 4) | {"case": "colocated", "gpus": 4, "ended": "exit status 1"}
    (tmp_path / "long_tails_4_colocated.json").write_text(json.dumps(nothing))
    summary.show(tmp_path)
    shown = capsys.readouterr().out
    assert "| 2 | async | 3 | 0.5000 | 4.00x | 50 | 1.00 |" in shown
    assert "| 4 | colocated | 0 |" in shown
    assert "exit status 1 |" in shown


@pytest.fixture(scope="module")
def transport():
    pytest.importorskip("vllm")
    return _script("transport")


@pytest.mark.parametrize("gpus", [0, 4])
def test_each_way_of_weights_is_a_valid_run(transport, tmp_path, gpus):
    (tmp_path / "data.jsonl").write_text('{"prompt": "t2", "answer": "1"}\n')
    for case in transport.CASES.values():
        if "transport" not in case:
            continue
        (tmp_path / "run.toml").write_text(transport.run_file(case, gpus, "torchrun", tmp_path))
        config = load_config(tmp_path / "run.toml")
        assert config.rollout.transport == case["transport"]
        assert config.rollout.backend == case.get("sampler", "hf")
        assert (config.rollout.process is not None) == case.get("process", False)
        # a worker for each GPU that the case takes: it is listed where there are as many
        workers = sum(config.placement.pools.values()) or config.runtime.options.processes
        assert workers == case["gpus"]
