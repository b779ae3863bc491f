"""The smallest engine of several ranks: each has the whole model, gradients are summed before the step.

Only for tests of the kit: it shows what ``world_size = 2`` asks of an engine.
"""

from concurrent.futures import Future

import torch
import torch.distributed as dist

from engine_core.contracts.engines import Layout
from engine_core.runs import state_files
from engine_core.types import Batch
from engine_plugin_torch import state
from engine_plugin_torch.engine import TorchEngine


class DataParallelEngine(TorchEngine):
    @property
    def layout(self):
        return Layout(dp_rank=self.context.rank, dp_size=self.context.world_size)

    def forward_backward(self, batch, loss):
        return super().forward_backward(batch if len(batch) else _nothing(batch), loss)

    def _over_ranks(self, output):
        output.loss = self._reduced(output.loss, dist.ReduceOp.SUM)
        for name in sorted(output.metrics):
            kind = dist.ReduceOp.MAX if name.startswith("max/") else dist.ReduceOp.SUM
            output.metrics[name] = self._reduced(output.metrics[name], kind)
        return output

    def optimizer_step(self):
        for parameter in self._trainable_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
        return super().optimizer_step()

    def save(self, folder):
        """A rank that cannot write tells the others, which may wait for it."""
        error = None
        try:
            self._write(folder)
        except OSError as problem:
            error = problem
        failed = self._reduced(float(error is not None), dist.ReduceOp.MAX)
        if failed:
            raise error or OSError("another rank could not write; its own error is told by it")
        done = Future()
        done.set_result(None)
        return done

    def _write(self, folder):
        if self.context.rank == 0:
            super().save(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state_files.save_json(self._own(folder), self.store._random_now())

    def load(self, folder):
        super().load(folder)
        state.set_random_state(state_files.load_json(self._own(folder)), self.device)

    def export(self, folder):
        if self.context.rank == 0:
            super().export(folder)
        _barrier()

    def _own(self, folder):
        return folder / f"random-{self.context.rank}.json"

    @staticmethod
    def _reduced(value, kind):
        tensor = torch.tensor(value, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(tensor, kind)
        return tensor.item()


def _barrier():
    if dist.is_initialized():
        dist.barrier()


def _nothing(batch):
    """One token without loss: a rank with no sequences has the metrics that the others have."""
    columns = {name: column.new_zeros(1) for name, column in batch.tokens.items()}
    return Batch(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), tokens=columns,
                 temperature=batch.temperature)  # fmt: skip
