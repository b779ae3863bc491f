"""The base of train engines that spread a model over data-parallel ranks.

Each rank has its own micro-batches. Every rank takes part in every collective, so a rank with fewer micro-batches than
another runs fillers that add nothing. Loss and metrics are those of all ranks.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.metrics import is_largest
from engine_core.packing import plan_micro_batches
from engine_core.types import Batch, TrainOutput
from engine_plugin_torch.budget import MemoryBudget
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.log_probs import zero_outputs
from engine_plugin_torch.sharded_checkpoint import ShardedStore
from engine_plugin_torch.transfer import on_host, predicted, send_batch
from engine_plugin_torch.value_models import VALUE_ROLES

if TYPE_CHECKING:
    from engine_core.contracts.engines import Layout
    from engine_plugin_torch.checkpoint import StateStore
    from engine_plugin_torch.rank_group import RankGroup
    from engine_plugin_torch.skeleton import Skeleton

log = logging.getLogger("engine")


class SharedBudget(MemoryBudget):
    """The memory budget of an engine of several ranks: the smallest over the ranks.

    Attributes:
        retries: whether a failed pass leaves nothing behind, so that a single rank can try again with less.
    """

    engine: DataParallelEngine  #: the engine of this part
    retries = True

    def agreed(self, number: int) -> int:
        """Return the smallest ``number`` over the ranks. Collective."""
        return -self.engine.ranks.most(-number)

    def halve(self, batch: Batch, error: Exception) -> bool:
        """Halve the budget of a single rank; refuse with several ranks.

        The ranks that have memory wait in a gather for the rank that has none. That rank cannot notify them, because
        anything it sent would be taken for its part of the gather.
        """
        if self.engine.ranks.size == 1 and self.retries:
            return super().halve(batch, error)
        log.error(
            "Out of memory on rank %d, with at most %d tokens in a micro-batch: set %s.max_tokens_per_rank lower.",
            self.engine.ranks.rank,
            self.tokens,
            self.engine.context.role,
        )
        return False


class Root(nn.Module):
    """A wrapper of the model that runs a function as its forward pass, in which a backend makes weights available."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Return ``compute()``, called inside the forward pass."""
        return compute()


class DataParallelEngine(TorchEngine):
    """A train engine of several ranks. Weights are streamed whole, one at a time; a backend defines the gather.

    Attributes:
        skeleton: a copy of the model without weights; None where the engine has none.
        ranks: the ranks of this role.
        root: runs the function that it is called with inside its forward pass, where the weights are available.
    """

    budget_class: type[MemoryBudget] = SharedBudget  #: of ``budget``
    store_class: type[StateStore] = ShardedStore  #: of ``store``
    skeleton: Skeleton | None = None
    ranks: RankGroup
    root: Callable[..., Any] | None

    @property
    def layout(self) -> Layout:
        """This rank's place among the ranks of its role."""
        return self.ranks.layout

    @property
    def _tells(self) -> bool:
        """Whether loss and metrics of this rank count: it is the leader of its slice."""
        return self.layout.is_leader

    def _choose_device(self) -> torch.device:
        """Return the device with its index, and make it the current device, which communication uses."""
        device = super()._choose_device()
        if device.type == "cpu":
            return device
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)
        return torch.device(device.type, torch.accelerator.current_device_index())

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Yield as many micro-batches as the rank that needs most; the last ones may be fillers of two tokens."""
        together = None if batch.keep_together is None else batch.keep_together.tolist()
        lengths, budget = batch.lengths.tolist(), self.budget.tokens
        plan = plan_micro_batches(lengths, budget, together)
        plan = plan_micro_batches(lengths, budget, together, count=self.ranks.most(len(plan)))
        for number, indices in enumerate(plan):
            self._begin_micro_batch(last=number == len(plan) - 1)
            micro = batch.select(indices) if indices else filler(batch)
            yield indices, send_batch(micro, self.device)

    def _begin_micro_batch(self, last: bool) -> None:
        """Prepare for the next micro-batch; ``last``: it is the last one of this batch."""

    def _outputs(self, micro: Batch, grad: Sequence[str], watched: Sequence[str] = ()) -> dict[str, Tensor]:
        """Run the model on every rank, also without loss tokens: every weight is gathered and gets a gradient."""
        if self._learns(micro):
            return self._run(micro, grad, watched)
        found = self._run(filler(micro, learned=True), (self.forward.outputs[0],))
        nothing = 0.0 * torch.stack([value.sum() for value in found.values()]).sum()
        zeros = zero_outputs((*grad, *watched), micro, self.device)
        return {n: v + nothing if v.is_floating_point() else v for n, v in zeros.items()}

    def _run(self, micro: Batch, grad: Sequence[str], watched: Sequence[str] = ()) -> dict[str, Tensor]:
        """Run the forward pass inside the root's. A model that cannot pack runs equally many sequences on all ranks."""
        assert self.root is not None
        if self.forward.packs:
            found: dict[str, Tensor] = self.root(functools.partial(self.forward, micro, grad, watched))
            return found
        count = int((micro.lengths > 0).sum())
        padded = _with_single_tokens(micro, self.ranks.most(count) - count)
        found = self.root(functools.partial(self.forward, padded, grad, watched))
        return {name: value[: micro.num_tokens] for name, value in found.items()}

    def _learns(self, micro: Batch) -> bool:
        """Return whether a forward pass uses the head: for a loss token, which in a policy has a token before it."""
        if self.context.role in VALUE_ROLES:
            return bool(on_host(micro["loss_mask"]).any())
        return len(predicted(micro)) > 0

    def _over_ranks(self, output: TrainOutput) -> TrainOutput:
        """Reduce loss and metrics over the data-parallel ranks: sums or maxima. Ranks may have different metrics."""
        mine = [output.loss, *(output.metrics[n] for n in sorted(output.metrics))] if self._tells else []
        found = self.ranks.texts({"names": sorted(output.metrics)})
        names = sorted({name for one in found for name in one["names"]})
        summed, largest = [n for n in names if not is_largest(n)], [n for n in names if is_largest(n)]
        held = output.metrics if mine else {}
        total = self.ranks.total(
            torch.tensor(
                [output.loss if mine else 0.0, *(held.get(n, 0.0) for n in summed)], dtype=torch.float64
            )
        ).tolist()
        metrics = dict(zip(summed, total[1:], strict=True))
        if largest:
            low = -torch.finfo(torch.float64).max
            most = torch.tensor([held.get(name, low) for name in largest], dtype=torch.float64)
            metrics |= dict(zip(largest, self.ranks.largest(most).tolist(), strict=True))
        return TrainOutput(total[0], metrics, output.num_micro_batches)

    # -- weights ------------------------------------------------------------

    @property
    def _limit(self) -> int:
        """Most bytes of whole weights that are gathered at one time."""
        return int(self.options.weights_bucket_mb) * 2**20

    @property
    def _plain(self) -> nn.Module:
        """The module that gives the names of weights: the skeleton, with whole shapes, where it exists."""
        return self.module if self.skeleton is None else self.skeleton.module

    @abc.abstractmethod
    def _published(self, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by their names in ``save_pretrained``, of the model or of the adapter. Collective."""

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights of the forward pass under the module's own names, on every rank. Collective.

        Raises:
            NotImplementedError: the engine has no skeleton and does not implement this.
        """
        raise NotImplementedError

    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor ``[D0, ...]``); with ``to="leader"`` other ranks take part and get nothing."""
        self.store.need("weights")
        gets = to == "all" or self.ranks.rank == 0
        for name, tensor in self._published(adapter):
            if gets:
                yield name, tensor

    # -- a module to sample from --------------------------------------------

    @property
    def lends_whole(self) -> bool:
        """Whether each rank can sample alone: a skeleton can be filled, or the role has one rank."""
        return self.skeleton is not None or self.ranks.size == 1

    @property
    def _spread(self) -> bool:
        """Whether weights are sharded, so that a rank cannot sample from the module alone."""
        return self.skeleton is not None

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """Yield the whole model on every rank, in the type of the forward pass; free its memory at the end.

        The module gathers nothing while it is used, so ranks may sample different numbers of tokens. Where weights are
        whole on every rank, it is the engine's own module.
        """
        self.store.need("weights")
        if self.skeleton is None or not self._spread:
            with super().generation_module() as module:
                yield module
            return
        kept, computed = self.precision.param, self.precision.compute

        def cast() -> Iterator[tuple[str, Tensor]]:
            """Yield the whole weights ``[D0, ...]`` on the device, in the type of the forward pass."""
            for name, tensor in self._whole_weights():
                changes = kept != computed and tensor.is_floating_point()
                yield name, tensor.to(self.device, computed if changes else tensor.dtype)

        with self.skeleton.filled(cast()) as module, torch.no_grad():
            yield module


def filler(like: Batch, learned: bool = False) -> Batch:
    """Return one sequence of two tokens with the columns of ``like``, all 0.

    Args:
        like: the batch whose columns are copied.
        learned: the second token is a loss token, so that the head is used.
    """
    tokens = {name: column.new_zeros(2, *column.shape[1:]) for name, column in like.tokens.items()}
    tokens["loss_mask"] = torch.tensor([False, learned], device=like.token_ids.device)
    return dataclasses.replace(
        like,
        token_ids=like.token_ids.new_zeros(2),
        lengths=like.lengths.new_full((1,), 2),
        tokens=tokens,
        sequences={name: column.new_zeros(1, *column.shape[1:]) for name, column in like.sequences.items()},
        keep_together=None if like.keep_together is None else like.keep_together.new_zeros(1),
    )


def _with_single_tokens(micro: Batch, count: int) -> Batch:
    """Return the batch with ``count`` more sequences of one token, from which nothing is learned."""
    if not count:
        return micro
    tokens = {
        name: torch.cat([column, column.new_zeros(count, *column.shape[1:])])
        for name, column in micro.tokens.items()
    }
    return dataclasses.replace(
        micro,
        token_ids=torch.cat([micro.token_ids, micro.token_ids.new_zeros(count)]),
        lengths=torch.cat([micro.lengths, micro.lengths.new_ones(count)]),
        tokens=tokens,
        sequences={},
        keep_together=None,
    )
