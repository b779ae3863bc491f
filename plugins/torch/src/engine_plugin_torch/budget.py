"""The memory budget of an engine: what ``"auto"`` makes of `max_tokens_per_rank` and `activation_checkpointing`.

As many tokens as fit, by an estimate. Both are settled at the first use, when every model of the process and the sampler
have their memory, and then stay. What other roles of this process have still to allocate (gradients, the state of an
optimizer) is subtracted. On the CPU, and for models without an estimate, both are fixed: 8192 tokens, nothing recomputed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from engine_plugin_torch import memory
from engine_plugin_torch.memory import (
    Decoder,
    Estimate,
    Held,
    Settings,
    activations,
    optimizer_bytes,
)
from engine_plugin_torch.sharded import here
from engine_plugin_torch.value_models import VALUE_ROLES

if TYPE_CHECKING:
    from engine_core.types import Batch
    from engine_plugin_torch.engine import TorchEngine

log = logging.getLogger("engine")
Result = TypeVar("Result")

_BUDGETS: weakref.WeakSet[MemoryBudget] = weakref.WeakSet()  # of this process, whose engines share its device


class MemoryBudget:
    """The part of an engine that knows how much fits. A backend replaces how much a rank holds and what ranks agree on.

    Attributes:
        engine: that this is part of, held weakly: an engine that nobody else holds is gone at once.
        recomputing: what ``"auto"`` is; None until it is settled.
        auto_tokens: the token budget that ``"auto"`` was, here or in the run that is resumed.
    """

    engine: TorchEngine

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = weakref.proxy(engine)
        self.recomputing: bool | None = None
        self.auto_tokens: int | None = None
        _BUDGETS.add(self)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch; ``auto`` is settled when it is first asked for. Collective where ranks are several."""
        engine = self.engine
        asked = getattr(engine.options, "activation_checkpointing", False) if engine.trainable else False
        if engine.config.max_tokens_per_rank == "auto" or (asked == "auto" and self.recomputing is None):
            self._settle()
        return int(engine.config.max_tokens_per_rank)

    @property
    def recomputed_share(self) -> float:
        """Share of the layers that keep their input alone and are recomputed."""
        asked = getattr(self.engine.options, "activation_checkpointing", False)  # not of every backend
        return float(bool(self.recomputing if asked == "auto" else asked))

    def retry(
        self, batch: Batch, run: Callable[[], Result], undo: Callable[[], object] | None = None
    ) -> Result:
        """Return ``run()``; where the device has no memory for it try once more, with half the tokens.

        Args:
            batch: that ``run`` works on.
            run: may be called again.
            undo: takes back what a failed try has left.
        """
        while True:
            try:
                return run()
            except torch.OutOfMemoryError as error:
                if not self.halve(batch, error):
                    raise
            if undo is not None:
                undo()
            if self.engine.device.type != "cpu":
                torch.accelerator.empty_cache()

    def halve(self, batch: Batch, error: Exception) -> bool:
        """Take half the tokens from here on, where one process is alone and a micro-batch can be smaller."""
        tokens = min(self.tokens, batch.num_tokens)
        if self.engine.layout.dp_size > 1 or tokens <= int(batch.lengths.max()):
            return False
        self.engine.set_token_budget(tokens // 2)
        log.warning(
            "Out of memory with %d tokens in a micro-batch; going on with %d. "
            "Set %s.max_tokens_per_rank = %d to begin there. (%s)",
            tokens,
            tokens // 2,
            self.engine.context.role,
            tokens // 2,
            str(error).partition("\n")[0][:120],
        )
        return True

    def _settle(self) -> None:
        """Choose whether activations are recomputed, then the tokens. Collective where ranks are several."""
        engine = self.engine
        estimate, tokens, sharers = self.estimate(), engine.config.max_tokens_per_rank, self.token_sharers
        if self.recomputing is None:
            wanted = memory.FEW if tokens == "auto" else tokens
            fits = (
                estimate is None or not engine.trainable or not estimate.checkpointing(-(-wanted // sharers))
            )
            self.recomputing = not self.agreed(int(fits))  # all ranks where one must
        if tokens == "auto":
            most = memory.ON_CPU
            if estimate is not None:
                most = estimate.budget(self.recomputed_share, engine.trainable) * sharers
            # a resumed run has the micro-batches that it had, so that it rounds alike
            self.auto_tokens = self.agreed(min(most, self.auto_tokens or most))
            engine.set_token_budget(self.auto_tokens)
        self._report(estimate)

    def estimate(self) -> Estimate | None:
        """Return None where the device does not tell its memory, or the model is no dense decoder."""
        free, shape = self.free_bytes(), Decoder.of(self.engine.module)
        if free is None or shape is None:
            return None
        free -= sum(
            other._outstanding
            for other in _BUDGETS
            if other is not self and other.engine.device == self.engine.device
        )
        return Estimate(self.held(), activations(shape, self.settings), free + self._taken())

    @property
    def _outstanding(self) -> int:
        """Bytes that this role has still to allocate on its device; one that sleeps or is closed takes none."""
        if "module" not in self.engine.__dict__ or self.engine.store.asleep:
            return 0
        return max(0, self.held().total - self._taken())

    @property
    def settings(self) -> Settings:
        """How this role computes."""
        engine, options, types = self.engine, self.engine.options, self.engine.precision
        half = types.compute in (torch.float16, torch.bfloat16)
        return Settings(
            param=types.param,
            compute=types.compute,
            chunk=0 if engine.context.role in VALUE_ROLES else options.log_prob_chunk_tokens,
            recompute=options.log_prob_recompute is not False,
            wide_chunk=options.sequence_chunk_tokens,
            compiled=engine._compiles,
            kernel=engine.device.type == "cuda" and half,
        )

    def _taken(self) -> int:
        """Bytes of this role that lie on the device already."""
        module, device = self.engine.module, self.engine.device
        mine = [*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
        parts = [here(tensor) for tensor in mine]
        there = sum(part.numel() * part.itemsize for part in parts if part.device.type == device.type)
        return there + optimizer_bytes(self.engine.optimizer, device)

    def _report(self, estimate: Estimate | None) -> None:
        """Log what was chosen, and the estimate that it follows from."""
        engine, kept = self.engine, "recomputed" if self.recomputed_share else "kept"
        role, chosen = engine.context.role, f"max_tokens_per_rank = {engine.config.max_tokens_per_rank}"
        chosen += f", activations are {kept}" if engine.trainable else ""
        if estimate is None:
            log.info(
                "%s: %s; there is no estimate of memory on %s for this model.", role, chosen, engine.device
            )
            return
        log.info("%s: memory of one rank, by estimate:", role)
        for name, size in estimate.table():
            log.info("    %-24s %14s", name, size)
        log.info("%s: %s.", role, chosen)

    # -- of engines that shard ----------------------------------------------

    def held(self) -> Held:
        """Bytes of the engine's module on this rank, of one that is spread over devices those of its own."""
        engine = self.engine
        if engine.spread is not None:
            return engine.spread.held(engine.module, engine.device)
        return Held.of(engine.module, engine.trainable)

    @property
    def token_sharers(self) -> int:
        """Ranks that share the tokens of a micro-batch."""
        return 1

    def agreed(self, number: int) -> int:
        """The smallest over the ranks of the role."""
        return number

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None where the device does not tell."""
        return memory.free_bytes(self.engine.device)
