"""The benchmark beside TRL: its arithmetic, its gates, and two steps of the engine's side.

TRL's side runs in an environment of its own, which ``benchmarks/trl/compare.py`` makes.
"""

import importlib
import json
import os
import random
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


def rounded(size=0.006, wrong=None, shift=0.0, seed=1):
    """What a framework finds on a GPU of 4 x 500 tokens: exact log-probs, and those with an error of ``size`` each."""
    exact, draw = random.Random(0), random.Random(seed)
    rows = [[exact.uniform(-14.0, -10.0) for _ in range(500)] for _ in range(4)]
    noisy = [[value + shift + draw.gauss(0.0, size) for value in row] for row in rows]
    if wrong:
        rows[0][0] += wrong
    return found_of(log_probs=noisy) | {"float32": found_of(log_probs=rows)}


@pytest.mark.parametrize(
    ("engine", "passes"),
    [
        (rounded(seed=2), True),  # independent errors of one size, of which some are over 0.02 apart
        (rounded(size=0.0, seed=2), True),  # no error at all
        (rounded(size=0.018, seed=2), False),  # computed with fewer digits
        (rounded(shift=0.02, seed=2), False),  # all of them are off
        (rounded(wrong=2e-4, seed=2), False),  # one token of the exact ones is another
        (rounded(wrong=float("nan"), seed=2), False),
        (rounded(seed=2) | {"on_policy": {"loss": 0.28, "grad_norm": 2.0}}, False),
        (rounded(seed=2) | {"off_policy": {"loss": 0.25, "grad_norm": 2.05}}, False),
        (rounded(seed=2) | {"advantages": [-1.0, 1.03]}, False),
    ],
)
def test_on_a_gpu_log_probs_may_differ_as_rounding_makes_them_and_no_further(figures, engine, passes):
    trl = rounded()
    furthest = max(map(figures._furthest, trl["log_probs"], rounded(seed=2)["log_probs"]))
    assert furthest > figures.LOSS_WITHIN["bf16"]
    assert figures.same_maths(trl, engine, "bf16 gpu").passed is passes


def test_on_a_gpu_what_float32_finds_must_be_equal(figures):
    trl = rounded()
    for other in (
        {"advantages": [-1.0, 1.0002]},
        {"on_policy": {"loss": 0.2502, "grad_norm": 2.0}},
        {"off_policy": {"loss": 0.25, "grad_norm": 2.0004}},
    ):
        engine = rounded(seed=2)
        assert figures.same_maths(trl, engine, "bf16 gpu").passed
        engine["float32"] = engine["float32"] | other
        assert not figures.same_maths(trl, engine, "bf16 gpu").passed


def test_on_a_cpu_each_log_prob_is_held_to_its_bound_in_bfloat16(figures):
    trl = rounded(size=0.002)
    one = rounded(size=0.002)
    assert figures.same_maths(trl, one, "bf16").passed
    one["log_probs"][3][7] += 0.021
    assert not figures.same_maths(trl, one, "bf16").passed


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


@pytest.mark.slow
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
    told = {name: os.environ[name] for name in ("MASTER_PORT", "VLLM_PORT", "RANK", "PET_MASTER_PORT", "KEPT") if name in os.environ}
    json.dump({"device": os.environ.get("CUDA_VISIBLE_DEVICES"), "lane": arguments.get("--lane"), "told": told}, file)
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
        return pool.run([jobs.Job(name, "trl", what, "tiny", *more) for name, what, *more in described])

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


def test_processes_do_not_share_the_ports_of_whoever_started_them(run_jobs, monkeypatch):
    for name in ("MASTER_PORT", "VLLM_PORT", "RANK", "PET_MASTER_PORT", "KEPT"):
        monkeypatch.setenv(name, "29500")
    assert run_jobs([("one", "time", {}, ())]).results["one"]["told"] == {"KEPT": "29500"}


def test_a_process_for_the_cpu_runs_beside_those_on_gpus_and_sees_none(run_jobs):
    found = run_jobs([("gpu", "time", {}, ()), ("cpu", "learn", {}, (), True)], ("4",))
    assert {name: each["device"] for name, each in found.results.items()} == {"gpu": "4", "cpu": ""}


def test_what_an_earlier_call_has_left_is_not_run_again(run_jobs):
    first = run_jobs([("one", "time", {"lane": "x"}, ()), ("bad", "fail", {}, ())])
    assert set(first.results) == {"one"}
    jobs = [("one", "fail", {}, ()), ("bad", "gates", {"lane": "y"}, ("one",))]
    found = run_jobs(jobs)
    assert {name: each["lane"] for name, each in found.results.items()} == {"one": "x", "bad": "y"}
    assert set(found.seconds) == {"bad"}


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


def test_gates_alone_have_no_timed_steps_and_learn_on_the_cpu_once(benchmark, monkeypatch, tmp_path):
    words = ["--gates-only", "--learn-on-cpu", "--devices", "0,1", "--device", "cuda", "--sampler", "vllm"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    jobs = benchmark["compare"].plan(benchmark["compare"].parse(), tmp_path)
    assert [job.name for job in jobs] == [
        "matched trl gates", "matched engine gates", "matched engine same",
        "best-effort trl gates", "best-effort engine gates", "best-effort engine same",
        "learn trl 0", "learn engine 0",
    ]  # fmt: skip
    learning = [job for job in jobs if job.on_cpu]
    assert [job.what for job in learning] == ["learn", "learn"]
    for job in learning:
        assert (job.options["device"], job.options["sampler"], job.options["seeds"]) == (
            "cpu",
            "hf",
            [0, 1, 2],
        )


def test_without_timed_steps_tokens_are_counted_in_the_steps_of_the_gates(benchmark):
    report, found = benchmark["report"], benchmark["jobs"].Found()
    for name, tokens in (("trl", 8192.0), ("engine", 8000.0)):
        step = {"completion_tokens": tokens, "gap": 0.0, "ratio": 1.0, "kl": 0.0}
        found.results[f"matched {name} gates"] = {
            "steps": [step], "same_batch": found_of(), "sampler": ["a", "b"], "trainer": ["a", "b"],
            "inputs": {"model_sha256": "m", "data_sha256": "d"},
        }  # fmt: skip
    found.results["matched engine same"] = found.results["matched engine gates"]
    gates = {gate.name[:2]: gate for _, gate in report.gates(found, ["matched"], {"matched": "fp32"})}
    assert {name for name, gate in gates.items() if not gate.passed} == {"G4", "G5"}
    assert gates["G5"].found == "trl 8,192, engine 8,000"
