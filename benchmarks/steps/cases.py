"""The run files of ``default_files.py``: a model's shape, the GPUs, and the lines that these ask for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plan_vs_peak import write_inputs

PROMPT, RESPONSE = 256, 512
TINY_PROMPT, TINY_RESPONSE, TINY_PROMPTS = 32, 16, 4


@dataclass(frozen=True)
class Case:
    """One run file.

    Attributes:
        shape: of the model.
        gpus: number of processes, of one GPU each.
        lines: of the run file, after those that all have.
        prompts: of a step.
        learners: GPUs that train; 0: all.
        model: keys over those of the shape.
        trainer: ``rl`` or ``async``.
    """

    shape: str
    gpus: int = 1
    lines: str = ""
    prompts: int = 64
    learners: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    trainer: str = "rl"


FSDP = '[actor]\nbackend = "fsdp"\n'
BESIDE = "[rollout.process]\n"  # the sampler in a process of its own on each GPU
HYBRID = '[actor.fsdp]\nsharding = "hybrid"\nshard_group_size = 2\n'
MEGATRON = '[actor]\nbackend = "megatron"\n[actor.megatron]\n'
CUT_SAMPLER = "[rollout.vllm]\ntensor_parallel_size = 2\n"
POOLS = '[placement]\npools = { train = 2, serve = 2 }\nactor = "train"\nrollout = "serve"\n'
AHEAD = "[async]\nmax_staleness = 2\n"
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""5 billion weights, of which a token uses 1 billion."""
TINY = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES = {
    "0.6b": Case("qwen3-0.6b"),
    "0.6b-process": Case("qwen3-0.6b", 1, BESIDE),
    "1.7b": Case("qwen3-1.7b"),
    "4b": Case("qwen3-4b"),
    "8b": Case("qwen3-8b"),
    "0.6b-x2": Case("qwen3-0.6b", 2, BESIDE + FSDP),
    "1.7b-x2": Case("qwen3-1.7b", 2, BESIDE + FSDP),
    "1.7b-x2-128": Case("qwen3-1.7b", 2, BESIDE + FSDP, 128),
    "4b-x2": Case("qwen3-4b", 2, BESIDE + FSDP),
    "8b-x2-128": Case("qwen3-8b", 2, BESIDE + FSDP, 128),
    "1.7b-x4-256": Case("qwen3-1.7b", 4, BESIDE + FSDP, 256),
    "8b-x4-256": Case("qwen3-8b", 4, BESIDE + FSDP, 256),
    "8b-hybrid-x4-256": Case("qwen3-8b", 4, BESIDE + FSDP + HYBRID, 256),
    "8b-tp2-pp2": Case("qwen3-8b", 4, MEGATRON + "tp = 2\npp = 2\n" + CUT_SAMPLER, 256),
    "8b-tp4": Case("qwen3-8b", 4, MEGATRON + "tp = 4\n" + CUT_SAMPLER, 256),
    "mixture-ep4": Case("qwen3-1.7b", 4, MEGATRON + "ep = 4\n" + CUT_SAMPLER, 256, model=MIXTURE),
    "1.7b-2+2": Case("qwen3-1.7b", 4, BESIDE + FSDP + POOLS, 128, 2),
    "8b-2+2": Case("qwen3-8b", 4, BESIDE + FSDP + POOLS, 128, 2),
    "1.7b-2+2-async": Case("qwen3-1.7b", 4, BESIDE + FSDP + POOLS + AHEAD, 128, 2, trainer="async"),
    "8b-2+2-async": Case("qwen3-8b", 4, BESIDE + FSDP + POOLS + AHEAD, 128, 2, trainer="async"),
}
"""By name."""
SCALING = ("1.7b-x4-256", "8b-x4-256", "8b-hybrid-x4-256", "8b-tp2-pp2", "8b-tp4", "mixture-ep4")
SCALING += ("1.7b-2+2", "1.7b-2+2-async", "8b-2+2", "8b-2+2-async")
"""The cases of four GPUs."""
FILE = """
trainer = "{trainer}"
plugins = ["even.py"]
[model]
path = "model"
[rollout]
backend = "{sampler}"
group_size = 8
max_response_tokens = {response}
max_log_prob_gap = 100.0
[[reward]]
name = "even"
[algorithm]
advantage = "grpo"
[data]
train = "rows.jsonl"
max_prompt_tokens = {prompt}
prompts_per_step = {prompts}
[run]
dir = "runs"
name = "run"
steps = {steps}
[checkpoint]
at_end = false
[tracking]
trackers = []
rollouts_every_steps = 0
"""
RUNTIME = '[runtime]\nbackend = "torchrun"\n[runtime.torchrun]\ndevice = "{device}"\n'
REWARD = '''"""A reward: the share of even tokens."""

from engine_core import hookimpl
from engine_core.specs import Reward


def even(completion_ids: list[list[int]]) -> list[float]:
    """Return the share of even tokens of each response."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


@hookimpl
def engine_rewards():
    """Offer the reward."""
    return {"even": Reward(load=even)}
'''


def write(case: Case, folder: Path, steps: int, tiny: bool) -> None:
    """Write model, data, reward and run file of a case.

    Args:
        case: what to run.
        folder: an empty folder.
        steps: of the run.
        tiny: the same layout with a tiny model, sampled by `hf`, on CPUs.
    """
    write_inputs("tiny" if tiny else case.shape, folder)
    path = folder / "model/config.json"
    small = {"num_key_value_heads": 4} if tiny else {}  # as many as `tp` needs
    model = case.model | (TINY if tiny and case.model else {}) | small
    path.write_text(json.dumps(json.loads(path.read_text()) | model))
    (folder / "even.py").write_text(REWARD)
    words = {"sampler": "vllm", "response": RESPONSE, "prompt": PROMPT, "prompts": case.prompts}
    lines = case.lines
    if tiny:
        words = {"sampler": "hf", "response": TINY_RESPONSE, "prompt": TINY_PROMPT, "prompts": TINY_PROMPTS}
        lines = lines.replace(CUT_SAMPLER, "")
        lines = lines.replace("[actor.megatron]\n", "[actor.megatron]\ncpu_emulation = true\n")
    if case.gpus > 1:
        lines += RUNTIME.format(device="cpu" if tiny else "auto")
        lines += "" if "[placement]" in lines else f"processes = {case.gpus}\n"
    row = {"prompt": " ".join(f"t{i % 400 + 3}" for i in range(int(words["prompt"])))}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * int(words["prompts"]))
    (folder / "run.toml").write_text(FILE.format(**words, steps=steps, trainer=case.trainer) + lines)
