"""The runs of ``long_tails.py``: their run files, and a process that is followed and ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUN = """
trainer = "{trainer}"
plugins = ["forced_lengths.py"]
{ahead}
[model]
path = "model"
[actor]
backend = "{engine}"
max_tokens_per_rank = {micro}
[actor.optim]
lr = 1e-6
[actor.{engine}]
param_dtype = "{param}"
compile = {compile}
log_prob_chunk_tokens = 8192
log_prob_recompute = {recompute}
{sharding}
[rollout]
backend = "forced_{sampler}"
transport = "{transport}"
group_size = {group}
max_response_tokens = {cap}
{sparse}
{early}
{process}
[rollout.forced_{sampler}]
median = {median}
p99 = {p99}
cap = {cap}
short_steps = {short_steps}
short_cap = {short_cap}
{table}
[[reward]]
name = "coin"
[algorithm]
mini_batch_prompts = {prompts}
{correction}
[data]
train = "data.jsonl"
max_prompt_tokens = {prompt}
prompts_per_step = {prompts}
[runtime]
backend = "{runtime}"
[runtime.{runtime}]
device = "{device}"
startup_timeout_minutes = 5
command_timeout_minutes = 5
{replacements}
{placement}
[run]
dir = "runs"
name = "{case}"
steps = {steps}
[checkpoint]
at_end = false
[tracking]
trackers = []
rollouts_every_steps = 0
"""
VLLM = """
max_model_len = {length}
max_num_seqs = {seqs}
dtype = "{dtype}"
enforce_eager = {eager}
sleep_level = 0
{memory}
"""
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Batch sizes with a CUDA graph: fewer than vLLM's own choice, to start sooner."""
COLOCATED_CACHE = 32 << 30  # bytes of KV cache beside a trainer: about 300,000 tokens of the 0.6B shape
POLL_SECONDS = 0.5
ENDING_SECONDS = 20.0  # for the processes of a run that was ended


def settings(case: str, given: argparse.Namespace) -> tuple[str, int, int]:
    """The run file of a case, and the first and the last step that counts."""
    ahead, apart = case in ("async", "colocated"), case in ("async", "pools", "stream")
    in_turn = case in ("sync", "pools", "stream")
    trainers = given.train_gpus if apart else given.gpus
    gpu = given.device != "cpu"
    # what was sampled while the first steps were short is learned from before the first that counts, which is the same in
    # turn: responses of a step have lengths of their own
    first = given.short_steps + given.staleness + 2
    last = first + given.steps - 1
    log_probs = case != "sync" or not given.sync_without_log_probs
    pools = f"[placement]\npools = {{ train = {trainers}, serve = {given.gpus - trainers} }}\n"
    own = given.sampler == "vllm" and apart and given.serve == "worker"
    engine = "torch" if trainers == 1 else "fsdp"
    text = RUN.format(
        case=case,
        trainer="async" if ahead else "rl",
        ahead=f'[async]\nmax_staleness = {given.staleness}\nweight_updates = "{given.updates}"'
        if ahead
        else "",
        engine=engine,
        # beside a sampler there is less memory
        micro=(49152 if apart else 32768) if gpu else 4096,
        param="bf16" if gpu else "fp32",
        compile="true" if gpu else "false",
        recompute="false" if gpu else "true",
        sharding='sharding = "none"' if engine == "fsdp" else "",
        sampler=given.sampler,
        transport=given.transport if apart else "auto",
        group=given.group_size,
        cap=given.cap,
        early={
            "early": "over_sampling = 1.5\npartial_rollouts = true",
            "stream": "stream_update = true",
        }.get(case, ""),
        sparse="" if log_probs else "log_probs_every_steps = 100",
        correction="" if log_probs else '[algorithm.correction]\nlevel = "off"',
        process="" if own else "[rollout.process]\nmax_restarts = 0",
        median=given.median,
        p99=given.p99,
        # in turn one long step is enough to warm up, and those that carry responses over need as many as those that run ahead
        short_steps=first - 2 if in_turn else given.short_steps,
        short_cap=given.short_cap,
        table=_vllm(given, gpu, apart, given.sync_seqs if in_turn else given.async_seqs)
        if given.sampler == "vllm"
        else f"token_ms = {given.token_ms}",
        prompts=given.prompts,
        prompt=given.prompt,
        runtime=given.runtime,
        device=given.device,
        # each process of the pool is then a world of its own, as vLLM wants it
        replacements="max_replacements = 1" if own and given.gpus - trainers > 1 else "",
        placement=pools + 'actor = "train"\nrollout = "serve"' if apart else "",
        # the last steps of a run that is ahead have nothing new to ask for: the sampler would have less to do in what counts
        steps=last + (given.staleness if ahead else 0),
    )
    # a run file without pools says how many processes there are
    if not apart:
        text = text.replace(
            "startup_timeout_minutes = 5", f"processes = {given.gpus}\nstartup_timeout_minutes = 5"
        )
    return text, first, last


def _vllm(given: argparse.Namespace, gpu: bool, apart: bool, seqs: int) -> str:
    memory = "gpu_memory_utilization = 0.85" if apart else f"kv_cache_memory_bytes = {COLOCATED_CACHE}"
    memory += "\nmax_num_batched_tokens = 16384"
    if not given.eager:
        sizes = [size for size in GRAPHS if size <= seqs]
        memory += f"\ncompilation_config = {{ cudagraph_capture_sizes = {sizes} }}"
    return VLLM.format(
        length=given.prompt + given.cap,
        seqs=seqs,
        dtype="bfloat16" if gpu else "float32",
        eager="true" if given.eager or not gpu else "false",
        memory=memory if gpu else "",
    )


class Run:
    """A run of the engine in processes of its own.

    Args:
        folder: with ``NAME.toml``; below it the run writes.
        name: of the run.
        cpu: it sees no GPU.
    """

    def __init__(self, folder: Path, name: str, cpu: bool) -> None:
        self.folder, self.name = folder, name
        self.metrics = folder / "runs" / name / "metrics.jsonl"
        code = "import sys; from engine_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
        # it works in another folder, where relative places mean nothing
        places = [
            str(Path(place).absolute())
            for place in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if place
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        env |= {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "train", f"{name}.toml"],
                cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def follow(self, steps: int, seconds: float) -> str:
        """Until it has done so many steps, has ended, or has no time left; how it was. Nothing of it is left."""
        end = time.monotonic() + seconds
        told = 0
        try:
            while self.process.poll() is None and time.monotonic() < end and told < steps:
                time.sleep(POLL_SECONDS)
                lines = self.lines()
                for line in lines[told:]:
                    print(f"{self.name}: step {line.get('step')}: {line['time/step']:.2f} s", flush=True)
                told = len(lines)
            if told >= steps:
                return "done"
            return "no time left" if self.process.poll() is None else f"exit status {self.process.returncode}"
        finally:
            self._end()

    def lines(self) -> list[dict[str, Any]]:
        """Metrics of the steps so far."""
        if not self.metrics.is_file():
            return []
        whole = self.metrics.read_text("utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def tail(self) -> str:
        """The end of what it printed."""
        return (self.folder / f"{self.name}.log").read_text("utf-8", "replace")[-4000:]

    def _end(self) -> None:
        """Kill it and what it started, and wait until the GPUs are free of them."""
        family = _family(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()  # its workers end with it
        self.process.wait()
        end = time.monotonic() + ENDING_SECONDS
        while (left := [pid for pid in family if _alive(pid)]) and time.monotonic() < end:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    """Processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
