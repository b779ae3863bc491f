"""GRPO steps of this engine beside those of TRL 1.16: gates, then seconds a step.

    python benchmarks/trl/compare.py                      # CPU, two lanes, ten minutes on 2 idle cores
    python benchmarks/trl/compare.py --device cuda --workload gpu

TRL gets a virtual environment of its own in ``.cache/trl`` (made at the first call, minutes). Every run is a
process of its own; within a round they come as TRL, engine, engine, TRL. Exits with 1 where a gate fails: the
figures are void then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import figures
import workload as given

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LANES = ("matched", "best-effort")
ORDER = ("trl", "engine", "engine", "trl")
PRECISION = {("cpu", "matched"): "fp32"}  # of the arithmetic, by device and lane; elsewhere bf16
LEARNING_STEPS = 8


def make_environment() -> Path:
    """Python of TRL's virtual environment, made where it is not there."""
    folder = given.CACHE / "venv"
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.exists():
        return python
    print(f"Making TRL's environment in {folder}: takes minutes.", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    nice = ["nice"] if shutil.which("nice") else []
    subprocess.run([*nice, sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*nice, *pip, "trl==1.16.*", "-c", str(ROOT / "constraints.txt")], check=True)
    done.touch()
    return python


class Runner:
    """Runs both frameworks' scripts, each call a process of its own.

    Args:
        arguments: of the command line.
        folder: for what they write.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder, self.count = arguments, folder, 0
        self.python = {
            "engine": Path(sys.executable),
            "trl": arguments.trl_python or make_environment(),
        }
        self.results: list[dict[str, Any]] = []  # of the workload that is timed

    def run(self, framework: str, what: str, workload: str = "", **options: Any) -> dict[str, Any]:
        """What a script wrote.

        Args:
            framework: ``trl`` or ``engine``.
            what: ``time``, ``gates`` or ``learn``.
            workload: default: that of the command line.
            options: of the script.
        """
        self.count += 1
        out = self.folder / f"{self.count}.json"
        words = [str(self.python[framework]), str(FOLDER / f"{framework}_run.py"), what, "--out", str(out)]
        words += ["--workload", workload or self.arguments.workload]
        words += ["--device", self.arguments.device, "--sampler", self.arguments.sampler]
        for name, value in options.items():
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        started = time.perf_counter()
        done = subprocess.run(words, env=self._environment(framework), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        print(f"  {framework:6} {what:5} {time.perf_counter() - started:6.1f} s", flush=True)
        if not workload:
            self.results.append(result)
        return result

    def _environment(self, framework: str) -> dict[str, str]:
        plain = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH" or framework == "engine"
        }
        threads = str(self.arguments.threads)
        return plain | {
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip


def check_lane(runner: Runner, lane: str) -> list[figures.Gate]:
    """G1 to G3."""
    precision = PRECISION.get((runner.arguments.device, lane), "bf16")
    batch = runner.folder / f"{lane}.safetensors"
    trl, engine = (runner.run(name, "gates", lane=lane, steps=2, batch=batch) for name in ("trl", "engine"))
    return [
        figures.same_maths(trl["same_batch"], engine["same_batch"], precision),
        figures.same_policy(engine["steps"], precision),
        figures.moved_weights("trl", trl["sampler"], trl["trainer"]),
        figures.moved_weights("engine", engine["sampler"], engine["trainer"]),
    ]


def check_learning(runner: Runner) -> tuple[figures.Gate, dict[str, Any]]:
    """G4, in the matched lane, and its curves."""
    learning = {"steps": LEARNING_STEPS, "lr": given.LEARNING_RATE_TO_LEARN, "seeds": [0, 1, 2]}
    curves = {name: runner.run(name, "learn", "learn", **learning)["rewards"] for name in ("trl", "engine")}
    return figures.learns(**curves), curves


def measure_lane(runner: Runner, lane: str) -> dict[str, Any]:
    """Rounds of one lane, and what comes of them."""
    arguments, steps = runner.arguments, {"trl": [], "engine": []}
    first: dict[str, list[float]] = {"trl": [], "engine": []}
    held: dict[str, Any] = {}
    for _ in range(arguments.rounds):
        for framework in ORDER:
            total = arguments.warm_up + arguments.steps
            held[framework] = runner.run(framework, "time", lane=lane, steps=total)
            first[framework].append(held[framework]["first_step_seconds"])
            steps[framework].append(held[framework]["steps"][arguments.warm_up :])
    wall, cpu = (
        {name: [[step[clock] for step in process] for process in each] for name, each in steps.items()}
        for clock in ("wall", "cpu")
    )
    flat = {name: [step for process in each for step in process] for name, each in steps.items()}
    ratio, low, high = figures.ratio_interval(wall["trl"], wall["engine"])
    found: dict[str, Any] = {
        "ratio": ratio, "interval": [low, high],
        "cpu_ratio": figures.ratio_interval(cpu["trl"], cpu["engine"])[0],
        "tokens": figures.same_tokens(flat["trl"], flat["engine"]),
    }  # fmt: skip
    for name, each in flat.items():
        seconds = figures.summary([step["wall"] for step in each])
        found[name] = {
            "wall": seconds, "cpu": figures.summary([step["cpu"] for step in each]),
            "generate": figures.summary([step["generate"] for step in each]),
            "response_tokens_per_second": each[0]["completion_tokens"] / seconds["median"],
            "train_tokens_per_second": each[0]["train_tokens"] / seconds["median"],
            "first_step_seconds": first[name], "processes": wall[name], "memory": held[name]["memory"],
            "settings": held[name]["settings"], "surroundings": held[name]["surroundings"],
        }  # fmt: skip
    return found


def table(lanes: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| lane | | seconds a step (p10 to p90) | of it sampling | CPU seconds | first step after | GiB | steps/s beside TRL (95%) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for lane, found in lanes.items():
        for name in ("trl", "engine"):
            each, low_high = found[name], found["interval"]
            beside = (
                f"**{found['ratio']:.2f}** ({low_high[0]:.2f} to {low_high[1]:.2f})"
                if name == "engine"
                else "1"
            )
            wall = each["wall"]
            lines.append(
                f"| {lane} | {name} | {wall['median']:.2f} ({wall['p10']:.2f} to {wall['p90']:.2f}) "
                f"| {each['generate']['median']:.2f} | {each['cpu']['median']:.2f} "
                f"| {max(each['first_step_seconds']):.0f} s | {max(each['memory'].values()):.1f} | {beside} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lanes", nargs="*", choices=LANES, default=list(LANES))
    parser.add_argument("--rounds", type=int, default=1, help="each is TRL, engine, engine, TRL")
    parser.add_argument("--steps", type=int, default=5, help="timed, of each process")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workload", choices=given.WORKLOADS, default="cpu")
    parser.add_argument("--sampler", default="hf", help="hf, or vllm where both have it")
    parser.add_argument(
        "--trl-python", type=Path, help="of an environment with trl 1.16; default: one is made"
    )
    parser.add_argument("--out", type=Path, help="JSON with everything")
    arguments = parser.parse_args()
    started, load = time.perf_counter(), os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(arguments, Path(folder))
        given.make(given.WORKLOADS[arguments.workload], given.CACHE / "workloads")
        print("Learning", flush=True)
        learning, curves = check_learning(runner)
        gates = [("both", learning)]
        lanes = {}
        for lane in arguments.lanes:
            print(f"Lane {lane}", flush=True)
            gates += [(lane, gate) for gate in check_lane(runner, lane)]
            lanes[lane] = measure_lane(runner, lane)
            gates.append((lane, lanes[lane].pop("tokens")))
    gates.append(("both", figures.same_inputs(runner.results)))
    print(f"\n{table(lanes)}\n")
    for lane, gate in gates:
        print(f"{'passed' if gate.passed else 'FAILED'}  {lane:11} {gate.name}: {gate.found}")
    minutes = (time.perf_counter() - started) / 60
    print(f"{minutes:.1f} minutes; load of the machine before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}")
    if arguments.out:
        result = {
            "workload": arguments.workload, "device": arguments.device, "sampler": arguments.sampler,
            "sizes": vars(given.WORKLOADS[arguments.workload]), "inputs": runner.results[0]["inputs"],
            "machine": {
                "system": platform.platform(), "cores": os.cpu_count(),
                "load_before": load, "load_after": os.getloadavg(),
            },
            "minutes": minutes, "gates": [{"lane": lane, **vars(gate)} for lane, gate in gates], "rewards": curves, "lanes": lanes,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    failed = [f"{gate.name} ({lane})" for lane, gate in gates if not gate.passed]
    if failed:
        print(f"The figures are void: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
