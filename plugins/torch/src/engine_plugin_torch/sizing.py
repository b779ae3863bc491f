"""What ``"auto"`` makes of `max_tokens_per_rank` and `activation_checkpointing`: as many tokens as fit, by an estimate.

Both are settled at the first use, when every model of the process and the sampler have their memory, and then stay. What
other roles of this process have still to allocate (gradients, the state of an optimizer) is subtracted. On the CPU, and
for models without an estimate, both are fixed: 8192 tokens, nothing recomputed.
"""

from __future__ import annotations

import logging
import weakref
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

_ENGINES: weakref.WeakSet[Sizing] = weakref.WeakSet()  # of this process, which share its device


class Sizing(TrainEngine):
    """The part of an engine that knows how much fits; ``TorchBuild`` goes on from it."""

    options: Any
    device: torch.device
    module: nn.Module
    _asleep: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recomputing: bool | None = None  # what "auto" is; None until it is settled
        self._auto_tokens: int | None = (
            None  # the token budget that "auto" was, here or in the run that is resumed
        )
        _ENGINES.add(self)

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch; ``auto`` is settled when it is first asked for. Collective where ranks are several."""
        asked = getattr(self.options, "activation_checkpointing", False) if self.trainable else False
        if self.config.max_tokens_per_rank == "auto" or (asked == "auto" and self._recomputing is None):
            self._settle_memory()
        return int(self.config.max_tokens_per_rank)

    def _settle_memory(self) -> None:
        """Choose whether activations are recomputed, then the token budget. Collective where ranks are several."""
        estimate, tokens, sharers = (
            self._estimate(self.module),
            self.config.max_tokens_per_rank,
            self._token_sharers,
        )
        if self._recomputing is None:
            wanted = memory.FEW if tokens == "auto" else tokens
            fits = estimate is None or not self.trainable or not estimate.checkpointing(-(-wanted // sharers))
            self._recomputing = not self._agreed(int(fits))  # all ranks where one must
        if tokens == "auto":
            most = memory.ON_CPU
            if estimate is not None:
                most = estimate.budget(self._recomputed_share, self.trainable) * sharers
            # a resumed run has the micro-batches that it had, so that it rounds alike
            self._auto_tokens = self._agreed(min(most, self._auto_tokens or most))
            self.set_token_budget(self._auto_tokens)
        self._report_memory(estimate)

    @property
    def _recomputed_share(self) -> float:
        """Share of the layers that keep their input alone and are recomputed."""
        asked = getattr(self.options, "activation_checkpointing", False)  # not of every backend
        return float(bool(self._recomputing if asked == "auto" else asked))

    def _estimate(self, module: nn.Module) -> Estimate | None:
        """None where the device does not tell its memory, or the model is no dense decoder."""
        free, shape = self._free_bytes(), Decoder.of(module)
        if free is None or shape is None:
            return None
        free -= sum(
            other._outstanding for other in _ENGINES if other is not self and other.device == self.device
        )
        return Estimate(self._held(module), activations(shape, self._settings), free + self._taken(module))

    @property
    def _outstanding(self) -> int:
        """Bytes that this role has still to allocate on its device; one that sleeps or is closed takes none."""
        if "module" not in self.__dict__ or self._asleep:
            return 0
        return max(0, self._held(self.module).total - self._taken(self.module))

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

    def _report_memory(self, estimate: Estimate | None) -> None:
        """Log what was chosen, and the estimate that it follows from."""
        role, kept = self.context.role, "recomputed" if self._recomputed_share else "kept"
        chosen = f"max_tokens_per_rank = {self.config.max_tokens_per_rank}"
        chosen += f", activations are {kept}" if self.trainable else ""
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
