"""TRL's side: timed steps, the answers to the gates, and learning over seeds. One process a call.

    .cache/trl/venv/bin/python benchmarks/trl/trl_run.py time --steps 10 --out trl.json

``compare.py`` calls it; it runs in TRL's own virtual environment and imports nothing of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import torch
import workload as given
from accelerate.utils import AutocastKwargs
from datasets import load_dataset
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

FOLDER = Path(__file__).parent
LANES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"matched": {}, "best-effort": {"bf16": True}},
    "cuda": {"matched": {}, "best-effort": {"use_liger_kernel": True}},
}
"""Changes to ``settings``, by device and lane; README.md has the trials."""
VLLM: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": given.SAMPLER_MEMORY,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": given.CORRECTION_CAP,
}
"""Changes to ``settings`` where vLLM samples."""


class Even:
    """The reward, as TRL calls it; it remembers its values for the report."""

    __name__ = "even"

    def __init__(self) -> None:
        self.values: list[float] = []
        self.tokens = 0

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        self.values = [given.share_of_even(ids) for ids in completion_ids]
        self.tokens = sum(map(len, completion_ids))
        return self.values


class TimedTrainer(GRPOTrainer):
    """Tells how long sampling took, and what was sampled."""

    seconds_of_generate = 0.0
    total_tokens = 0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.seconds_of_generate = time.perf_counter() - start
        self.total_tokens = sum(map(len, prompt_ids)) + sum(map(len, found[0]))
        return found


class StepClock(TrainerCallback):
    """Tells a clock when a step has ended, with everything that belongs to it."""

    def __init__(self, clock: measure.Clock) -> None:
        self.clock = clock
        self.trainer: TimedTrainer

    def on_log(self, *args: Any, **kwargs: Any) -> None:  # with logging_steps = 1: the last thing of a step
        if len(self.clock.steps) >= self.trainer.state.global_step:  # the summary after the last step
            return
        reward: Even = self.trainer.reward_funcs[0]
        self.clock.step(
            reward=sum(reward.values) / len(reward.values),
            completion_tokens=float(reward.tokens),
            train_tokens=float(self.trainer.total_tokens),
            generate=self.trainer.seconds_of_generate,
        )


def settings(arguments: argparse.Namespace, run_dir: str) -> dict[str, Any]:
    """``GRPOConfig`` of a run: TRL's defaults, but for what both frameworks are told alike."""
    sizes = given.WORKLOADS[arguments.workload]
    cuda = arguments.device == "cuda"
    found: dict[str, Any] = {
        "output_dir": run_dir,
        "max_steps": arguments.steps,
        "seed": arguments.seed,
        "learning_rate": arguments.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": sizes.micro_batch,
        "num_generations": sizes.group_size,
        "max_completion_length": sizes.response_tokens,
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": given.CLIP,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": cuda,
        "use_cpu": not cuda,
        "model_init_kwargs": {"dtype": "float32"},
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    if arguments.sampler == "vllm":
        found |= VLLM | {"vllm_max_model_length": sizes.prompt_tokens + sizes.response_tokens}
    found |= changes(arguments)
    # one optimizer step a batch, whatever the micro-batch is
    found["gradient_accumulation_steps"] = sizes.responses // found["per_device_train_batch_size"]
    return found


def changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the lane and the command line say of the configuration."""
    return LANES[arguments.device][arguments.lane] | dict(json.loads(arguments.set))


def make_trainer(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> TimedTrainer:
    """A trainer that has not begun."""
    callback = StepClock(measure.Clock(arguments.device))
    trainer = TimedTrainer(
        model=str(inputs.model),
        reward_funcs=Even(),
        args=GRPOConfig(**settings(arguments, run_dir)),
        train_dataset=load_dataset("json", data_files=str(inputs.data), split="train", cache_dir=run_dir),
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.clock = callback.clock
    return trainer


def timed(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """Steps, one after another."""
    trainer = make_trainer(arguments, inputs, run_dir)
    trainer.train()
    return {"first_step_seconds": trainer.clock.first_step_seconds, "steps": trainer.clock.steps}


def learned(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """Reward of each step, a list for each seed."""
    curves = []
    for seed in arguments.seeds:
        arguments.seed = seed
        curves.append([step["reward"] for step in timed(arguments, inputs, f"{run_dir}/{seed}")["steps"]])
    return {"rewards": curves}


def gates(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """G1: dump the batch of the first step, and what is computed of it; then steps, with the weights of each."""
    trainer = make_trainer(arguments, inputs, run_dir)
    used: list[str] = []
    after = [measure.checksum(measure.weights_of(trainer.model))]
    found: dict[str, Any] = {}
    generate, score = trainer._generate_single_turn, trainer._generate_and_score_completions

    def watched(*given_arguments: Any, **options: Any) -> Any:
        if trainer.use_vllm:  # those that are handed over in this call, if any are
            result = generate(*given_arguments, **options)
            used.append(handed[-1])
            return result
        sampler = trainer.accelerator.unwrap_model(trainer.model_wrapped)  # what TRL's generate unwraps
        used.append(measure.checksum(measure.weights_of(sampler)))
        return generate(*given_arguments, **options)

    def scored(batch: Any) -> Any:
        made = score(batch)
        if not found:
            found["same_batch"] = same_batch(trainer, made, arguments.batch)
        return made

    class Stepped(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            after.append(measure.checksum(measure.weights_of(trainer.model)))

    if trainer.use_vllm:
        handed = hand_overs(trainer)
    trainer._generate_single_turn, trainer._generate_and_score_completions = watched, scored
    trainer.add_callback(Stepped())
    trainer.train()
    return found | {"sampler": used, "trainer": after[: len(used)], "steps": trainer.clock.steps}


def hand_overs(trainer: TimedTrainer) -> list[str]:
    """Checksums of the weights as each is handed to vLLM; the list grows as the trainer runs."""
    found: list[str] = []
    sync = trainer.vllm_generation.sync_weights

    def synced() -> None:
        sync()
        found.append(measure.checksum(measure.weights_of(trainer.vllm_generation.model)))

    trainer.vllm_generation.sync_weights = synced
    return found


def same_batch(trainer: TimedTrainer, made: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """Of TRL's own batch what ``answers`` tells; and of its beginning in float32.

    The batch is written to ``path``, with ``old_log_probs`` far enough from the policy for the clip to act.
    """
    size = trainer.args.per_device_train_batch_size
    log_probs = score(trainer, made, size)
    noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0)).to(log_probs)
    old = log_probs + 0.3 * noise
    dumped = {
        "prompt_ids": made["prompt_ids"],
        "completion_ids": made["completion_ids"],
        "old_log_probs": old,
    }
    sampled = made.get("sampling_per_token_logps")  # of vLLM alone
    if sampled is not None:
        dumped["rollout_log_probs"] = sampled
    save_file({name: tensor.cpu().contiguous() for name, tensor in dumped.items()}, path)
    reward: Even = trainer.reward_funcs[0]
    found = {"rewards": reward.values} | answers(trainer, made, log_probs, old, size)
    first = slice(0, given.EXACT_RESPONSES)
    part = rows_of(made, first) | {"num_items_in_batch": made["completion_mask"][first].sum()}
    with in_float32(trainer):
        exact = score(trainer, part, given.EXACT_MICRO_BATCH)
        found["float32"] = answers(trainer, part, exact, old[first], given.EXACT_MICRO_BATCH)
    return found


@torch.no_grad()
def score(trainer: TimedTrainer, made: dict[str, torch.Tensor], size: int) -> torch.Tensor:
    """Log-probs of the responses [B, T], ``size`` of them at once."""
    ids = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
    mask = torch.cat([made["prompt_mask"], made["completion_mask"]], dim=1)
    length = made["completion_ids"].shape[1]
    log_probs: torch.Tensor
    log_probs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, size)
    return log_probs


def answers(
    trainer: TimedTrainer,
    made: dict[str, torch.Tensor],
    log_probs: torch.Tensor,
    old: torch.Tensor,
    size: int,
) -> dict[str, Any]:
    """Advantages and log-probs of a batch, and the loss and the norm of its gradient: on policy, and with ``old`` log-probs."""
    sampled = made.get("sampling_per_token_logps")
    found: dict[str, Any] = {"advantages": made["advantages"].tolist(), "log_probs": log_probs.tolist()}
    for case in ("on_policy", "off_policy"):
        loss = 0.0
        for start in range(0, len(log_probs), size):
            rows = slice(start, start + size)
            part = rows_of(made, rows)
            part.pop("old_per_token_logps", None)  # it is then the policy's own
            before = log_probs[rows] if case == "on_policy" else old[rows]
            if case == "off_policy":
                part["old_per_token_logps"] = before
            if "importance_sampling_ratio" in part:
                part["importance_sampling_ratio"] = weight(before, sampled[rows])
            with trainer.compute_loss_context_manager():
                value = trainer.compute_loss(trainer.model, part)
            value.backward()
            loss += value.item()
        found[case] = {"loss": loss, "grad_norm": measure.total_norm(trainer.model)}
        trainer.model.zero_grad(set_to_none=True)
    return found


def rows_of(made: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    """Some responses of a batch; what has no rows is of all."""
    return {k: v[rows] if torch.is_tensor(v) and v.dim() else v for k, v in made.items()}


@contextlib.contextmanager
def in_float32(trainer: TimedTrainer) -> Iterator[None]:
    """Without autocast, which accelerate wraps around the model and TRL around its head; and without TF32."""
    model, accelerator = trainer.model, trainer.accelerator
    forward, handler = model.forward, accelerator.autocast_handler
    precision = torch.get_float32_matmul_precision()
    model.forward = getattr(model, "_original_forward", forward)
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        model.forward, accelerator.autocast_handler = forward, handler
        torch.set_float32_matmul_precision(precision)


def weight(log_probs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """What TRL weighs tokens by, as ``VLLM`` sets it: min(p / p of the sampler, cap), [rows, tokens]."""
    return (log_probs - sampled).exp().clamp(max=given.CORRECTION_CAP)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("time", "gates", "learn"))
    parser.add_argument("--workload", choices=given.WORKLOADS, default="cpu")
    parser.add_argument("--lane", choices=LANES["cpu"], default="matched")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sampler", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of learn")
    parser.add_argument("--lr", type=float, default=given.LEARNING_RATE)
    parser.add_argument(
        "--set", default="{}", help="JSON object: arguments of GRPOConfig over those of the lane"
    )
    parser.add_argument("--cache", type=Path, default=given.CACHE / "workloads")
    parser.add_argument("--warm-up", type=int, default=0, help="of time: steps that the report leaves out")
    parser.add_argument("--batch", type=Path, help="of gates: where the batch is dumped")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    inputs = given.make(given.WORKLOADS[arguments.workload], arguments.cache)
    with tempfile.TemporaryDirectory() as run_dir:
        result = {"time": timed, "gates": gates, "learn": learned}[arguments.what](arguments, inputs, run_dir)
    measure.write(
        arguments.out,
        {
            "framework": "trl", "lane": arguments.lane, "workload": arguments.workload,
            "settings": changes(arguments), "warm_up": arguments.warm_up,
            "inputs": {"model_sha256": inputs.model_sha256, "data_sha256": inputs.data_sha256},
            "surroundings": measure.surroundings(arguments.device), "memory": measure.memory(arguments.device),
            **result,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
