"""The plan's seconds against those measured on H200s: a table of errors. No device is used.

    python benchmarks/plan/seconds.py
    python benchmarks/plan/seconds.py --json

Each setting is a run file of that measurement. What was measured is quoted, with its source.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from plan_vs_peak import trainer_of, write_inputs

from engine_core import load_config
from engine_plugin_tools.devices import find_devices
from engine_plugin_tools.time_plan import Lengths, plan_step, plans_of

BF16 = {"actor.torch.param_dtype": "bf16"}
EAGER = {"actor.torch.compile": False}
KEPT = {"actor.torch.activation_checkpointing": False}
TWO = {"runtime.backend": "torchrun", "runtime.torchrun.processes": 2}
FOUR = {"runtime.backend": "torchrun", "runtime.torchrun.processes": 4}
PROCESS = {"rollout.process.max_restarts": 1}
LIMIT = 0.25  # the goal


def fsdp(bf16: bool, compiled: bool, recomputed: str) -> dict[str, Any]:
    """Return the keys of an actor on FSDP."""
    return {
        "actor.backend": "fsdp",
        "actor.fsdp.param_dtype": "bf16" if bf16 else "fp32",
        "actor.fsdp.compile": compiled,
        "actor.fsdp.activation_checkpointing": recomputed,
    }


@dataclass(frozen=True)
class Setting:
    """A measured setting.

    Attributes:
        name: of the setting.
        shape: of the model.
        lengths: of a step's sequences.
        measured: seconds by phase.
        source: where they were measured.
        keys: of the run file.
        tokens: of a micro-batch, or "auto".
        trainer: ``sft`` or ``rl``.
    """

    name: str
    shape: str
    lengths: Lengths
    measured: dict[str, float]
    source: str
    keys: dict[str, Any] = field(default_factory=dict)
    tokens: int | str = "auto"
    trainer: str = "sft"


def rows(count: float, length: int, learned: int | None = None) -> Lengths:
    """Return sequences of one length, whose last ``learned`` tokens are learned."""
    learned = length if learned is None else learned
    return Lengths(count, length - learned, learned, learned)


SHORT = rows(128, 768, 512)
GRPO = Lengths(512, 256, 512, 512, 8)
TRAIN, FSDP, BACKENDS = "benchmarks/train", "benchmarks/fsdp", "benchmarks/backends"
WHOLE = "whole runs"

SETTINGS = [
    Setting("0.6B bf16, eager", "qwen3-0.6b", SHORT, {"train": 2.027}, TRAIN, BF16 | EAGER | KEPT, 49152),
    Setting("0.6B bf16, compiled", "qwen3-0.6b", SHORT, {"train": 0.886}, TRAIN, BF16 | KEPT, 49152),
    Setting("the same, large chunks", "qwen3-0.6b", SHORT, {"train": 0.823}, TRAIN, BF16 | KEPT, 49152),
    Setting(
        "the same, recomputed", "qwen3-0.6b", SHORT, {"train": 1.053}, TRAIN,
        BF16 | {"actor.torch.activation_checkpointing": True}, 49152,
    ),
    Setting("0.6B float32, compiled", "qwen3-0.6b", SHORT, {"train": 1.135}, TRAIN, KEPT, 49152),
    Setting("0.6B bf16, sequences of 8,192", "qwen3-0.6b", rows(4, 8192), {"train": 0.650}, TRAIN, BF16 | KEPT, 32768),
    *(
        Setting(f"1.7B bf16, recomputed, 4 GPUs, {n // 1024}k each", "qwen3-1.7b", rows(4 * n / 1024, 1024),
                {"train": seconds}, FSDP, fsdp(True, True, "full") | FOUR, n)
        for n, seconds in ((8192, 0.296), (32768, 0.920), (65536, 1.796))
    ),
    Setting("1.7B float32, recomputed, 4 GPUs", "qwen3-1.7b", rows(32, 1024), {"train": 0.316}, FSDP,
            fsdp(False, True, "full") | FOUR, 8192),
    Setting("8B bf16, recomputed, 2 GPUs", "qwen3-8b", rows(2, 8192), {"train": 1.274}, FSDP, fsdp(True, True, "full") | TWO, 8192),
    Setting("8B bf16, kept, 2 GPUs", "qwen3-8b", rows(2, 8192), {"train": 1.007}, FSDP, fsdp(True, True, "none") | TWO, 8192),
    Setting("the same, 16k each", "qwen3-8b", rows(4, 8192), {"train": 1.883}, FSDP, fsdp(True, True, "none") | TWO, 16384),
    Setting("1.7B bf16, kept, 2 GPUs", "qwen3-1.7b", rows(32, 1024), {"train": 0.440}, BACKENDS, fsdp(True, True, "none") | TWO, 8192),
    Setting("the same, eager", "qwen3-1.7b", rows(32, 1024), {"train": 0.689}, BACKENDS, fsdp(True, False, "none") | TWO, 8192),
    Setting("8B bf16, sequences of 4,096, 2 GPUs", "qwen3-8b", rows(8, 4096), {"train": 1.969}, BACKENDS, fsdp(True, True, "none") | TWO, 8192),
    Setting("the same, eager", "qwen3-8b", rows(8, 4096), {"train": 2.655}, BACKENDS, fsdp(True, False, "none") | TWO, 8192),
    Setting("8B bf16, sequences of 4,096, 4 GPUs", "qwen3-8b", rows(16, 4096), {"train": 1.790}, BACKENDS, fsdp(True, True, "none") | FOUR, 8192),
    Setting("1.7B ZeRO-1, 2 GPUs", "qwen3-1.7b", rows(32, 1024), {"train": 0.671}, BACKENDS,
            {"actor.backend": "deepspeed", "actor.deepspeed.stage": 1, "actor.deepspeed.activation_checkpointing": False} | TWO, 8192),
    Setting("1.7B ZeRO-2, 2 GPUs", "qwen3-1.7b", rows(32, 1024), {"train": 0.719}, BACKENDS,
            {"actor.backend": "deepspeed", "actor.deepspeed.stage": 2, "actor.deepspeed.activation_checkpointing": False} | TWO, 8192),
    Setting("0.6B GRPO, one GPU, next to TRL", "qwen3-0.6b", GRPO, {"generate": 6.2, "step": 9.88},
            "benchmarks/trl", KEPT, 49152, "rl"),
    Setting("0.6B GRPO, one GPU", "qwen3-0.6b", GRPO, {"generate": 8.0, "train": 3.3, "sync": 0.037, "step": 11.4},
            "benchmarks/vllm, other runs on its host", BF16 | KEPT, 49152, "rl"),
    Setting("0.6B sampling alone", "qwen3-0.6b", GRPO, {"generate": 6.16}, "benchmarks/vllm, speed_3", BF16 | KEPT, 49152, "rl"),
    Setting("0.6B GRPO, one GPU, best settings", "qwen3-0.6b", GRPO, {"generate": 6.3, "train": 4.0, "step": 10.4},
            f"{WHOLE}: 5.8 to 6.8, 3.3 to 4.7, 10.1 to 10.7", KEPT, 49152, "rl"),
    Setting("0.6B GRPO, 2 GPUs, defaults", "qwen3-0.6b", GRPO, {"generate": 4.1, "train": 3.3, "sync": 0.21, "step": 8.3},
            WHOLE, fsdp(False, False, "none") | TWO | PROCESS, 8192, "rl"),
    Setting("0.6B GRPO, one GPU, default file", "qwen3-0.6b", GRPO, {"generate": 9.12, "train": 4.68, "step": 13.95},
            "benchmarks/steps, after the fit", {}, "auto", "rl"),
    Setting("1.7B GRPO, one GPU, default file", "qwen3-1.7b", GRPO, {"generate": 8.94, "train": 8.85, "step": 17.96},
            "benchmarks/steps, after the fit", {}, "auto", "rl"),
    Setting("4B GRPO, 2 GPUs, defaults", "qwen3-4b", GRPO, {"generate": 6.5, "train": 16.2, "sync": 5.0}, f"{WHOLE}, first step",
            fsdp(False, False, "none") | TWO | PROCESS, 8192, "rl"),
    Setting("4B GRPO, 2 GPUs, compiled, recomputed", "qwen3-4b", GRPO, {"generate": 6.3, "train": 35.9}, WHOLE,
            fsdp(False, True, "full") | TWO | PROCESS, 32768, "rl"),
    Setting("4B GRPO, one GPU, 32 prompts", "qwen3-4b", Lengths(256, 256, 512, 512, 8), {"train": 12.0}, f"{TRAIN}, auto",
            {"actor.torch.activation_checkpointing": True}, 36352, "rl"),
    Setting("the same, 2 GPUs", "qwen3-4b", Lengths(256, 256, 512, 512, 8), {"train": 8.6}, f"{TRAIN}, auto",
            fsdp(False, False, "none") | TWO | PROCESS, 49152, "rl"),
    Setting("0.6B GRPO, 2 GPUs, long tails", "qwen3-0.6b", Lengths(512, 256, 547, 7292, 8),
            {"generate": 18.8, "train": 2.44, "sync": 0.077, "step": 21.8}, "benchmarks/async, carried_over",
            fsdp(True, True, "none") | TWO | PROCESS | {"rollout.vllm.max_num_seqs": 256, "actor.fsdp.sharding": "none"}, 32768, "rl"),
    Setting("0.6B GRPO with hf, 2 GPUs, 48 tokens", "qwen3-0.6b", Lengths(128, 64, 48, 48, 8), {"step": 1.608}, "benchmarks/ray",
            fsdp(True, False, "none") | TWO | {"rollout.backend": "hf"}, 8192, "rl"),
    Setting("the same, 96 tokens, another day", "qwen3-0.6b", Lengths(128, 64, 96, 96, 8), {"step": 4.099}, "benchmarks/ray",
            fsdp(True, False, "none") | TWO | {"rollout.backend": "hf"}, 8192, "rl"),
]  # fmt: skip


def config_of(setting: Setting, folder: Path) -> Any:
    """Return the run's config; its rows are not those of the measurement, whose lengths the setting has."""
    keys: dict[str, Any] = {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "rows.jsonl"),
        "data.prompts_per_step": int(setting.lengths.sequences / setting.lengths.group),
        "run.steps": 2,
        "actor.max_tokens_per_rank": setting.tokens,
    }
    if setting.trainer == "rl":
        keys |= {
            "rollout.backend": "vllm",
            "rollout.group_size": setting.lengths.group,
            "rollout.max_response_tokens": int(setting.lengths.most),
        }
    else:
        keys["sft.max_tokens"] = 8192
    file = folder / "run.toml"
    file.write_text(
        f'trainer = "{setting.trainer}"\n'
        + ('[algorithm]\nadvantage = "grpo"\n' if setting.trainer == "rl" else "")
    )
    return load_config(file, keys | setting.keys)


def planned(setting: Setting) -> dict[str, tuple[float | None, float | None]]:
    """Return (floor, planned seconds) of the phases that were measured."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_inputs(setting.shape, folder)
        config, device = config_of(setting, folder), find_devices("h200", None)
        with closing(trainer_of(setting, config)) as trainer:
            trainer.load_inputs()
            plans = [plan for _, plan in plans_of(trainer, device)]
            assert device.limits is not None
            step = plan_step(trainer, plans, device.limits, setting.lengths, {})
    assert step is not None
    found = {name: (phase.floor, phase.seconds) for name, phase in step.phases.items()}
    found["step"] = step.floor, step.seconds
    return {name: found[name] for name in setting.measured}


def main() -> int:
    """Print the table, and how many phases are within the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON for each phase")
    arguments = parser.parse_args()
    ratios = []
    print(
        ""
        if arguments.json
        else "| setting | phase | floor | planned | measured | planned / measured | source |\n|---|---|---|---|---|---|---|"
    )
    for setting in SETTINGS:
        for phase, (floor, seconds) in planned(setting).items():
            measured = setting.measured[phase]
            ratio = (seconds or 0.0) / measured
            ratios.append(ratio)
            if arguments.json:
                row = {
                    "setting": setting.name,
                    "phase": phase,
                    "floor": floor,
                    "planned": seconds,
                    "measured": measured,
                }
                print(json.dumps(row | {"source": setting.source}))
                continue
            out = "**" if abs(ratio - 1) > LIMIT else ""
            print(
                f"| {setting.name} | {phase} | {floor or 0:.3g} | {seconds or 0:.3g} | {measured:.4g} | {out}{ratio:.2f}{out} | "
                f"{setting.source} |"
            )
    near = sum(abs(ratio - 1) <= LIMIT for ratio in ratios)
    print(f"{near} of {len(ratios)} within {LIMIT:.0%}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
