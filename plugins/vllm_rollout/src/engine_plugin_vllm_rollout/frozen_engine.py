"""A train engine of a model that is never trained: a teacher, the models of rewards.

A backend that only scores gives ``infer``, perhaps ``sleep`` and ``wake``, and inherits the refusal of all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.contracts.engines import TrainEngine
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import Batch, LossCall, StepOutput, TrainOutput

ROLES = ("teacher", "reward_model", "judge")
"""Roles that such an engine can have."""


class FrozenEngine(TrainEngine):
    """The base of train engines whose model is never trained (``TrainBackend(frozen_only=True)``)."""

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        super().__init__(config, model_config, context, trainable=trainable)
        check_frozen(config, context, trainable)

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> Any:
        """Check the options of a role; a subclass with more checks calls this one first."""
        check_frozen(config, context, trainable)

    def _build_model_optimizer(self, **_: Any) -> NoReturn:
        self._refuse("build a model to be trained")

    def forward_backward(self, batch: Batch, loss: LossCall) -> TrainOutput:
        self._refuse("be trained")

    def optimizer_step(self) -> StepOutput:
        self._refuse("be trained")

    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Refuse to yield weights ``[D_1, D_2, ...]``: vLLM holds them in a form of its kernels."""
        self._refuse("give weights away")

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Refuse new weights ``[D_1, D_2, ...]``: the model is frozen."""
        self._refuse("take weights")

    def save(self, folder: Path) -> Future[None]:
        self._refuse("be saved: a checkpoint does not hold it")

    def load(self, folder: Path) -> None:
        self._refuse("be loaded from a checkpoint")

    def export(self, folder: Path, adapter: bool = False) -> None:
        self._refuse("be exported")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{self.context.role}.backend = '{self.config.backend}' scores a frozen model, which cannot {what}."
        )


def check_frozen(config: RoleConfig, context: WorkerContext, trainable: bool) -> None:
    """Refuse a role whose weights change, and an adapter.

    Raises:
        ConfigError: it is one.
    """
    if trainable or context.role not in ROLES:
        raise ConfigError(
            f"{context.role}.backend: '{config.backend}' runs models that are never trained, those of a teacher and of "
            "rewards. Choose another train engine."
        )
    if config.lora is not None:
        raise ConfigError(
            f"{context.role}.lora: '{config.backend}' runs a whole model. Merge the adapter into it (engine export RUN OUT "
            "of a run that trained it) and name that folder."
        )
