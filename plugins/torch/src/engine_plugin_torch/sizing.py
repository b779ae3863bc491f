"""What ``"auto"`` makes of `max_tokens_per_rank` and `activation_checkpointing`: as many tokens as fit, by an estimate.

Whether activations are recomputed is settled while the engine is built. The token budget is settled at the first use,
when every model of the process has its memory, and then stays. On the CPU, and for models without an estimate, both
are fixed: 8192 tokens, nothing recomputed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from engine_core.contracts.engines import TrainEngine
from engine_plugin_torch import memory
from engine_plugin_torch.memory import (
    Decoder,
    Estimate,
    Held,
    Settings,
    activations,
    free_bytes,
    optimizer_bytes,
)
from engine_plugin_torch.sharded import here

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("engine")


class Sizing(TrainEngine):
    """The part of an engine that knows how much fits; ``TorchBuild`` goes on from it."""

    options: Any
    device: torch.device

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch; ``auto`` is settled when it is first asked for. Collective where ranks are several."""
        tokens = self.config.max_tokens_per_rank
        if isinstance(tokens, int):
            return tokens
        estimate = self._estimate(self.module)
        chosen = memory.ON_CPU
        if estimate is not None:
            chosen = estimate.budget(self._recomputed_share, self.trainable) * self._token_sharers
        chosen = self._agreed(chosen)
        self.set_token_budget(chosen)
        self._tell(estimate, f"max_tokens_per_rank = {chosen}")
        return chosen

    def _recomputes(self, module: nn.Module) -> bool:
        """What ``activation_checkpointing = "auto"`` is, before the module is wrapped. Collective where ranks are several."""
        estimate, chosen = self._estimate(module), False
        if estimate is not None and self.trainable:
            tokens = self.config.max_tokens_per_rank
            wanted = tokens if isinstance(tokens, int) else memory.FEW
            chosen = estimate.checkpointing(-(-wanted // self._token_sharers))
        chosen = self._agreed(-int(chosen)) < 0  # all of them where one must
        self._tell(estimate, f"activations are {'recomputed' if chosen else 'kept'}")
        self._recomputing = chosen
        return chosen

    @property
    def _recomputed_share(self) -> float:
        """Share of the layers that keep their input alone and are recomputed."""
        asked = self.options.activation_checkpointing
        return float(self._recomputing if asked == "auto" else asked)

    def _estimate(self, module: nn.Module) -> Estimate | None:
        """None where the device does not tell its memory, or the model is no dense decoder."""
        free, shape = self._free_bytes(), Decoder.of(module)
        if free is None or shape is None:
            return None
        return Estimate(self._held(module), activations(shape, self._settings), free + self._taken(module))

    @property
    def _settings(self) -> Settings:
        """How this role computes."""
        raise NotImplementedError

    def _taken(self, module: nn.Module) -> int:
        """Bytes of this role that lie on the device already."""
        mine = [*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
        parts = [here(tensor) for tensor in mine]
        there = sum(part.numel() * part.itemsize for part in parts if part.device.type == self.device.type)
        return there + optimizer_bytes(self.optimizer, self.device)

    def _tell(self, estimate: Estimate | None, chosen: str) -> None:
        role = self.context.role
        if estimate is None:
            log.info(
                "%s: %s; there is no estimate of memory on %s for this model.", role, chosen, self.device
            )
            return
        log.info("%s: memory of one rank, by estimate:", role)
        for name, size in estimate.table():
            log.info("    %-24s %14s", name, size)
        log.info("%s: %s.", role, chosen)

    # -- of engines that shard ----------------------------------------------

    def _held(self, module: nn.Module) -> Held:
        """Bytes on this rank, of a module before or after it is sharded."""
        return Held.of(module, self.trainable)

    @property
    def _token_sharers(self) -> int:
        """Ranks that share the tokens of a micro-batch."""
        return 1

    def _agreed(self, number: int) -> int:
        """The smallest over the ranks of the role."""
        return number

    def _free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None where the device does not tell."""
        return free_bytes(self.device)
