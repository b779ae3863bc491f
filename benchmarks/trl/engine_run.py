"""The engine's side: timed steps, the answers to the gates, and learning over seeds. One process a call.

    python benchmarks/trl/engine_run.py time --steps 10 --out engine.json

``compare.py`` calls it; it runs in the environment of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import torch
import workload as given
from safetensors.torch import load_file

from engine_core import Trainer, load_config
from engine_core.types import Prompt, Rollout

FOLDER = Path(__file__).parent
LANES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "matched": {},
        "best-effort": {"actor.torch.compute_dtype": "bf16"},
    },
    "cuda": {
        "matched": {"actor.torch.compute_dtype": "bf16"},
        "best-effort": {
            "actor.torch.compute_dtype": "bf16",
            "actor.max_tokens_per_rank": 49_152,
            "actor.torch.log_prob_chunk_tokens": 8192,
            "actor.torch.log_prob_recompute": False,
        },
    },
}
"""Changes to ``engine.toml``, by device and lane; README.md has the trials."""
VLLM: dict[str, dict[str, Any]] = {
    "matched": {
        "rollout.backend": "vllm",
        "rollout.vllm.gpu_memory_utilization": given.SAMPLER_MEMORY,
        "rollout.vllm.sleep_level": 0,
        "algorithm.correction.level": "token",
        "algorithm.correction.cap": given.CORRECTION_CAP,
    },
    "best-effort": {"rollout.vllm.max_num_batched_tokens": 16_384, "rollout.vllm.per_request_seeds": False},
}
"""Changes where vLLM samples: those of the matched lane are of both."""


def even(completion_ids: list[list[int]]) -> list[float]:
    """The reward, as the engine calls it."""
    return [given.share_of_even(ids) for ids in completion_ids]


class TimedTrainer(Trainer):
    """Tells a clock when a step has ended, with everything that belongs to it."""

    step_clock: measure.Clock  # `clock` is the trainer's own

    def emit(self, event: str, payload: dict[str, Any]) -> None:
        super().emit(event, payload)
        if event != "step_finished":
            return
        metrics = payload["metrics"]
        self.step_clock.step(
            reward=metrics["reward/mean"],
            completion_tokens=metrics["tokens/generated"],
            train_tokens=metrics["tokens/total"],
            generate=metrics["time/generate"],
            gap=metrics["mismatch/mean_abs"],
            ratio=metrics["actor/ratio_mean"],
            kl=metrics["actor/approx_kl"],
        )


def settings(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """What ``engine.toml`` leaves open."""
    sizes = given.WORKLOADS[arguments.workload]
    found = {
        "model.path": str(inputs.model),
        "data.train": str(inputs.data),
        "data.prompts_per_step": sizes.prompts,
        "data.max_prompt_tokens": sizes.prompt_tokens,
        "actor.max_tokens_per_rank": sizes.micro_batch_tokens,
        "rollout.group_size": sizes.group_size,
        "rollout.max_response_tokens": sizes.response_tokens,
        "actor.optim.lr": arguments.lr,
        "actor.torch.device": arguments.device,
        "run.dir": run_dir,
        "run.steps": arguments.steps,
        "run.seed": arguments.seed,
    }
    if arguments.sampler == "vllm":
        found |= VLLM["matched"] | {"rollout.vllm.max_model_len": sizes.prompt_tokens + sizes.response_tokens}
    return found | changes(arguments)


def changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the lane and the command line say of the run file."""
    found = LANES[arguments.device][arguments.lane]
    if arguments.sampler == "vllm":
        found = found | VLLM[arguments.lane]
    return found | dict(json.loads(arguments.set))


def make_trainer(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> TimedTrainer:
    """A trainer that has not begun."""
    return trainer_of(settings(arguments, inputs, run_dir), arguments)


def trainer_of(keys: dict[str, Any], arguments: argparse.Namespace) -> TimedTrainer:
    """With these keys of the run file over those of ``engine.toml``."""
    config = load_config(FOLDER / "engine.toml", keys)
    trainer = TimedTrainer(config, rewards=[even])
    trainer.step_clock = measure.Clock(arguments.device)
    return trainer


def timed(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """Steps, one after another."""
    trainer = make_trainer(arguments, inputs, run_dir)
    trainer.train()
    trainer.close()
    return {"first_step_seconds": trainer.step_clock.first_step_seconds, "steps": trainer.step_clock.steps}


def learned(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """Reward of each step, a list for each seed."""
    curves = []
    for seed in arguments.seeds:
        arguments.seed = seed
        curves.append([step["reward"] for step in timed(arguments, inputs, f"{run_dir}/{seed}")["steps"]])
    return {"rewards": curves}


def gates(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """G2 and G3: steps, with the weights of sampler and trainer after each."""
    trainer = make_trainer(arguments, inputs, run_dir)
    trainer.setup(training=True)
    actor, sampler = (trainer.groups[role].engine for role in ("actor", "rollout"))  # type: ignore[attr-defined]
    used: list[str] = []
    add, push = sampler.add, trainer.runtime.push_weights
    received = [("", measure.checksum(measure.weights_of(actor.module)))]

    def watched(requests: Any) -> Any:
        if len(used) == trainer.step_now:  # not the first requests of this step
            return add(requests)
        if hasattr(sampler, "_generation"):  # hf: the weights that it samples with
            with sampler._generation() as module:
                used.append(measure.checksum(measure.weights_of(module)))
        else:  # those of the last transfer, which the sampler has confirmed with a checksum of its own
            used.append(received[-1][1])
        return add(requests)

    def pushed(*places: Any) -> Any:
        result = push(*places)
        if result.checksum != received[-1][0]:
            received.append((result.checksum, measure.checksum(measure.weights_of(actor.module))))
        return result

    sampler.add, trainer.runtime.push_weights = watched, pushed
    after = [measure.checksum(measure.weights_of(actor.module))]
    optimizer_step = actor.optimizer_step

    def stepped() -> Any:
        done = optimizer_step()
        after.append(measure.checksum(measure.weights_of(actor.module)))
        return done

    actor.optimizer_step = stepped
    trainer.train()
    trainer.close()
    return {"sampler": used, "trainer": after[: len(used)], "steps": trainer.step_clock.steps}


def same(arguments: argparse.Namespace, inputs: given.Inputs, run_dir: str) -> dict[str, Any]:
    """G1 on the batch that TRL dumped. Nothing is sampled: there is no vLLM, whatever the lane has."""
    keys = settings(arguments, inputs, run_dir) | {"rollout.backend": "hf"}
    trainer = trainer_of(
        {key: value for key, value in keys.items() if not key.startswith("rollout.vllm.")}, arguments
    )
    trainer.setup(training=True)
    found = {"same_batch": same_batch(trainer, load_file(arguments.batch))}
    trainer.close()
    return found


def same_batch(trainer: TimedTrainer, dumped: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of the batch that TRL dumped what ``answers`` tells; and of its beginning in float32."""
    rollouts = rollouts_of(dumped, trainer.config.rollout.group_size)
    found = {"rewards": [rollout.reward for rollout in rollouts]}
    found |= answers(trainer, rollouts, dumped["old_log_probs"])
    exact = given.EXACT_RESPONSES
    with in_float32(trainer.groups["actor"].engine, given.EXACT_MICRO_BATCH * len(rollouts[0].token_ids)):  # type: ignore[attr-defined]
        found["float32"] = answers(trainer, rollouts[:exact], dumped["old_log_probs"][:exact])
    return found


def rollouts_of(dumped: dict[str, torch.Tensor], group_size: int) -> list[Rollout]:
    """Rollouts of a batch: ``prompt_ids`` [B, tokens], ``completion_ids`` likewise, groups one after another."""
    prompts, responses = dumped["prompt_ids"].tolist(), dumped["completion_ids"].tolist()
    sampled = dumped.get("rollout_log_probs", torch.zeros(dumped["completion_ids"].shape))
    rollouts = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        mask = torch.tensor([False] * len(prompt) + [True] * len(response))
        rollouts.append(
            Rollout(
                request_id=str(i), prompt=Prompt(str(i // group_size), prompt, ""),
                token_ids=torch.tensor(prompt + response), loss_mask=mask,
                rollout_log_probs=torch.cat([torch.zeros(len(prompt)), sampled[i]]), policy_versions=torch.zeros(len(mask), dtype=torch.int32),
                finish_reason="length", group_id=i // group_size, index=i % group_size, text="",
            )
        )  # fmt: skip
        rollouts[-1].reward = given.share_of_even(response)
        rollouts[-1].rewards = {"even": rollouts[-1].reward}
    return rollouts


def answers(trainer: TimedTrainer, rollouts: list[Rollout], old_log_probs: torch.Tensor) -> dict[str, Any]:
    """Advantages and log-probs of a batch, and the loss and the norm of its gradient: on policy, and with old log-probs [B, tokens]."""
    batch = trainer.with_advantages(trainer.batch(rollouts))
    engine: Any = trainer.groups["actor"].engine  # type: ignore[attr-defined]
    learned_tokens = batch["loss_mask"]
    shape = old_log_probs.shape
    found: dict[str, Any] = {
        "advantages": batch["advantages"][learned_tokens].view(shape)[:, 0].tolist(),
        "log_probs": engine.infer(batch, ("log_probs",))["log_probs"][learned_tokens].view(shape).tolist(),
    }
    for case in ("on_policy", "off_policy"):
        mini = trainer.policy.mini_batches(batch, 1)[0]
        if case == "off_policy":
            old = torch.zeros(batch.num_tokens)
            old[learned_tokens] = old_log_probs.flatten()
            mini = mini.with_columns(tokens={"old_log_probs": old})
        output = engine.forward_backward(mini, trainer.policy.loss_call())
        found[case] = {"loss": output.loss, "grad_norm": measure.total_norm(engine.module)}
        engine.module.zero_grad(set_to_none=True)
    return found


@contextlib.contextmanager
def in_float32(engine: Any, micro_batch_tokens: int) -> Iterator[None]:
    """Without autocast and TF32, and with fewer tokens at once."""
    computed, tokens = engine.forward.compute_dtype, engine.config.max_tokens_per_rank
    precision = torch.get_float32_matmul_precision()
    engine.forward.compute_dtype = torch.float32
    engine.set_token_budget(micro_batch_tokens)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        engine.forward.compute_dtype = computed
        engine.set_token_budget(tokens)
        torch.set_float32_matmul_precision(precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("time", "gates", "same", "learn"))
    parser.add_argument("--workload", choices=given.WORKLOADS, default="cpu")
    parser.add_argument("--lane", choices=LANES["cpu"], default="matched")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sampler", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of learn")
    parser.add_argument("--lr", type=float, default=given.LEARNING_RATE)
    parser.add_argument(
        "--set", default="{}", help="JSON object: keys of the run file over those of the lane"
    )
    parser.add_argument("--cache", type=Path, default=given.CACHE / "workloads")
    parser.add_argument("--warm-up", type=int, default=0, help="of time: steps that the report leaves out")
    parser.add_argument("--batch", type=Path, help="of same: what trl_run.py dumped")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.set_float32_matmul_precision("highest")
    inputs = given.make(given.WORKLOADS[arguments.workload], arguments.cache)
    with tempfile.TemporaryDirectory() as run_dir:
        runs = {"time": timed, "gates": gates, "same": same, "learn": learned}
        result = runs[arguments.what](arguments, inputs, run_dir)
    measure.write(
        arguments.out,
        {
            "framework": "engine", "lane": arguments.lane, "workload": arguments.workload,
            "settings": changes(arguments), "warm_up": arguments.warm_up,
            "inputs": {"model_sha256": inputs.model_sha256, "data_sha256": inputs.data_sha256},
            "surroundings": measure.surroundings(arguments.device), "memory": measure.memory(arguments.device),
            **result,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
