"""The benchmark beside TRL: its arithmetic, its gates, and two steps of the engine's side.

TRL's side runs in an environment of its own, which ``benchmarks/trl/compare.py`` makes.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "trl"


@pytest.fixture(scope="module")
def benchmark():
    """Modules of the benchmark by name, which find each other in its folder."""
    names = ("figures", "jobs", "workload", "report", "compare")
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def figures(benchmark):
    return benchmark["figures"]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.1, 1.4), (0.5, 3.0), (0.9, 7.4), (1.0, 9.0)])
def test_percentiles_are_between_neighbours(figures, share, expected):
    assert figures.percentile([3.0, 1.0, 9.0, 5.0, 2.0], share) == pytest.approx(expected)


def test_a_ratio_is_of_medians_and_its_interval_holds_it(figures):
    slow, fast = [[4.0, 4.2, 4.1], [4.3, 3.9, 4.1]], [[2.0, 2.1, 2.2], [1.9, 2.0, 2.0]]
    ratio, low, high = figures.ratio_interval(slow, fast)
    assert ratio == pytest.approx(4.1 / 2.0)
    assert 3.9 / 2.2 <= low < ratio < high <= 4.3 / 1.9
    assert figures.ratio_interval(slow, fast) == (ratio, low, high)  # the same draw each time


def test_steps_that_do_not_vary_have_an_interval_of_a_point(figures):
    assert figures.ratio_interval([[3.0] * 4], [[2.0] * 4]) == (1.5, 1.5, 1.5)


def found_of(**changes):
    case = {"loss": 0.25, "grad_norm": 2.0}
    found = {"rewards": [0.5, 1.0], "advantages": [-1.0, 1.0], "log_probs": [[-1.0], [-2.0]]}
    return found | {"on_policy": case, "off_policy": case} | changes


@pytest.mark.parametrize(
    "other",
    [
        {"rewards": [0.5, 1.1]},
        {"advantages": [-1.0, 1.00002]},
        {"log_probs": [[-1.0], [-2.00002]]},
        {"on_policy": {"loss": 0.25002, "grad_norm": 2.0}},
        {"off_policy": {"loss": 0.25, "grad_norm": 2.00003}},
    ],
)
def test_other_maths_fails_its_gate(figures, other):
    assert figures.same_maths(found_of(), found_of(), "fp32").passed
    assert not figures.same_maths(found_of(), found_of(**other), "fp32").passed


@pytest.mark.parametrize(
    ("step", "passes"),
    [
        ({"gap": 1e-6, "ratio": 1.0, "kl": 0.0}, True),
        ({"gap": 1e-2, "ratio": 1.0, "kl": 0.0}, False),
        ({"gap": 1e-6, "ratio": 1.0 + 1e-7, "kl": 0.0}, False),
        ({"gap": 1e-6, "ratio": 1.0, "kl": 1e-9}, False),
    ],
)
def test_the_first_ratio_must_be_exactly_1(figures, step, passes):
    assert figures.same_policy([step, {"gap": 1e-6, "ratio": 1.1, "kl": 0.1}], "fp32").passed is passes


@pytest.mark.parametrize(
    ("sampler", "trainer", "passes"),
    [
        (["a", "b", "c"], ["a", "b", "c"], True),
        (["a", "a", "b"], ["a", "b", "c"], False),  # a step behind
        (["a", "a", "a"], ["a", "a", "a"], False),  # nothing was learned
        (["a"], ["a"], False),  # one step shows nothing
    ],
)
def test_weights_must_move_and_arrive(figures, sampler, trainer, passes):
    assert figures.moved_weights("x", sampler, trainer).passed is passes


def test_both_must_learn_and_alike(figures):
    rising = [[0.5, 0.6, 0.7, 0.8], [0.5, 0.6, 0.7, 0.9]]
    assert figures.learns(rising, [[0.5, 0.6, 0.7, 0.85]]).passed
    assert not figures.learns(rising, [[0.5, 0.5, 0.5, 0.5]]).passed  # does not rise
    assert not figures.learns(rising, [[0.5, 0.6, 0.6, 0.7]]).passed  # rises elsewhere


def test_tokens_may_differ_by_two_percent(figures):
    def steps(n):
        return [{"completion_tokens": float(n)}]

    assert figures.same_tokens(steps(8192), steps(8100)).passed
    assert not figures.same_tokens(steps(8192), steps(8000)).passed


def test_inputs_must_be_one(figures):
    one, other = ({"inputs": {"model_sha256": name, "data_sha256": "d"}} for name in "ab")
    assert figures.same_inputs([one, one]).passed
    assert not figures.same_inputs([one, other]).passed


def test_the_engines_side_runs_two_steps_of_full_responses(tmp_path):
    out = tmp_path / "engine.json"
    words = [sys.executable, str(FOLDER / "engine_run.py"), "time", "--workload", "tiny", "--steps", "2"]
    words += ["--cache", str(tmp_path / "workloads"), "--out", str(out)]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [step["completion_tokens"] for step in found["steps"]] == [64.0, 64.0]  # 2 x 4 responses of 8
    assert [step["train_tokens"] for step in found["steps"]] == [112.0, 112.0]
    assert found["steps"][0]["ratio"] == 1.0
    assert all(step["wall"] > 0 and step["cpu"] > 0 for step in found["steps"])
    assert found["first_step_seconds"] > found["steps"][0]["wall"]


SCRIPT = """
import json, os, sys, time
what, arguments = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))
if what == "fail":
    raise SystemExit("no such luck")
if what == "hang":
    time.sleep(600)
with open(arguments["--out"], "w") as file:
    json.dump({"device": os.environ.get("CUDA_VISIBLE_DEVICES"), "lane": arguments.get("--lane")}, file)
"""


@pytest.fixture
def run_jobs(benchmark, tmp_path):
    """Runs (name, what, options, after) as processes of a small script."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(described, devices=("",), budget=120.0, on_end=lambda found: None):
        jobs = benchmark["jobs"]
        environment = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"}
        command = jobs.Command([sys.executable, str(script)], environment)
        pool = jobs.Pool({"trl": command}, devices, tmp_path, budget, on_end)
        return pool.run(
            [jobs.Job(name, "trl", what, "tiny", options, after) for name, what, options, after in described]
        )

    return run


def test_each_process_sees_the_gpu_of_its_own(run_jobs):
    found = run_jobs(
        [(name, "time", {"lane": "matched"}, ()) for name in ("one", "two", "three")], ("4", "7")
    )
    assert set(found.results) == {"one", "two", "three"}
    assert {each["device"] for each in found.results.values()} <= {"4", "7"}
    assert all(each["lane"] == "matched" for each in found.results.values())


def test_a_process_without_gpus_named_keeps_the_environment(run_jobs):
    assert run_jobs([("one", "time", {}, ())]).results["one"]["device"] is None


def test_a_process_that_fails_stops_only_what_needs_it(run_jobs):
    told = []
    jobs = [
        ("bad", "fail", {}, ()),
        ("needs bad", "gates", {}, ("bad",)),
        ("good", "time", {}, ()),
        ("needs good", "gates", {}, ("good",)),
    ]
    found = run_jobs(jobs, on_end=lambda found: told.append(set(found.results)))
    assert set(found.results) == {"good", "needs good"}
    assert "no such luck" in found.failures["bad"]
    assert found.failures["needs bad"] == "not begun: it needs 'bad', which failed"
    assert told == [set(), {"good"}, {"good", "needs good"}]


def test_when_the_time_is_up_what_runs_is_ended_and_the_rest_not_begun(run_jobs):
    found = run_jobs([("slow", "hang", {}, ()), ("later", "time", {}, ())], budget=1.5)
    assert found.results == {}
    assert found.failures["slow"].startswith("ended: the time was up")
    assert found.failures["later"] == "not begun: the time was up"


def timed_result(seconds, warm_up=1):
    step = {"cpu": 1.0, "generate": 0.5, "completion_tokens": 64.0, "train_tokens": 112.0}
    return {
        "steps": [step | {"wall": wall} for wall in seconds], "warm_up": warm_up, "first_step_seconds": 9.0,
        "memory": {"resident_gib": 1.0}, "settings": {}, "surroundings": {},
        "inputs": {"model_sha256": "m", "data_sha256": "d"},
    }  # fmt: skip


def test_a_report_leaves_out_warm_up_and_says_what_is_missing(benchmark):
    report, found = benchmark["report"], benchmark["jobs"].Found()
    found.results["matched trl time 1"] = timed_result([50.0, 4.0, 4.0])
    half = report.table({"matched": report.lane(found.results, "matched")})
    assert "| matched | engine | not measured |" in half
    found.results["matched engine time 1"] = timed_result([90.0, 2.0, 2.0])
    found.failures["matched trl gates"] = "exit 1"
    lane = report.lane(found.results, "matched")
    assert lane["ratio"] == 2.0
    assert lane["trl"]["processes"] == [[4.0, 4.0]]
    gates = {gate.name[:2]: gate for _, gate in report.gates(found, ["matched"], {"matched": "fp32"})}
    assert {name for name, gate in gates.items() if gate.passed} == {"G0", "G5"}
    assert gates["G1"].found == gates["G4"].found == "not run"


def test_two_frameworks_take_turns_on_one_device_and_run_side_by_side_on_several(
    benchmark, monkeypatch, tmp_path
):
    def planned(*words):
        monkeypatch.setattr(sys, "argv", ["compare.py", *words])
        arguments = benchmark["compare"].parse()
        return benchmark["compare"].plan(arguments, tmp_path)

    turns = [job.framework for job in planned("--lanes", "matched") if job.what == "time"]
    assert turns == ["trl", "engine", "engine", "trl"]
    beside = planned("--lanes", "matched", "--devices", "0,1", "--device", "cuda", "--sampler", "vllm")
    assert [job.framework for job in beside if job.what == "time"] == ["trl", "engine"]
    assert [job.options["seeds"] for job in beside if job.name.startswith("learn trl")] == [[0], [1], [2]]
    names = {job.name for job in beside}
    assert len(names) == len(beside)
    assert all(needed in names for job in beside for needed in job.after)
