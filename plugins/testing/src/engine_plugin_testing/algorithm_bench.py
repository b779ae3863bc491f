"""The benches of advantage estimators, losses and stages: batches and rollouts as a run gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine_core.config.requirements import MEASURED
from engine_core.specs import RefillOptions
from engine_core.types import Batch, Prompt, Rollout
from engine_plugin_testing.bench import Bench

PROMPT, RESPONSE = 2, 3  # tokens of a sample
Groups = Sequence[Sequence[float]]


class AlgorithmBench(Bench):
    """A bench of one function or class with its options."""

    @property
    def name(self) -> str:
        """The name under test."""
        return str(self.settings["name"])

    @property
    def examples(self) -> list[tuple[Any, Any]]:
        """The examples of the suite."""
        found = [(given, expected) for given, expected in self.settings["examples"]]
        assert found, "The suite has no `examples`; give pairs of what goes in and what comes out."
        return found

    def spec(self) -> Any:
        """Return the spec of the name."""
        return self.load_plugins().spec(self.kind, self.name)

    def function(self) -> Callable[..., Any]:
        """Return the function of the name; errors of it name the plugin, as in a run."""
        return self.load_plugins().function(self.kind, self.name)

    def option_values(self) -> dict[str, Any]:
        """Return the checked options by name."""
        table = self.checked_options(self.load_plugins())
        own = set(RefillOptions.model_fields) if isinstance(table, RefillOptions) else set()
        values: dict[str, Any] = table.model_dump(exclude=own)
        return values


def batch_of(groups: Groups, needs: Sequence[str] = (), seed: int = 0) -> Batch:
    """Return the batch of some groups, with random values in the columns that the core computes.

    Args:
        groups: rewards by group.
        needs: columns besides those that every batch has.
        seed: of the random values.
    """
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.tensor([reward for group in groups for reward in group])
    count, size = len(rewards), PROMPT + RESPONSE
    mask = torch.tensor([False] * PROMPT + [True] * RESPONSE).repeat(count)

    def log_probs() -> Tensor:
        """Return [T] random log-probs; 0 outside of the mask."""
        return -torch.rand(count * size, generator=generator) * mask

    tokens: dict[str, Tensor] = {
        "loss_mask": mask,
        "rollout_log_probs": log_probs(),
        "policy_versions": torch.zeros(count * size, dtype=torch.int32),
    }
    ids = [number for number, group in enumerate(groups) for _ in group]
    sequences: dict[str, Tensor] = {
        "rewards": rewards,
        "group_ids": torch.tensor(ids),
        "valid": torch.ones(count, dtype=torch.bool),
        "truncated": torch.zeros(count, dtype=torch.bool),
        "response_lengths": torch.full((count,), RESPONSE),
        "reward/kit": rewards.clone(),
        "reward_term/kit": rewards.clone(),
        "reward_weight/kit": torch.ones(count),
    }
    for name in sorted(set(needs) - tokens.keys() - sequences.keys()):
        if name == "greedy_rewards":
            sequences[name] = torch.rand(count, generator=generator)
        elif name != "reward_terms":
            tokens[name] = log_probs()
    return Batch(
        token_ids=torch.randint(2, 90, (count * size,), generator=generator),
        lengths=torch.full((count,), size),
        tokens=tokens,
        sequences=sequences,
    )


class AdvantageBench(AlgorithmBench):
    """A bench that calls an estimator."""

    kind = "advantages"

    def batch(self, groups: Groups) -> Batch:
        """Return a batch of groups with the columns that the estimator declares."""
        return batch_of(groups, sorted(self.spec().needs))

    def advantages(self, batch: Batch) -> Tensor:
        """Return the advantages [T] as a run takes them, after its checks."""
        from engine_core.train.update import check_columns

        made = self.function()(batch, **self.option_values())
        columns = dict(made) if isinstance(made, dict) else {"advantages": made}
        check_columns(self.name, columns, batch.num_tokens)
        return columns["advantages"].double()


class LossBench(AlgorithmBench):
    """A bench that calls a loss."""

    kind = "losses"

    def batch(self, log_probs: Tensor, old: Tensor, advantages: Tensor) -> tuple[dict[str, Tensor], Batch]:
        """Return outputs and batch of sequences of 2 + 3 tokens, filled up with tokens that nothing is learned from.

        Args:
            log_probs, old, advantages: [N] of the tokens that are learned from, N a multiple of 3.
        """
        batch = batch_of([[0.0] * (len(log_probs) // RESPONSE)], sorted(self.spec().needs - {"advantages"}))
        mask = batch["loss_mask"]

        def placed(values: Tensor) -> Tensor:
            """Return [T] with the values at the tokens of the mask."""
            return torch.zeros(batch.num_tokens).masked_scatter(mask, values.float())

        outputs = {name: placed(log_probs) for name in self.spec().outputs}
        outputs["log_probs"] = placed(log_probs).requires_grad_()
        columns = {
            "advantages": placed(advantages),
            "old_log_probs": placed(old),
            "rollout_log_probs": placed(old),
        }
        measured = {name: outputs[output].detach() for name, output in MEASURED.items() if output in outputs}
        weights = mask.float() / mask.sum()
        shares = {"weights": weights, "token_share": weights}
        return outputs, batch.with_columns(tokens=columns | measured | shares)

    def losses(self, outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [T] and metrics [T] of outputs [T], after the checks of a run."""
        from engine_core.algorithms.objectives import check_token_loss

        made = self.function()(outputs, batch, **self.option_values())
        check_token_loss(self.name, made, outputs["log_probs"])
        losses, metrics = made
        return losses, metrics


class StageBench(AlgorithmBench):
    """A bench that calls a stage."""

    kind = "stages"

    def stage(self) -> Callable[[list[Rollout], int], Any]:
        """Return a new stage: an object of the class, or the function with its options."""
        made, options = self.function(), self.option_values()
        if isinstance(self.load_plugins().resolve(self.kind, self.name), type):
            stage: Callable[[list[Rollout], int], Any] = made(**options)
            return stage
        return lambda rollouts, step: made(rollouts, step, **options)

    def rollouts(self, groups: Groups, step: int = 1) -> list[Rollout]:
        """Return the scored rollouts of groups of rewards; prompts and ids differ from step to step."""
        made = []
        for number, group in enumerate(groups):
            row = (step - 1) * len(groups) + number
            prompt = Prompt(f"train:{row}", [5, 6], f"prompt {row}", {"answer": str(row)})
            for index, reward in enumerate(group):
                count = PROMPT + RESPONSE
                made.append(
                    Rollout(
                        request_id=f"{step}:{number}:{index}",
                        prompt=prompt,
                        token_ids=torch.tensor([5, 6, 10 + index, 20 + number, 1]),
                        loss_mask=torch.arange(count) >= PROMPT,
                        rollout_log_probs=-torch.arange(count).float() / count,
                        policy_versions=torch.full((count,), step - 1, dtype=torch.int32),
                        finish_reason="stop",
                        group_id=number,
                        index=index,
                        text=f"response {index}",
                        reward=float(reward),
                        rewards={"kit": float(reward)},
                    )
                )
        return made
