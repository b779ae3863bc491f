"""How long may a sequence be? One sequence of 32k, 64k, 128k tokens: tokens a second, MFU, peak memory.

    python benchmarks/train/long_sequences.py --cases 8b-lora                  # one GPU
    python benchmarks/train/long_sequences.py --cases 4b-x2                    # two GPUs, a sequence on both
    python benchmarks/train/long_sequences.py --cases tiny --lengths 200 400   # a try on a CPU

Each line is one ``engine bench train`` with random weights: forward, backward and step, one sequence a group of GPUs, the head
on all tokens but the first 256. Micro-batch and recomputation are the engine's own choice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ONE = 'trainer = "sft"\n[model]\npath = "model"\n[data]\ntrain = "none.jsonl"\n[actor.lora]\nrank = 16\n'
TWO = """
trainer = "sft"
[model]
path = "model"
[data]
train = "none.jsonl"
[runtime]
backend = "torchrun"
[runtime.torchrun]
processes = 2
[actor]
backend = "fsdp"
[actor.fsdp]
sp = 2
"""
CASES = {
    "8b-lora": ("qwen3-8b", ONE),
    "4b-x2": ("qwen3-4b", TWO),
    "tiny": ("tiny", ONE),
    "tiny-x2": ("tiny", TWO),
}
"""Shape and run file, by name."""


def measure(name: str, length: int, steps: int, seconds: float) -> str:
    """Return the line of a case at a length, or the end of what its command printed."""
    shape, text = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(text)
        code = "import sys; from engine_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
        words = ["bench", "train", str(file), "--shape", shape, "--sequences", "1", "--length", str(length)]
        words += ["--prompt", str(min(256, length // 2)), "--steps", str(steps), "--warmup", "1", "--json"]
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return f"{name:8} {length:8,}  nothing after {seconds:.0f} s"
    if done.returncode:
        return f"{name:8} {length:8,}  {done.stderr.strip()[-1500:]}"
    row = json.loads(done.stdout)
    mfu = f"{row['mfu']:6.1%}" if row.get("mfu") else "     -"
    peak = f"{row['peak_memory_gib']:6.1f} GiB" if "peak_memory_gib" in row else "-"  # of several processes
    return f"{name:8} {length:8,}  step {row['step_s']:7.2f} s  {row['tokens_per_s']:9,.0f} tokens/s  MFU {mfu}  peak {peak}"


def main() -> int:
    """Print a line for each case and length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["8b-lora"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 65536, 131072])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200, help="for each line")
    arguments = parser.parse_args()
    for name in arguments.cases:
        for length in arguments.lengths:
            print(measure(name, length, arguments.steps, arguments.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
