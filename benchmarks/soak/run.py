"""Thousands of tiny GRPO steps in one process, and what they leave behind: memory, threads, files, folders.

    python benchmarks/soak/run.py --steps 3000 --out benchmarks/soak/results

writes ``soak.json`` (the samples, and what was concluded of them) and ``soak.png`` (the curves), and ends
with 1 if something grows. The run uses everything that a training uses all the time: a reward in a worker,
one in the process, TensorBoard, rollout files, evaluation, checkpoints and their deletion.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from engine_core import Trainer, load_config
from engine_plugin_tools.demo import prepare

ROOT = Path(__file__).parents[2]
REWARD = '[[reward]]\nname = "length"\nworkers = 1\n[reward.length]\nmax_tokens = 6\nbuffer_tokens = 4\n'
KEEP = 2  # checkpoints

BOUNDS = {  # growth from the median of the second third to that of the last, beyond which something leaks
    "objects": 40,  # Python objects after a collection: a leak of one in ten steps shows in 400 steps
    "rss_mib": 4.0,  # of this process: the allocator's own unrest is below 1
    "worker_rss_mib": 4.0,  # of the reward's worker
    "threads": 0,
    "children": 0,
    "open_files": 0,
    "checkpoints_kib": 64.0,  # `keep_last` of them: rewritten, never more
}
"""Medians of thirds, because one sample may fall into a save or a collection; the first third is warm-up."""


@dataclass
class Sample:
    """What the process holds after a step."""

    step: int
    rss_mib: float
    worker_rss_mib: float
    objects: int
    threads: int
    children: int
    open_files: int
    checkpoints_kib: float
    folder_kib: float


class Watched(Trainer):
    """A trainer that takes a sample every few steps."""

    every = 10

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.taken: list[Sample] = []
        self.process = psutil.Process()

    def step(self, step: int) -> dict[str, float]:
        """The step, then the sample."""
        metrics = super().step(step)
        if step == 1:
            gc.freeze()  # half a million objects of imports: neither looked through nor counted at each sample
        if step % self.every == 0:
            self.taken.append(self._sample(step))
        return metrics

    def _sample(self, step: int) -> Sample:
        gc.collect()
        children = self.process.children(recursive=True)
        folder = self.folder.path
        return Sample(
            step=step,
            rss_mib=self.process.memory_info().rss / 2**20,
            worker_rss_mib=sum(child.memory_info().rss for child in children) / 2**20,
            objects=len(gc.get_objects()) - len(self.taken),
            threads=self.process.num_threads(),
            children=len(children),
            open_files=self.process.num_fds(),
            checkpoints_kib=_size(folder / "checkpoints") / 1024,
            folder_kib=_size(folder) / 1024,
        )


def _size(folder: Path) -> int:
    sizes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes += os.lstat(os.path.join(parent, name)).st_size
    return sizes


def digits(completions: list[str]) -> list[float]:
    """Share of characters that are digits: has a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def soak(steps: int, folder: Path, every: int = 10) -> list[Sample]:
    """Train that many tiny steps below ``folder``; a sample every few of them."""
    prepare = _prepare(folder)
    (folder / "run.toml").write_text(REWARD)
    settings = {
        "model.path": str(prepare / "model"),
        "data.train": str(prepare / "data" / "train.jsonl"),
        "data.validation": str(prepare / "data" / "heldout.jsonl"),
        "data.prompts_per_step": 2,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 6,
        "actor.optim.lr": 1e-4,
        "algorithm.kl_coef": 0.01,
        "eval.every_steps": 50,
        "run.dir": str(folder / "runs"),
        "run.name": "soak",
        "run.steps": steps,
        "checkpoint.every_steps": 25,
        "checkpoint.keep_last": KEEP,
        "tracking.rollouts_every_steps": 25,
    }
    run = Watched(load_config(folder / "run.toml", settings), rewards=[digits])
    run.every = every
    with contextlib.closing(run):
        try:
            run.train()
        finally:
            gc.unfreeze()
    return run.taken


def _prepare(folder: Path) -> Path:
    """Data, tokenizer and a model of two narrow layers."""
    prepare.ROWS = {"sft": 16, "train": 32, "heldout": 2}
    prepare.prepare(folder)
    config = folder / "model" / "config.json"
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2}
    config.write_text(json.dumps(json.loads(config.read_text()) | small))
    return folder


def growth(samples: list[Sample]) -> dict[str, float]:
    """Median of the last third less median of the second third, of everything that has a bound."""
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[2 * third :]
    return {
        name: statistics.median(getattr(s, name) for s in last)
        - statistics.median(getattr(s, name) for s in second)
        for name in BOUNDS
    }


def leaks(samples: list[Sample]) -> list[str]:
    """A sentence for everything that grew over its bound, and for a folder that grows faster and faster."""
    found = [
        f"{name} grew by {grown:g} from the second third to the last, over {BOUNDS[name]:g}"
        for name, grown in growth(samples).items()
        if grown > BOUNDS[name]
    ]
    third = len(samples) // 3
    rates = [
        samples[end].folder_kib - samples[start].folder_kib
        for start, end in ((third, 2 * third), (2 * third, len(samples) - 1))
    ]
    steps = [samples[2 * third].step - samples[third].step, samples[-1].step - samples[2 * third].step]
    before, after = (rate / max(count, 1) for rate, count in zip(rates, steps, strict=True))
    if after > 1.5 * before + 0.5:  # KiB a step: metrics and rollouts grow evenly
        found.append(f"the run folder grows by {after:.2f} KiB a step, before by {before:.2f}")
    return found


def draw(samples: list[Sample], path: Path) -> None:
    """The curves, each below the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in asdict(samples[0]) if name != "step"]
    figure, axes = pyplot.subplots(len(names), 1, sharex=True, figsize=(7, 1.2 * len(names)))
    for axis, name in zip(axes, names, strict=True):
        axis.plot([s.step for s in samples], [getattr(s, name) for s in samples], linewidth=0.8)
        axis.set_ylabel(name, rotation=0, ha="right", fontsize=7)
        axis.tick_params(labelsize=6)
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(arguments.steps, Path(folder))
    found = leaks(samples)
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(samples, arguments.out / "soak.png")
    columns = {name: [asdict(sample)[name] for sample in samples] for name in asdict(samples[0])}
    rounded = {
        name: [round(v, 1) if isinstance(v, float) else v for v in values] for name, values in columns.items()
    }
    summary = {"steps": arguments.steps, "growth": growth(samples), "bounds": BOUNDS, "leaks": found}
    lines = [f' "{name}": {json.dumps(value)}' for name, value in {**summary, "samples": rounded}.items()]
    (arguments.out / "soak.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print("\n".join(found) or f"nothing grows in {arguments.steps} steps")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
