"""GRPO steps of this engine beside those of TRL 1.16: gates, then seconds a step.

    python benchmarks/trl/compare.py                      # CPU, two lanes, ten minutes on 2 idle cores
    python benchmarks/trl/compare.py --device cuda --devices 0,1,2,3 --workload gpu --sampler vllm

TRL gets a virtual environment of its own in ``.cache/trl`` (made at the first call, minutes), or ``--trl-python``. Every
run is a process of its own. Exits with 1 where a gate fails or was not run: the figures are void then.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import workload as given
from jobs import FRAMEWORKS, Command, Found, Job, Pool

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LANES = ("matched", "best-effort")
ORDER = ("trl", "engine", "engine", "trl")  # of a round of processes one after another
PRECISION = {("cpu", "matched"): "fp32"}  # of the arithmetic, by device and lane; elsewhere bf16
LEARNING_STEPS = 8
GATE_STEPS = 2
SEEDS = (0, 1, 2)


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


def commands(arguments: argparse.Namespace) -> dict[str, Command]:
    """How each framework's script is called, and in which environment."""
    threads = str(arguments.threads)
    shared = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    pythons = {"engine": Path(sys.executable), "trl": arguments.trl_python or make_environment()}
    paths = {"engine": os.environ.get("PYTHONPATH", ""), "trl": arguments.trl_path}
    told = ("--device", arguments.device, "--sampler", arguments.sampler)
    return {
        name: Command(
            [str(pythons[name]), str(FOLDER / f"{name}_run.py"), *told],
            shared | ({"PYTHONPATH": paths[name]} if paths[name] else {}),
        )
        for name in FRAMEWORKS
    }


def plan(arguments: argparse.Namespace, folder: Path) -> list[Job]:
    """All jobs, in their order: the gates of all lanes, without which figures say nothing, then figures, then learning.

    Args:
        arguments: of the command line.
        folder: where TRL's batches go.
    """
    jobs: list[Job] = []
    for lane in arguments.lanes:
        jobs += checking(arguments, lane, folder / f"{lane}.safetensors")
    for lane in () if arguments.gates_only else arguments.lanes:
        jobs += timing(arguments, lane)
    return jobs + ([] if arguments.no_learning else learning(arguments))


def changes(arguments: argparse.Namespace, framework: str) -> str:
    """Settings of a framework over those of its lanes, as JSON."""
    text: str = getattr(arguments, f"set_{framework}")
    return text


def timing(arguments: argparse.Namespace, lane: str) -> list[Job]:
    """Rounds of one lane. On devices of their own, processes run side by side: one of each framework a round."""
    total = arguments.warm_up + arguments.steps
    order = FRAMEWORKS if len(arguments.devices) > 1 else ORDER
    numbers = dict.fromkeys(FRAMEWORKS, 0)
    jobs = []
    for framework in order * arguments.rounds:
        numbers[framework] += 1
        options = {
            "lane": lane,
            "steps": total,
            "warm-up": arguments.warm_up,
            "set": changes(arguments, framework),
        }
        name = f"{lane} {framework} time {numbers[framework]}"
        jobs.append(Job(name, framework, "time", arguments.workload, options))
    return jobs


def checking(arguments: argparse.Namespace, lane: str, batch: Path) -> list[Job]:
    """G1 to G3. TRL dumps a batch; what the engine makes of it needs no sampler, so vLLM does not start for that."""
    trl = f"{lane} trl gates"
    steps, of_batch = {"lane": lane, "steps": GATE_STEPS}, {"lane": lane, "batch": batch}
    ours, theirs = ({"set": changes(arguments, name)} for name in ("engine", "trl"))
    workload = arguments.workload
    return [
        Job(trl, "trl", "gates", workload, steps | of_batch | theirs),
        Job(f"{lane} engine gates", "engine", "gates", workload, steps | ours),
        Job(f"{lane} engine same", "engine", "same", workload, of_batch | ours, (trl,)),
    ]


def learning(arguments: argparse.Namespace) -> list[Job]:
    """G4, in the matched lane. vLLM starts once a process: a process a seed, unless both sample with transformers on the CPU."""
    on_cpu = arguments.learn_on_cpu
    apart = arguments.sampler == "vllm" and not on_cpu
    seeds: Sequence[Sequence[int]] = [[seed] for seed in SEEDS] if apart else [SEEDS]
    options: dict[str, Any] = {"steps": LEARNING_STEPS, "lr": given.LEARNING_RATE_TO_LEARN}
    if on_cpu:
        options |= {"device": "cpu", "sampler": "hf"}
    return [
        Job(
            f"learn {name} {number}",
            name,
            "learn",
            arguments.learn_workload,
            options | {"seeds": list(each)},
            on_cpu=on_cpu,
        )
        for number, each in enumerate(seeds)
        for name in FRAMEWORKS
    ]


def summary(arguments: argparse.Namespace, found: Found) -> dict[str, Any]:
    """Everything that is known so far, for ``--out``."""
    device = arguments.device
    other = "bf16" if device == "cpu" else "bf16 gpu"
    rounding = {lane: PRECISION.get((device, lane), other) for lane in arguments.lanes}
    first: Mapping[str, Any] = next(iter(found.results.values()), {})
    return {
        "workload": arguments.workload, "device": device, "sampler": arguments.sampler,
        "sizes": vars(given.WORKLOADS[arguments.workload]), "inputs": first.get("inputs"),
        "side_by_side": len(arguments.devices) > 1,
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "gates": [{"lane": lane, **vars(gate)} for lane, gate in report.gates(found, arguments.lanes, rounding)],
        "rewards": report.rewards(found.results),
        "lanes": {lane: report.lane(found.results, lane) for lane in arguments.lanes},
        "failures": found.failures, "seconds": found.seconds,
    }  # fmt: skip


def show(told: Mapping[str, Any]) -> None:
    """Table, gates and failures, on the terminal."""
    print(f"\n{report.table(told['lanes'])}\n")
    for gate in told["gates"]:
        state = "passed" if gate["passed"] else "FAILED"
        print(f"{state}  {gate['lane']:11} {gate['name']}: {gate['found']}")
    for name, why in told["failures"].items():
        print(f"FAILED  {name}: {why}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lanes", nargs="*", choices=LANES, default=list(LANES))
    parser.add_argument(
        "--rounds", type=int, default=1,
        help="each is TRL, engine, engine, TRL; on several devices one of each, side by side",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=5, help="timed, of each process")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), default=[""],
        help="numbers of GPUs, as in 0,1,2,3: a process on each at the same time, which sees no other",
    )  # fmt: skip
    parser.add_argument("--workload", choices=given.WORKLOADS, default="cpu")
    parser.add_argument("--learn-workload", choices=given.WORKLOADS, default="learn", help="of gate G4")
    parser.add_argument(
        "--no-learning", action="store_true", help="without gate G4, which then counts as failed"
    )
    parser.add_argument(
        "--learn-on-cpu", action="store_true",
        help="gate G4 beside the devices: of both frameworks on the CPU, sampling with transformers",
    )  # fmt: skip
    parser.add_argument("--gates-only", action="store_true", help="no timed steps")
    parser.add_argument("--sampler", choices=("hf", "vllm"), default="hf")
    parser.add_argument(
        "--set-trl", default="{}", help="JSON: arguments of GRPOConfig over those of every lane"
    )
    parser.add_argument("--set-engine", default="{}", help="JSON: keys of the run file, likewise")
    parser.add_argument(
        "--trl-python", type=Path, help="of an environment with trl 1.16; default: one is made"
    )
    parser.add_argument("--trl-path", default="", help="PYTHONPATH of TRL's processes; default: none")
    parser.add_argument("--budget", type=float, default=7200, help="seconds; then what runs is ended")
    parser.add_argument(
        "--keep", type=Path,
        help="folder for what each process writes: called again with it, only what is missing there is run",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON with everything, written anew after each process")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    started, load = time.perf_counter(), os.getloadavg()

    def told(found: Found) -> dict[str, Any]:
        made = summary(arguments, found)
        made["machine"] |= {"load_before": load, "load_after": os.getloadavg()}
        made["minutes"] = (time.perf_counter() - started) / 60
        if arguments.out:
            arguments.out.write_text(json.dumps(made, indent=1) + "\n")
        return made

    with tempfile.TemporaryDirectory() as name:
        folder, called = arguments.keep or Path(name), commands(arguments)
        folder.mkdir(parents=True, exist_ok=True)
        for workload in (arguments.workload, arguments.learn_workload):
            given.make(given.WORKLOADS[workload], given.CACHE / "workloads")
        left = arguments.budget - (time.perf_counter() - started)
        pool = Pool(called, arguments.devices, folder, left, on_end=told)
        everything = told(pool.run(plan(arguments, folder)))
    show(everything)
    print(
        f"{everything['minutes']:.1f} minutes; load of the machine before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}"
    )
    failed = [f"{gate['name']} ({gate['lane']})" for gate in everything["gates"] if not gate["passed"]]
    if failed:
        print(f"The figures are void: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed or everything["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
