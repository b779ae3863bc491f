"""A train engine of a model that is never trained: a teacher, the models of rewards.

A backend that only scores gives ``infer``, perhaps ``sleep`` and ``wake``, and inherits the refusal of all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.contracts.engines import TrainEngine

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch, LossCall, StepOutput, TrainOutput


class FrozenEngine(TrainEngine):
    """The base of train engines whose model is never trained (``TrainBackend(frozen_only=True)``)."""

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
