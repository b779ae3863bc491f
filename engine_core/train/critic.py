"""The critic's side of a step: a model of the return, trained beside the policy (PPO).

``values[t]`` is the return that is expected before token t is sampled, read from the hidden state of the
token before it. The critic's loss is the mean over the sampled tokens of the mini-batch, whatever
`algorithm.loss_aggregation` says of the policy's: it is a regression, one row a token.

Left out: what the values are for. That is the advantage estimator's (``gae``), which also gives the returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_core.contracts.runtime import Role
from engine_core.train.run import combine
from engine_core.types import LossCall

if TYPE_CHECKING:
    from engine_core.train.trainer import Trainer
    from engine_core.types import Batch


class CriticUpdate:
    """What one batch of rollouts does to the critic of a run; nothing where the algorithm needs none.

    Args:
        run: the trainer that it serves, whose ``policy`` is planned.
    """

    def __init__(self, run: Trainer) -> None:
        self.run = run
        self.needed = run.policy.plan.needs_critic
        table = run.config.critic if self.needed else None
        self.warmup_steps = table.warmup_steps if table else 0
        self.clip_ratio = table.clip_ratio if table else 0.0

    def roles(self) -> dict[str, Role]:
        """The critic, where there is one."""
        return {"critic": Role("train")} if self.needed else {}

    @property
    def idle_steps(self) -> int:
        """Optimizer steps of the run that the policy leaves out."""
        return self.warmup_steps * self.run.policy.plan.updates_per_step

    def alone(self, step: int) -> bool:
        """Whether only the critic learns in this step."""
        return step <= self.warmup_steps

    def update(self, batch: Batch, minis: Sequence[Batch]) -> dict[str, float]:
        """One optimizer step for each mini-batch, before the policy's.

        Args:
            batch: of the step, with ``values`` and ``returns``.
            minis: its mini-batches, with ``token_share``.

        Returns:
            ``critic/...`` metrics.
        """
        if not self.needed:
            return {}
        totals: dict[str, list[float]] = {}
        for mini in minis:
            for name, value in self._update_on(mini).items():
                totals.setdefault(name, []).append(value)
        return combine(totals) | {"critic/explained_variance": explained_variance(batch)}

    def _update_on(self, mini: Batch) -> dict[str, float]:
        if not bool(mini["loss_mask"].any()):
            return {"critic/empty_updates": 1.0}
        mini = mini.with_columns(tokens={"weights": mini["token_share"]})
        call = LossCall("value", {"value_clip": self.clip_ratio or None}, outputs=("values",))
        return self.run.learn(mini, call, role="critic")


def explained_variance(batch: Batch) -> float:
    """``1 - Var(G - V) / Var(G)`` over the loss tokens: 1 is a critic that knows the returns, 0 one that knows their mean.

    Args:
        batch: ``returns`` [T] (G), ``values`` [T] (V, before the update), ``loss_mask`` [T].

    Returns:
        At most 1; 0 where all returns are equal or there is at most one.
    """
    mask = batch["loss_mask"]
    returns, values = batch["returns"][mask].double(), batch["values"][mask].double()
    spread = float(returns.var(correction=0)) if len(returns) > 1 else 0.0
    return 1.0 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
