"""A policy learns to write expressions that pass tests: data and a random model, a warm start, GRPO, and what came of it.

    python examples/expressions/run.py

Each step is a command that you could type; everything lies below ``demo-expressions/`` afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from tasks import make

from engine_plugin_tools.demo.walkthrough import accuracies, engine, fresh, steps


def main() -> None:
    """Run it; the last line holds the held-out accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "demo-expressions", help="where everything goes"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and sampling")
    parser.add_argument("--sft-steps", type=int, help="steps of the warm start (default: those of sft.toml)")
    parser.add_argument("--steps", type=int, help="GRPO steps (default: those of grpo.toml)")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    start = time.monotonic()
    fresh(folder)
    make(folder, arguments.seed)

    def train(file: str, model: str, length: int | None, **data: str) -> None:
        settings = {"run.dir": folder / "runs", "model.path": folder / model}
        settings |= {f"data.{key}": folder / "data" / f"{name}.jsonl" for key, name in data.items()}
        sets = [f"{key}={json.dumps(str(value))}" for key, value in settings.items()]
        sets += [f"run.seed={arguments.seed}", f"model.seed={arguments.seed}"]
        engine("train", str(HERE / file), *(w for s in sets for w in ("--set", s)), *steps(length))

    train("sft.toml", "model", arguments.sft_steps, train="sft")
    engine("export", str(folder / "runs" / "sft"), str(folder / "sft"))
    train("grpo.toml", "sft", arguments.steps, train="train", validation="heldout")
    run = folder / "runs" / "grpo"
    engine("inspect", "rollouts", str(run), "--limit", "3")
    print(f"Wall time: {time.monotonic() - start:.0f} s")
    found = accuracies(run)
    print(f"held-out accuracy {found[0]:.2f} -> {found[-1]:.2f}")


if __name__ == "__main__":
    main()
