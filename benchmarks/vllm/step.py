"""Whole GRPO steps with the sampler in the trainer's process: seconds of each phase.

    python benchmarks/vllm/step.py --budget 200

64 prompts x 8 responses, 256 + 512 tokens, Qwen3-0.6B shape with random weights in bf16, one optimizer step. Trainer and
sampler stay resident beside each other; ``--trade LEVEL`` hands memory over between them instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setting import alone, device, median, write, write_model

RUN = """
plugins = ["coin.py"]
[model]
path = "model"
[actor]
backend = "torch"
max_tokens_per_rank = {micro}
[actor.optim]
lr = 1e-6
[actor.torch]
param_dtype = "{param}"
log_prob_chunk_tokens = 8192
log_prob_recompute = false
[rollout]
backend = "vllm"
log_probs_every_steps = {every}
group_size = 8
max_response_tokens = {response}
[rollout.vllm]
max_model_len = {length}
gpu_memory_utilization = 0.3
sleep_level = {level}
per_request_seeds = {seeds}
max_num_batched_tokens = {batched}
enforce_eager = {eager}
dtype = "{dtype}"
[[reward]]
name = "coin"
[algorithm]
mini_batch_prompts = {prompts}
correction.level = "{correction}"
[data]
train = "data.jsonl"
max_prompt_tokens = {prompt}
prompts_per_step = {prompts}
[runtime.local]
offload_idle_roles = {trade}
[tracking]
trackers = []
rollouts_every_steps = 0
"""
WARM_UP = 2  # steps
COIN = '''
import hashlib
from engine_core import hookimpl
from engine_core.specs import Reward

def coin(completion):
    """Random weights learn nothing: any reward that differs within a group."""
    return float(hashlib.blake2b(completion.encode()).digest()[0] % 2)

@hookimpl
def engine_rewards():
    return {"coin": Reward(load=coin)}
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--trade", type=int, choices=(0, 1, 2), default=0, help="sleep level; 0: both stay resident"
    )
    parser.add_argument(
        "--log-probs-every", type=int, default=1, help="steps; over 1: without correction of the gap"
    )
    parser.add_argument(
        "--without-seeds", action="store_true", help="responses are not repeatable one by one"
    )
    parser.add_argument("--budget", type=float, default=240, help="seconds after which the run is ended")
    arguments = parser.parse_args()
    alone()
    gpu = device().type == "cuda"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(arguments.shape, folder / "model")
        # words that do not begin like the end token t1, which is found inside of words
        rng = random.Random(0)
        lines = [
            " ".join(f"t{rng.randrange(200, 400)}" for _ in range(arguments.prompt))
            for _ in range(8 * arguments.prompts)
        ]
        (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
        (folder / "coin.py").write_text(COIN)
        (folder / "run.toml").write_text(
            RUN.format(
                micro=49152 if gpu else 4096,
                param="bf16" if gpu else "fp32",
                dtype="bfloat16" if gpu else "float32",
                eager="false" if gpu else "true",
                response=arguments.response,
                length=arguments.prompt + arguments.response,
                level=arguments.trade,
                prompt=arguments.prompt,
                prompts=arguments.prompts,
                every=arguments.log_probs_every,
                seeds="false" if arguments.without_seeds else "true",
                batched=max(16384 if gpu else 2048, arguments.prompt + arguments.response),
                correction="auto" if arguments.log_probs_every == 1 else "off",
                trade="true" if arguments.trade else "false",
            )
        )
        every = f"_every{arguments.log_probs_every}" if arguments.log_probs_every > 1 else ""
        seeds = "_no_seeds" if arguments.without_seeds else ""
        name = f"step_level{arguments.trade}{every}{seeds}"
        found = run(folder, arguments, lambda so_far: write(name, so_far, quiet=True))
    write(name, found)
    if "ended" in found:
        raise SystemExit(found["ended"])


def run(
    folder: Path, arguments: argparse.Namespace, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """What ``engine bench step`` finds; where it does not come to its end, the steps that it has done.

    Args:
        folder: with ``run.toml``; the run's own files go there, too.
        arguments: of the command line.
        tell: called with the steps so far, after each.
    """
    code = "import sys; from engine_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "step", str(folder / "run.toml")]
    command += ["--steps", str(arguments.steps), "--warmup", str(WARM_UP), "--json"]
    out, log, end = folder / "out.json", folder / "log.txt", time.monotonic() + arguments.budget
    with out.open("w") as file, log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    try:
        done: list[dict[str, Any]] = []  # kept: the benchmark deletes its run folder at its end
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            if len(steps := steps_of(folder)) > len(done):
                done = steps
                tell(medians(done))
        code_of_end = process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()
    if code_of_end == 0:
        return result_in(out.read_text(errors="replace")) | {"all_steps": medians(done)["all_steps"]}
    why = "the time was up" if code_of_end is None else f"exit {code_of_end}"
    print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
    return medians(done) | {"ended": f"{why}, with {len(done)} steps done"}


def result_in(text: str) -> dict[str, Any]:
    """Return the last JSON document of an output in which vLLM logs lines of its own, with braces in them."""
    start = max(found.start() for found in re.finditer(r"^\{$", text, re.MULTILINE))
    document: dict[str, Any] = json.JSONDecoder().raw_decode(text, start)[0]
    return document


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the steps that have ended; none where the run folder is being deleted."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines(True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def medians(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of the phases, over the steps after the first ones; and of each step."""
    timed = steps[WARM_UP:] or steps[-1:]
    names = sorted({name for step in timed for name in step if name.startswith("time/")})
    found: dict[str, Any] = {name: median([step[name] for step in timed if name in step]) for name in names}
    told = ("time/step", "time/generate", "time/train", "time/offload_and_sync", "time/sync")
    return found | {"all_steps": [{name: step[name] for name in told if name in step} for step in steps]}


if __name__ == "__main__":
    main()
