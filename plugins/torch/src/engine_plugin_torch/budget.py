"""The memory budget of an engine: the values of `max_tokens_per_rank` and `activation_checkpointing` at ``"auto"``.

The budget is the number of tokens that fit, by an estimate. Both values are chosen at the first use, when every model
of the process and the sampler have their memory, and then stay. Memory that other roles of this process have still to
allocate (gradients, optimizer state) is subtracted. On the CPU, and for models without an estimate, both are fixed:
8192 tokens, nothing recomputed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine_plugin_torch import memory
from engine_plugin_torch.memory import (
    Decoder,
    Estimate,
    Held,
    Settings,
    activations,
    adapter_bytes,
    optimizer_bytes,
)
from engine_plugin_torch.sharded import here
from engine_plugin_torch.value_models import VALUE_ROLES

if TYPE_CHECKING:
    from torch import nn

    from engine_core.types import Batch
    from engine_plugin_torch.engine import TorchEngine
    from engine_plugin_torch.precision import Precision

log = logging.getLogger("engine")
Result = TypeVar("Result")

_BUDGETS: weakref.WeakSet[MemoryBudget] = weakref.WeakSet()  # the budgets of all engines in this process


class MemoryBudget:
    """The part of an engine that decides how many tokens fit into memory.

    A backend overrides how much a rank holds and how ranks agree.

    Attributes:
        engine: the engine that this is a part of; a weak reference, so the engine is freed without a cycle.
        recomputing: the choice for ``activation_checkpointing = "auto"``; None until it is made.
        auto_tokens: the token budget chosen for ``"auto"``, here or in the run that is resumed.
    """

    engine: TorchEngine
    RECOMPUTATION: tuple[Any, Any] = (
        False,
        True,
    )  #: values of `activation_checkpointing` without and with it

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = weakref.proxy(engine)
        self.recomputing: bool | None = None
        self.auto_tokens: int | None = None
        _BUDGETS.add(self)

    @property
    def tokens(self) -> int:
        """Most tokens of a micro-batch; the first access resolves ``auto``, which is collective over the ranks."""
        engine = self.engine
        asked = getattr(engine.options, "activation_checkpointing", False) if engine.trainable else False
        if engine.config.max_tokens_per_rank == "auto" or (asked == "auto" and self.recomputing is None):
            self._settle()
        return int(engine.config.max_tokens_per_rank)

    @property
    def recomputed_share(self) -> float:
        """Share of the layers that keep only their input and are recomputed."""
        return self.share_of(self.engine.options, bool(self.recomputing))

    @classmethod
    def variants(cls, options: Any) -> list[tuple[dict[str, Any], Any]]:
        """Return what a memory plan may choose besides recomputation: keys with their values, and the table with them.

        The first that needs no recomputation is chosen, else the first that fits.
        """
        return [({}, options)]

    @classmethod
    def share_of(cls, options: Any, recomputing: bool) -> float:
        """Return ``recomputed_share`` by a role's table; ``recomputing`` is the choice for ``auto``."""
        asked = getattr(options, "activation_checkpointing", False)  # not every backend has it
        return float(recomputing if asked == "auto" else bool(asked))

    def retry(
        self, batch: Batch, run: Callable[[], Result], undo: Callable[[], object] | None = None
    ) -> Result:
        """Return ``run()``; after each out-of-memory error, halve the tokens and run again while that is possible.

        Args:
            batch: the batch that ``run`` works on.
            run: the function to call, once or more.
            undo: reverts what a failed call has left.

        Raises:
            torch.OutOfMemoryError: the tokens cannot be halved (see ``halve``).
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
        """Halve the token budget and return True; return False with several ranks or at the longest sequence."""
        tokens = min(self.tokens, batch.num_tokens)
        if self.engine.layout.dp_size > 1 or tokens <= int(batch.lengths.max()):
            return False
        self.engine.set_token_budget(tokens // 2)
        log.warning(
            "Out of memory with %d tokens in a micro-batch; continuing with %d. "
            "Set %s.max_tokens_per_rank = %d to begin there. (%s)",
            tokens,
            tokens // 2,
            self.engine.context.role,
            tokens // 2,
            str(error).partition("\n")[0][:120],
        )
        return True

    def _settle(self) -> None:
        """Choose whether activations are recomputed, then the tokens. Collective over the ranks."""
        engine = self.engine
        estimate, tokens, sharers = self.estimate(), engine.config.max_tokens_per_rank, self.token_sharers
        if self.recomputing is None:
            wanted = memory.FEW if tokens == "auto" else tokens
            fits = (
                estimate is None or not engine.trainable or not estimate.checkpointing(-(-wanted // sharers))
            )
            self.recomputing = not self.agreed(int(fits))  # on all ranks if one rank must
        if tokens == "auto":
            most = memory.ON_CPU
            if estimate is not None:
                most = estimate.budget(self.recomputed_share, engine.trainable) * sharers
            # a resumed run keeps its micro-batches, so that it rounds alike
            self.auto_tokens = self.agreed(min(most, self.auto_tokens or most))
            engine.set_token_budget(self.auto_tokens)
        self._report(estimate)

    def estimate(self) -> Estimate | None:
        """Return the estimate; None where the device does not report its memory, or the model is no dense decoder."""
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
        """Bytes that this role has still to allocate on its device; 0 where it sleeps or is closed."""
        if "module" not in self.engine.__dict__ or self.engine.store.asleep:
            return 0
        return max(0, self.held().total - self._taken())

    @property
    def settings(self) -> Settings:
        """The settings of this role that the estimate depends on."""
        engine = self.engine
        half = engine.precision.compute in (torch.float16, torch.bfloat16)
        kernel = engine.device.type == "cuda" and half
        role, compiled = engine.context.role, engine._compiles
        return self.settings_of(engine.module, engine.options, engine.precision, role, compiled, kernel)

    @classmethod
    def settings_of(
        cls, module: nn.Module, options: Any, types: Precision, role: str, compiled: bool, kernel: bool
    ) -> Settings:
        """Return the settings of a role, which may not be built.

        Args:
            module: the role's model with its adapter; parameters may be on ``meta``.
            options: the role's table.
            types: of the role.
            role: name of the role.
            compiled: layers are compiled.
            kernel: see ``Settings``.
        """
        shape, value = Decoder.of(module), role in VALUE_ROLES
        head = None if value else getattr(module, "get_output_embeddings", lambda: None)()
        return Settings(
            param=types.param,
            compute=types.compute,
            chunk=0 if value else options.log_prob_chunk_tokens,
            recompute=options.log_prob_recompute,
            compiled=compiled,
            kernel=kernel,
            adapter=0
            if shape is None
            else adapter_bytes(module, shape.layers, not compiled and types.compute.itemsize < 4),
            head=head is not None and any(p.requires_grad for p in head.parameters()),
        )

    def _taken(self) -> int:
        """Return the bytes of this role that lie on the device already."""
        module, device = self.engine.module, self.engine.device
        mine = [*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
        parts = [here(tensor) for tensor in mine]
        there = sum(part.numel() * part.itemsize for part in parts if part.device.type == device.type)
        return there + optimizer_bytes(self.engine.optimizer, device)

    def _report(self, estimate: Estimate | None) -> None:
        """Log the choices and the estimate behind them."""
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
        """Return the bytes of the engine's module on this rank."""
        engine = self.engine
        ranks, role = engine.context.world_size, engine.context.role
        held = self.held_by(engine.module, engine.trainable, engine.options, engine.precision, ranks, role)
        assert held is not None
        return held

    @classmethod
    def held_by(
        cls, module: nn.Module, trained: bool, options: Any, types: Precision, ranks: int, role: str
    ) -> Held | None:
        """Return the bytes of a model on one rank; None where this backend has no estimate.

        Args:
            module: the model, whose parameters may be on ``meta``.
            trained: it has an optimizer.
            options: the role's table.
            types: of the role.
            ranks: number of ranks of the role.
            role: name of the role.
        """
        return Held.of(module, trained)

    @property
    def token_sharers(self) -> int:
        """Number of ranks that share the tokens of a micro-batch."""
        return 1

    def agreed(self, number: int) -> int:
        """Return the smallest ``number`` over the ranks of the role."""
        return number

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be allocated; None where the device does not report them."""
        return memory.free_bytes(self.engine.device)
