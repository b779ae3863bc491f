"""Steps in turn against episodes that run ahead, when tools take seconds: simulated, and a small real run.

    python benchmarks/agents/compare.py --out benchmarks/agents/results/compare.json

The simulation runs the project's own controller on a virtual clock; it does not depend on the machine. The real runs are a
random model on word problems with a sampler process, the same rows and the same tools in both. Each rate is of all steps of
its run, so that of a run ahead includes the wait for its first step and its last steps, which request nothing new.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "simulator"))
TOOLS = {"turns": 8, "least": 1.0, "most": 30.0, "tokens": 200}
"""Of the simulation."""
PLUGIN = '''
import asyncio
import random

from engine_core import hookimpl
from engine_core.specs import Environment, Options


class SlowOptions(Options):
    least: float = 1.0
    """Seconds of the shortest tool call."""
    most: float = 3.0
    """Seconds of the longest tool call."""


async def slow(episode, least, most):
    drawn = random.Random(episode.seed)
    while episode.goes_on:
        turn = await episode.sample(max_tokens=8)
        if episode.goes_on:
            await episode.call(asyncio.sleep, drawn.uniform(least, most))
            episode.append(" no ")
    return episode.rollout({"short": 1.0 / (1 + len(turn.text))})


@hookimpl
def engine_environments():
    return {"slow": Environment(load=slow, config=SlowOptions, rewards=frozenset({"short"}))}
'''


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="of the real runs")
    parser.add_argument("--turns", type=int, default=6, help="of an episode of the real runs")
    parser.add_argument(
        "--most", type=float, default=3.0, help="seconds of the longest tool call of the real runs"
    )
    parser.add_argument(
        "--real", type=int, nargs="*", default=[0, 2], help="versions ahead of the real runs; 0: in turn"
    )
    parser.add_argument("--out", type=Path, help="file for the results")
    return parser.parse_args()


def simulated() -> dict[str, Any]:
    """Return seconds of a step of each mode on the virtual clock, and the ratio to steps in turn."""
    from virtual_cluster.runs import MODES, Setting, simulate

    found: dict[str, Any] = {"tools": TOOLS}
    for mode in ("sync", "async-1", "async-2", "async-4"):
        waits = MODES[mode].staleness + 1  # so many steps wait for their episodes at one time
        setting = Setting(
            workers=4, mode=mode, prompts_per_worker=1, group_size=4, tools=TOOLS, steps=waits * 4
        )
        result = simulate(setting)
        ratio = found["sync"]["step_s"] / result["step_s"] if "sync" in found else 1.0
        names = ("step_s", "tokens_per_s", "idle_samplers", "staleness")
        found[mode] = {name: result[name] for name in names} | {"ratio": ratio}
    return found


def real(folder: Path, given: argparse.Namespace, staleness: int) -> dict[str, Any]:
    """Return what one real run took.

    Args:
        folder: data and model; the run is written there.
        given: the command line.
        staleness: `async.max_staleness`; 0: trainer ``rl``.
    """
    from engine_core import load_config
    from engine_core.train.trainer import Trainer
    from engine_plugin_trainers.async_trainer import AsyncTrainer

    name = f"async-{staleness}" if staleness else "sync"
    settings: dict[str, Any] = {
        "plugins": [str(folder / "slow.py")],
        "environment": {
            "name": "slow",
            "max_turns": given.turns,
            "tool_timeout_seconds": 2 * given.most,
            "timeout_seconds": 600.0,
            "slow": {"most": given.most},
        },
        "model.path": str(folder / "model"),
        "model.override": {"max_position_embeddings": 512},
        "data.train": str(folder / "data" / "train.jsonl"),
        "data.prompts_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 8,
        "rollout.process": {},
        "run.dir": str(folder / "runs"),
        "run.name": name,
        "run.steps": given.steps,
        "checkpoint.at_end": False,
        "tracking.trackers": [],
    }
    ahead = {"trainer": "async", "async.max_staleness": staleness} if staleness else {}
    run = (AsyncTrainer if staleness else Trainer)(load_config(settings | ahead, allow_code=True))
    run.train()
    assert run.folder is not None
    lines = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    run.close()
    seconds = sum(line["time/step"] for line in lines)
    return {
        "steps": len(lines),
        "seconds": seconds,
        "step_s": seconds / len(lines),
        "tool_calls": sum(line["environment/tool_calls"] for line in lines),
        "staleness_max": max(line.get("async/staleness_max", 0.0) for line in lines),
    }


def main() -> None:
    """Measure both and print the ratios."""
    given = arguments()
    found: dict[str, Any] = {"simulated": simulated()}
    with tempfile.TemporaryDirectory() as name:
        from engine_plugin_tools.demo import prepare

        folder = Path(name)
        prepare.ROWS = {"sft": 8, "train": 256, "heldout": 8}
        prepare.prepare(folder)
        (folder / "slow.py").write_text(PLUGIN)
        found["real"] = {"turns": given.turns, "tool_seconds": [1.0, given.most]}
        for staleness in given.real:
            result = real(folder, given, staleness)
            first = found["real"].get("sync", result)
            ratio = first["step_s"] / result["step_s"]
            found["real"][f"async-{staleness}" if staleness else "sync"] = result | {"ratio": ratio}
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
