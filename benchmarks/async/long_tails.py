"""Steps per second with long-tailed responses: in turn, carried over, and with rollouts that run ahead, on the same GPUs.

    python benchmarks/async/long_tails.py --gpus 2 --budget 400
    python benchmarks/async/long_tails.py --gpus 2 --shape tiny --device cpu --budget 300      # a try on a CPU

Each case is a run of the engine in processes of its own: GRPO of a random model, 64 prompts x 8 responses, of lengths that
``forced_lengths.py`` draws (lognormal: median 300, p99 4,096, cap 8,192). The first steps are short, to compile; then come the
steps that count. ``long_tails_GPUS_CASE.json`` in ``$OUT`` is written after each case, and the table is of all that lie there, so
that cases may run at one time on GPUs of their own (``--cases``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tail_runs import Run, settings
from tail_summary import show, summary

HERE = Path(__file__).resolve().parent
CASES = ("sync", "early", "colocated", "async", "pools", "stream")
"""In turn on all GPUs; the same, unfinished responses carried over; ahead, with trainer and sampler on all GPUs; ahead, with
GPUs of their own for each; in turn, with GPUs of their own for each; the same, and complete groups are learned from while
others are sampled."""
LEAST_SECONDS = 60.0  # for another attempt


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gpus", type=int, default=2, help="processes, each on a GPU of its own")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--runtime", choices=("torchrun", "ray"), default="torchrun")
    parser.add_argument("--train-gpus", type=int, default=1, help="cases async, pools and stream: of --gpus")
    parser.add_argument(
        "--transport",
        default="broadcast",
        help="cases async, pools and stream: rollout.transport; where it fails, tcp",
    )
    parser.add_argument("--sampler", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--serve", choices=("process", "worker"), default="process",
                        help="case async: vLLM in a process beside the pool's worker, or in it")  # fmt: skip
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--median", type=int, default=300, help="tokens of a response")
    parser.add_argument("--p99", type=int, default=4096)
    parser.add_argument("--cap", type=int, default=8192)
    parser.add_argument(
        "--token-ms", type=float, default=0.0, help="sampler hf: least time for a token of all sequences"
    )
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--updates", choices=("keep", "abort", "drain"), default="keep")
    parser.add_argument("--short-steps", type=int, default=2, help="first steps, with --short-cap tokens")
    parser.add_argument("--short-cap", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="that count, the same in each case")
    parser.add_argument("--sync-seqs", type=int, default=256, help="decoded at one time by one sampler")
    parser.add_argument("--async-seqs", type=int, default=512, help="more steps are in flight at one time")
    parser.add_argument("--sync-without-log-probs", action="store_true",
                        help="case sync: another objective, that asks the sampler for none after the first step")  # fmt: skip
    parser.add_argument(
        "--eager", action="store_true", help="vLLM without graphs: starts sooner, samples slower"
    )
    parser.add_argument("--budget", type=float, default=600, help="seconds for all cases")
    parser.add_argument("--show", action="store_true", help="the table of what lies in $OUT alone")
    return parser.parse_args()


def world(folder: Path, given: argparse.Namespace) -> None:
    """Model, prompts and the plugin, in a process of its own, which leaves the GPU as it was."""
    folder.mkdir()
    code = "import sys; from pathlib import Path; from setting import write_model; write_model(sys.argv[1], Path(sys.argv[2]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "vllm"), *sys.path])}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if given.device == "cpu" else {}
    subprocess.run(
        [sys.executable, "-c", code, given.shape, str(folder / "model")], env=env, check=True, timeout=180
    )
    rng = random.Random(0)
    # words that do not begin like the end token t1, which is found inside of words
    lines = [
        " ".join(f"t{rng.randrange(200, 400)}" for _ in range(given.prompt))
        for _ in range(32 * given.prompts)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    shutil.copy(HERE / "forced_lengths.py", folder)


def attempts(case: str, given: argparse.Namespace) -> list[argparse.Namespace]:
    """What is tried of a case, one after the other, until steps were counted."""
    found = [given]
    if case in ("async", "pools", "stream") and (given.transport, given.serve) != ("tcp", "process"):
        found.append(argparse.Namespace(**vars(given) | {"transport": "tcp", "serve": "process"}))
    return found


def measured(case: str, folder: Path, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The first attempt that counts; what those before it ended with stands under ``before``."""
    end, before = time.monotonic() + seconds, []
    for number, attempt in enumerate(attempts(case, given)):
        place = folder / f"{case}-{number}"
        shutil.copytree(folder / "world", place)
        found = measure(case, place, attempt, end - time.monotonic())
        if found["counted"] or end - time.monotonic() < LEAST_SECONDS:
            break
        before.append({name: found.get(name) for name in ("ended", "wall_s", "log")})
    return found | {"before": before}


def measure(case: str, folder: Path, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One case: what its metrics say, or what went wrong."""
    text, first, last = settings(case, given)
    (folder / f"{case}.toml").write_text(text)
    began = time.monotonic()
    run = Run(folder, case, given.device == "cpu")
    ended = run.follow(last, seconds)
    found = summary(run.lines(), first, last)
    found |= {"case": case, "gpus": given.gpus, "ended": ended, "wall_s": time.monotonic() - began}
    if ended != "done":
        found["log"] = run.tail()
    return found | {"settings": {name: value for name, value in vars(given).items() if name != "show"}}


def main() -> None:
    """Every case that the budget has room for, then the table."""
    given = arguments()
    out = Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.budget
    with tempfile.TemporaryDirectory(prefix="long-tails-") as name:
        folder = Path(name)
        if not given.show:
            world(folder / "world", given)
        for number, case in enumerate([] if given.show else given.cases):
            left = end - time.monotonic()
            if left < 10:
                print(f"{case}: no time is left of --budget {given.budget:g}.", flush=True)
                continue
            try:
                # what a case leaves of its share is for those after it
                found = measured(case, folder, given, left / (len(given.cases) - number))
            except Exception as error:
                traceback.print_exc()
                found = {"case": case, "gpus": given.gpus, "ended": f"{type(error).__name__}: {error}"}
            (out / f"long_tails_{given.gpus}_{case}.json").write_text(json.dumps(found, indent=1) + "\n")
            print(
                json.dumps({k: v for k, v in found.items() if k not in ("settings", "steps")}, indent=1),
                flush=True,
            )
    show(out)


if __name__ == "__main__":
    main()
