"""Milliseconds in which the weights of a trainer reach a sampler on another GPU: by transport, and of which parts.

    python benchmarks/async/transport.py --budget 240                    # two GPUs
    python benchmarks/async/transport.py --shape tiny --budget 200       # a try on a CPU

``parts`` are two processes of this script with the transport ``broadcast`` between them and nothing else; every other case is
``engine bench sync`` of a run: train pool, serve pool, the sampler's own loading. Medians of ``--steps`` updates after two.
``transport.json`` in ``$OUT`` is written after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WARM = 2
LEAST_SECONDS = 20.0  # for a case to begin
RUN = """
[model]
path = "model"
[actor]
backend = "{engine}"
[actor.{engine}]
param_dtype = "{param}"
{sharding}
[rollout]
backend = "{sampler}"
transport = "{transport}"
weights = "own"
max_response_tokens = 64
{process}
[rollout.{sampler}]
{table}
[[reward]]
name = "numeric"
[data]
train = "data.jsonl"
max_prompt_tokens = 128
[runtime]
backend = "{runtime}"
[runtime.{runtime}]
startup_timeout_minutes = 3
command_timeout_minutes = 2
{processes}
{placement}
"""
CASES: Mapping[str, Mapping[str, Any]] = {
    "parts": {"gpus": 2},
    "broadcast hf": {"gpus": 2, "transport": "broadcast"},
    "broadcast vllm": {"gpus": 2, "transport": "broadcast", "sampler": "vllm"},
    "broadcast vllm process": {"gpus": 2, "transport": "broadcast", "sampler": "vllm", "process": True},
    "tcp hf": {"gpus": 2, "transport": "tcp"},
    "ipc hf, pools": {"gpus": 2, "transport": "ipc"},
    "auto hf": {"gpus": 2, "transport": "auto"},
    "ipc hf": {"gpus": 1, "transport": "auto", "process": True},
    "broadcast hf, 2 ranks": {"gpus": 3, "transport": "broadcast", "trainers": 2},
    "broadcast hf, 2 ranks, sharded": {
        "gpus": 3,
        "transport": "broadcast",
        "trainers": 2,
        "sharding": "full",
    },
}
"""By name; ``gpus``: that it takes."""


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument(
        "--cases", nargs="*", choices=list(CASES), help="default: those that there are GPUs for"
    )
    parser.add_argument("--runtime", choices=("torchrun", "ray"), default="torchrun")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--budget", type=float, default=300, help="seconds for all cases")
    return parser.parse_args()


def gpus() -> int:
    """That this process sees; it opens none."""
    import torch

    return torch.cuda.device_count()


def run_file(case: Mapping[str, Any], there: int, runtime: str, folder: Path) -> str:
    """Of one case."""
    gpu, trainers, sampler = there > 0, case.get("trainers", 1), case.get("sampler", "hf")
    engine = "torch" if trainers == 1 else "fsdp"
    pools = f'[placement]\npools = {{ train = {trainers}, serve = 1 }}\nactor = "train"\nrollout = "serve"'
    kind = "bf16" if gpu else "fp32"
    tables = {
        "hf": f'dtype = "{kind}"',
        "vllm": f'enforce_eager = true\nmax_model_len = 256\nsleep_level = 0\ndtype = "{"bfloat16" if gpu else "float32"}"',
    }
    return RUN.format(
        engine=engine,
        param=kind,
        sharding=f'sharding = "{case.get("sharding", "none")}"' if engine == "fsdp" else "",
        sampler=sampler,
        transport=case["transport"],
        process="[rollout.process]\nmax_restarts = 0" if case.get("process") else "",
        table=tables[sampler],
        runtime=runtime,
        processes="processes = 1" if case["gpus"] == 1 else "",
        placement=pools if case["gpus"] > 1 else "",
    )


def end_to_end(name: str, folder: Path, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """``engine bench sync`` of a case."""
    file = folder / "run.toml"
    file.write_text(run_file(CASES[name], gpus(), given.runtime, folder))
    code = "import sys; from engine_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["bench", "sync", str(file), "--steps", str(given.steps), "--warmup", str(WARM), "--json"]
    done = bounded([sys.executable, "-c", code, *words], seconds)
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-3000:]}
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return {
        "update_ms": 1000 * found["step_s"],
        "first_ms": 1000 * found["first_step_s"],
        "gb_per_s": found.get("gb_per_s", 0.0),
        "bytes": found["bytes"],
    }


def parts(folder: Path, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Both ends of ``broadcast`` as processes of their own; what the two say."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    place = folder / "parts"
    place.mkdir()
    command = [
        sys.executable,
        str(HERE / "transport_ends.py"),
        str(place),
        given.shape,
        str(WARM + given.steps),
    ]
    ends = [
        subprocess.Popen(
            [*command, str(number)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for number in (0, 1)
    ]
    end, said = time.monotonic() + seconds, []
    try:
        for process in ends:
            said.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])
    finally:
        for process in ends:
            if process.poll() is None:
                process.kill()
    files = [place / f"{number}.json" for number in (0, 1)]
    if any(process.returncode for process in ends) or not all(file.is_file() for file in files):
        return {"error": "\n".join(said)[-3000:]}
    sender, receiver = (json.loads(file.read_text()) for file in files)
    return sender | receiver


def bounded(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """A command, killed with what it started when its time is over."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()  # its workers end with it
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, 124, out, f"{err}\nno time left")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def world(folder: Path, shape: str) -> None:
    """A model folder and a row of data."""
    code = "import sys; from pathlib import Path; from setting import write_model; write_model(sys.argv[1], Path(sys.argv[2]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "vllm"), *sys.path])}
    subprocess.run(
        [sys.executable, "-c", code, shape, str(folder / "model")], env=env, check=True, timeout=180
    )
    (folder / "data.jsonl").write_text('{"prompt": "t200 t300", "answer": "1"}\n')


def main() -> None:
    """Every case that there is time and GPUs for, then the table."""
    given, there = arguments(), gpus()
    out = Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    end, found = time.monotonic() + given.budget, {}
    names = given.cases or [name for name, case in CASES.items() if not there or case["gpus"] <= there]
    with tempfile.TemporaryDirectory(prefix="transport-") as name:
        folder = Path(name)
        world(folder, given.shape)
        for case in names:
            left = end - time.monotonic()
            if left < LEAST_SECONDS:
                found[case] = {"error": "no time left"}
                continue
            began = time.monotonic()
            try:
                work = (
                    parts(folder, given, left) if case == "parts" else end_to_end(case, folder, given, left)
                )
            except Exception as error:
                traceback.print_exc()
                work = {"error": f"{type(error).__name__}: {error}"}
            found[case] = work | {"wall_s": time.monotonic() - began}
            about = {"gpus": there, "shape": given.shape, "runtime": given.runtime}
            (out / "transport.json").write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")
            print(case, json.dumps(found[case], indent=1), flush=True)
    print("| case | ms an update | first | GB/s | wall s |\n|---|---|---|---|---|")
    for case, of in found.items():
        if "error" in of:
            lines = of["error"].strip().splitlines()
            print(f"| {case} | {lines[-1][:160] if lines else 'failed'} | | | {of.get('wall_s', 0):.0f} |")
        else:
            print(
                f"| {case} | {of['update_ms']:.1f} | {of['first_ms']:.0f} | {of['gb_per_s']:.1f} | {of['wall_s']:.0f} |"
            )


if __name__ == "__main__":
    main()
