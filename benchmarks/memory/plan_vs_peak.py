"""The memory plan against the measured peak, for some twenty settings on one GPU.

    python benchmarks/memory/plan_vs_peak.py --out memory.jsonl               # all, about ten minutes
    python benchmarks/memory/plan_vs_peak.py --out memory.jsonl --only grpo   # names that contain a text
    python benchmarks/memory/plan_vs_peak.py --dry --memory 80                # only the plans, on any machine

Each setting is a run of two or three steps in a separate process: Qwen3 shapes with random weights, made-up rows of
full length. A setting with a limit gets that much memory of the device: torch by
``set_per_process_memory_fraction``, vLLM by the bytes of its cache. A row is printed as soon as its setting is done.

The measured peak counts live bytes: those that torch has allocated at most, and those that are not torch's (contexts,
graphs). ``reserved`` is the most that the device had given away, fragments included. Roles that sleep are not measured:
torch counts memory that vLLM has released.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
LENGTH = 512  # tokens of a prompt and of a response


@dataclass(frozen=True)
class Setting:
    """A run: its shape, its limit in GiB (0: none), and keys over those of its trainer."""

    shape: str
    keys: dict[str, Any] = field(default_factory=dict)
    limit: float = 0
    trainer: str = "sft"


def _torch(tokens: int | str = "auto", recompute: bool | str = "auto", **more: Any) -> dict[str, Any]:
    keys = {"max_tokens_per_rank": tokens, "torch.activation_checkpointing": recompute}
    return {f"actor.{key.replace('__', '.')}": value for key, value in (keys | more).items()}


def _fsdp(tokens: int | str = "auto", recompute: str = "auto", **more: Any) -> dict[str, Any]:
    keys = {"backend": "fsdp", "max_tokens_per_rank": tokens, "fsdp.activation_checkpointing": recompute}
    return {f"actor.{key.replace('__', '.')}": value for key, value in (keys | more).items()}


EAGERLY = {"torch__compile": False}
LORA = {"lora__rank": 16}
QLORA = {"lora__rank": 16, "torch__quantize": "nf4"}
VLLM = {"rollout.vllm.enforce_eager": True}

SETTINGS: dict[str, Setting] = {
    "sft-0.6b-kept-8k": Setting("qwen3-0.6b", _torch(8192, False, **EAGERLY)),
    "grpo-0.6b-auto": Setting("qwen3-0.6b", _torch(**EAGERLY) | VLLM, trainer="rl"),
    "grpo-0.6b-24": Setting("qwen3-0.6b", _torch(**EAGERLY) | VLLM, 24, "rl"),
    "sft-0.6b-auto-24": Setting("qwen3-0.6b", _torch(**EAGERLY), 24),
    "sft-4b-lora-24": Setting("qwen3-4b", _torch(**EAGERLY, **LORA), 24),
    "fsdp-0.6b-kept-8k": Setting("qwen3-0.6b", _fsdp(8192, "none")),
    "sft-0.6b-recomputed-16k": Setting("qwen3-0.6b", _torch(16384, True, **EAGERLY)),
    "grpo-4b-lora-24": Setting("qwen3-4b", _torch(**EAGERLY, **LORA) | VLLM, 24, "rl"),
    "fsdp-0.6b-recomputed-16k": Setting("qwen3-0.6b", _fsdp(16384, "full")),
    "sft-1.7b-auto-40": Setting("qwen3-1.7b", _torch(**EAGERLY), 40),
    "fsdp-1.7b-auto-40": Setting("qwen3-1.7b", _fsdp(), 40),
    "sft-8b-lora-40": Setting("qwen3-8b", _torch(**EAGERLY, **LORA), 40),
    "sft-4b-recomputed-8k-80": Setting("qwen3-4b", _torch(8192, True, **EAGERLY), 80),
    "sft-4b-bf16-8k-80": Setting("qwen3-4b", _torch(8192, True, torch__param_dtype="bf16", **EAGERLY), 80),
    "fsdp-4b-lora-40": Setting("qwen3-4b", _fsdp(**LORA), 40),
    "grpo-1.7b-ref-auto": Setting(
        "qwen3-1.7b", _torch(**EAGERLY) | VLLM | {"algorithm.kl_coef": 0.01}, trainer="rl"
    ),
    "sft-0.6b-compiled-8k": Setting("qwen3-0.6b", _torch(8192, False)),
    "grpo-0.6b-graphs-40": Setting("qwen3-0.6b", _torch(**EAGERLY), 40, "rl"),
    "sft-4b-qlora-24": Setting("qwen3-4b", _torch(**QLORA), 24),
    "sft-1.7b-int8-lora-24": Setting("qwen3-1.7b", _torch(**QLORA | {"torch__quantize": "int8"}), 24),
    "grpo-0.6b-compiled-auto": Setting("qwen3-0.6b", {}, trainer="rl"),
    "tiny": Setting("tiny", _torch(1024, False, **EAGERLY)),
}
"""By name, the most telling first; ``tiny`` runs on a CPU and only where ``--only tiny`` names it."""


def _text_of(count: int) -> str:
    return " ".join(f"t{i % 400 + 3}" for i in range(count))


def write_inputs(shape: str, folder: Path) -> None:
    """Write a model folder without weights, a tokenizer of ``t2 t3 ...``, and rows of full length."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from engine_plugin_tools.bench.shapes import SHAPES, write_shape

    model = folder / "model"
    write_shape(shape, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    (model / "config.json").write_text(json.dumps(config))
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, int(SHAPES[shape]["vocab_size"]))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        model
    )
    row = {"prompt": _text_of(LENGTH), "response": _text_of(LENGTH - 1)}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 64)


def config_of(setting: Setting, folder: Path) -> Any:
    """Return the run's config."""
    from engine_core import load_config

    rl = setting.trainer == "rl"
    keys: dict[str, Any] = {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "rows.jsonl"),
        "data.prompts_per_step": 8 if rl else 64,  # fills the largest micro-batch that a plan chooses
        "data.max_prompt_tokens": LENGTH,
        "run.dir": str(folder / "runs"),
        "run.steps": 2,
    }
    if rl:
        keys |= {
            "rollout.backend": "vllm",
            "rollout.group_size": 8,
            "rollout.max_response_tokens": LENGTH,
            "rollout.max_log_prob_gap": 100.0,
            "rollout.vllm.max_model_len": 2 * LENGTH + 8,
        }
    else:
        keys["sft.max_tokens"] = 2 * LENGTH
    file = folder / "run.toml"
    file.write_text(
        f'trainer = "{setting.trainer}"\n[checkpoint]\nat_end = false\n[tracking]\ntrackers = []\nrollouts_every_steps = 0\n'
        + ('[algorithm]\nadvantage = "grpo"\n' if rl else "")
    )
    return load_config(file, keys | setting.keys)


def even(completion_ids: list[list[int]]) -> list[float]:
    """Reward: the share of even tokens."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


def trainer_of(setting: Setting, config: Any) -> Any:
    """Return the trainer, not yet set up."""
    from engine_core.config.assemble import plugins_for

    kind = plugins_for(config).resolve("trainers", config.trainer)
    return kind(config, rewards=[even]) if setting.trainer == "rl" else kind(config)


def plan_of(trainer: Any, device_bytes: int) -> Any:
    """Return the plan of a trainer whose inputs are loaded."""
    from engine_plugin_tools.memory_plan import plan_device

    roles = trainer.roles(training=True)
    if trainer.config.ref_is_base:
        roles.pop("ref", None)
    return plan_device(trainer.config, trainer.plugins, roles, 1, device_bytes)


def measure(name: str, memory: float, out: Any, dry: bool) -> None:
    """Plan a setting and run it; send a row."""
    import torch

    setting, start = SETTINGS[name], time.perf_counter()
    row: dict[str, Any] = {"name": name, "limit_gib": setting.limit}
    out.send(row)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_inputs(setting.shape, folder)
        total = int(memory * GIB)
        cuda = not dry and torch.cuda.is_available()
        if cuda:
            total = torch.cuda.mem_get_info(0)[1]
        usable = min(total, int(setting.limit * GIB)) if setting.limit else total
        if cuda and usable < total:
            torch.cuda.set_per_process_memory_fraction(usable / total, 0)
        config = config_of(setting, folder)
        with closing(trainer_of(setting, config)) as planner:
            planner.load_inputs()
            plan = plan_of(planner, usable)
        row |= {"planned": plan.peak, "reserve": plan.reserve, "fits": plan.fits, "usable": usable}
        row["plan"] = plan.as_json()
        out.send(row)
        if dry:
            return
        if setting.trainer == "rl" and usable < total:  # vLLM's share is one of the whole device
            need = plan.needs["rollout"]
            options = config.rollout.options.model_copy(
                update={
                    "gpu_memory_utilization": round(
                        sum((*need.kept.values(), *need.idle.values())) / total, 3
                    ),
                    "kv_cache_memory_bytes": need.idle["cache"],
                }
            )
            config.rollout.options = options
        error = ""
        trainer = trainer_of(setting, config)
        try:
            trainer.train()
        except BaseException as found:  # the row says it
            error = f"{type(found).__name__}: {found}"[:500]
            row["trace"] = traceback.format_exc()[-3000:]
        row |= {"error": error, "seconds": time.perf_counter() - start, "steps": _steps(folder)}
        if cuda:
            free, total = torch.cuda.mem_get_info(0)
            others = total - free - torch.cuda.memory_reserved(0)
            row |= {"measured": torch.cuda.max_memory_allocated(0) + others, "others": others}
            row["reserved"] = torch.cuda.max_memory_reserved(0) + others
        elif not error:
            row["measured"] = 0
        out.send(row)


def _steps(folder: Path) -> list[dict[str, float]]:
    """Return the seconds and tokens of each step, by metric."""
    files = [f for f in sorted(folder.glob("runs/*/metrics.jsonl")) if not f.parent.is_symlink()]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k.startswith(("time/", "throughput/", "data/", "memory/"))}
        for line in lines
    ]


def main() -> int:
    """Run the settings one after another; return 1 if one that was said to fit ran out of memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    parser.add_argument(
        "--only", default="", help="settings whose names contain one of these texts, by commas"
    )
    parser.add_argument("--limit", type=float, default=570, help="seconds for all settings")
    parser.add_argument("--each", type=float, default=170, help="seconds for one setting")
    parser.add_argument("--dry", action="store_true", help="plan, run nothing")
    parser.add_argument("--memory", type=float, default=79.2, help="GiB of the device, with --dry")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = arguments.only.split(",") if arguments.only else [""]
    names = [n for n in SETTINGS if any(w in n for w in words) and (n != "tiny" or "tiny" in words)]
    began, rows = time.perf_counter(), []
    print(
        f"{'setting':26} {'limit':>6} {'plan':>7} {'peak':>7} {'ratio':>6} {'given':>7} fits  s  result",
        flush=True,
    )
    for name in names:
        left = arguments.limit - (time.perf_counter() - began)
        if left < 15:
            print(f"{name:26} not run: {arguments.limit:.0f} s are over", flush=True)
            continue
        row = _in_child(name, arguments, min(left, arguments.each))
        rows.append(row)
        _print(row)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return _summary(rows)


def _in_child(name: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Measure a setting in a child process, ended after some seconds; return the last row that it sent."""
    context = multiprocessing.get_context("spawn")  # vLLM waits for ever in a fork of a process with threads
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_quietly, args=(name, arguments.memory, sender, arguments.dry))
    child.start()
    sender.close()
    row: dict[str, Any] = {"name": name}
    deadline = time.perf_counter() + seconds
    try:
        while receiver.poll(max(0.0, deadline - time.perf_counter())):
            row = receiver.recv()
    except EOFError:
        pass
    else:
        row["error"] = f"not done after {seconds:.0f} s"
        child.kill()
    child.join(10)
    if child.is_alive():
        child.kill()
    if "error" not in row and "measured" not in row and not arguments.dry:
        row["error"] = f"process ended with {child.exitcode}"
    return row


def _quietly(name: str, memory: float, out: Any, dry: bool) -> None:
    """Call ``measure`` with its output in a file next to the results."""
    log = Path(tempfile.gettempdir()) / f"plan-{name}.log"
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        measure(name, memory, out, dry)
    except BaseException as found:
        out.send(
            {"name": name, "error": f"{type(found).__name__}: {found}"[:500], "trace": traceback.format_exc()}
        )
    sys.stdout.flush()
    os._exit(0)


def _print(row: dict[str, Any]) -> None:
    def gib(key: str) -> str:
        return f"{row[key] / GIB:.1f}" if row.get(key) else "-"

    ratio = f"{row['planned'] / row['measured']:.2f}" if row.get("measured") and row.get("planned") else "-"
    fits = {True: "yes", False: "no"}.get(row.get("fits"), "-")  # type: ignore[arg-type]
    said = (row.get("error") or "ok").splitlines()[0][:150]
    print(
        f"{row['name']:26} {row.get('limit_gib') or '-':>6} {gib('planned'):>7} {gib('measured'):>7} {ratio:>6} "
        f"{gib('reserved'):>7} {fits:4} {row.get('seconds', 0):3.0f} {said}",
        flush=True,
    )


def _summary(rows: list[dict[str, Any]]) -> int:
    """Print how many plans are within 10%, and what ran out although it was said to fit."""
    done = [r for r in rows if r.get("measured") and not r.get("error")]
    near = [r for r in done if abs(r["planned"] / r["measured"] - 1) <= 0.1]
    broken = [r["name"] for r in rows if r.get("fits") and "OutOfMemory" in (r.get("error") or "")]
    print(
        f"{len(near)} of {len(done)} within 10%; ran out although said to fit: {', '.join(broken) or 'none'}",
        flush=True,
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
