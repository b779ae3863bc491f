"""Train engines, each with one mistake of sizes, of uneven shares, of metrics over calls, or of a sleep in a step."""

import dataclasses

import torch
import torch.distributed as dist
from data_parallel_engine import DataParallelEngine, _nothing

from engine_plugin_torch.engine import TorchEngine

# -- sizes ---------------------------------------------------------------------------


class SumsInHalf(TorchEngine):
    """Rounds the accumulated gradient after each micro-batch."""

    def _resolve(self, loss):
        objective = super()._resolve(loss)

        def rounding(outputs, micro):
            for grad in self._grads():
                grad.copy_(grad.bfloat16())
            return objective(outputs, micro)

        return rounding


class DropsSequences(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        kept = torch.arange(micro.num_tokens) < micro.offsets[min(100, len(micro))]
        return {name: value * kept.view(-1, *[1] * (value.ndim - 1)) for name, value in found.items()}


class DropsMicroBatches(TorchEngine):
    def _micro_batches(self, batch):
        yield from list(super()._micro_batches(batch))[:16]


# -- uneven shares -------------------------------------------------------------------


class InfersMadeUp(DataParallelEngine):
    def infer(self, batch, outputs, adapter=True):
        return super().infer(batch if len(batch) else _nothing(batch), outputs, adapter)


class PadsShares(DataParallelEngine):
    def infer(self, batch, outputs, adapter=True):
        found = super().infer(batch, outputs, adapter)
        longest = torch.tensor(batch.num_tokens)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        rows = int(longest) - batch.num_tokens
        return {
            name: torch.cat([value, value.new_zeros(rows, *value.shape[1:])]) for name, value in found.items()
        }


class Selected(TorchEngine):
    """Infers the sequences ``chosen(batch)`` alone, in that order, and fills up with zeros."""

    def infer(self, batch, outputs, adapter=True):
        found = super().infer(batch.select(self.chosen(batch)), outputs, adapter)
        rows = batch.num_tokens
        return {
            name: torch.cat([value, value.new_zeros(rows - len(value), *value.shape[1:])])
            for name, value in found.items()
        }


class LeavesOutSilent(Selected):
    def chosen(self, batch):
        masks = batch["loss_mask"].split(batch.lengths.tolist())
        return [number for number, mask in enumerate(masks) if mask.any()]


class InOrderOfGroups(Selected):
    def chosen(self, batch):
        together = batch.keep_together
        return list(range(len(batch))) if together is None else together.argsort(stable=True).tolist()


# -- metrics over calls ----------------------------------------------------------------


class Reported(TorchEngine):
    """``reported(output, before)`` is what a call returns; ``before`` is what the call before returned."""

    before = None

    def forward_backward(self, batch, loss):
        output = super().forward_backward(batch, loss)
        self.before = self.reported(output, self.before or output)
        return self.before


class AddsMetrics(Reported):
    def reported(self, output, before):
        for name in output.metrics if before is not output else ():
            if not name.startswith("max/"):
                output.metrics[name] += before.metrics[name]
        return output


class AddsLosses(Reported):
    def reported(self, output, before):
        return output if before is output else dataclasses.replace(output, loss=output.loss + before.loss)


class FirstMetrics(Reported):
    def reported(self, output, before):
        return dataclasses.replace(output, metrics=before.metrics)


class HalfMetrics(Reported):
    def reported(self, output, before):
        halves = {name: float(torch.tensor(value).half()) for name, value in output.metrics.items()}
        return dataclasses.replace(output, metrics=halves)


# -- a sleep in a step -----------------------------------------------------------------


class DropsKeptGradients(TorchEngine):
    def sleep(self, keep=()):
        super().sleep(keep)
        self.module.zero_grad()


class HalfAfterSleep(TorchEngine):
    def sleep(self, keep=()):
        super().sleep(keep)
        for parameter in self.module.parameters() if "weights" not in keep else ():
            parameter.data = parameter.data.bfloat16().float()
