"""Train engines, each with one mistake that a real backend could make."""

import contextlib
import dataclasses
import math

import torch
import torch.distributed as dist
from data_parallel_engine import DataParallelEngine

from engine_core.errors import DataError
from engine_core.types import Batch
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.weights import published_weights


class Shifted(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        return {name: value.roll(-1) if name == "log_probs" else value for name, value in found.items()}


class ValuesOfThemselves(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        return {name: value.roll(-1) if name == "values" else value for name, value in found.items()}


class NoTemperature(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        micro.temperature = 1.0
        return super()._outputs(micro, grad, watched)


class Leaking(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        one = Batch(micro.token_ids, micro.lengths.sum()[None], micro.tokens, temperature=micro.temperature)
        return super()._outputs(one, grad, watched)


class WrongOrder(TorchEngine):
    def infer(self, batch, outputs, adapter=True):
        parts = [
            super(WrongOrder, self).infer(micro, outputs) for _, micro in list(self._micro_batches(batch))
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in outputs}


class DrawsInInfer(TorchEngine):
    def infer(self, batch, outputs, adapter=True):
        torch.rand(1)
        return super().infer(batch, outputs, adapter)


class RoughInfer(TorchEngine):
    def infer(self, batch, outputs, adapter=True):
        self.forward.compute_dtype = torch.bfloat16
        found = super().infer(batch, outputs, adapter)
        self.forward.compute_dtype = torch.float32
        return found


class LocalMean(TorchEngine):
    def forward_backward(self, batch, loss):
        mask = batch["loss_mask"].float()
        return super().forward_backward(batch.with_columns({"weights": mask / mask.sum().clamp(min=1)}), loss)


class MeanOverRanks(DataParallelEngine):
    def optimizer_step(self):
        for parameter in self._trainable_parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
        return super().optimizer_step()


class OwnLoss(DataParallelEngine):
    @staticmethod
    def _reduced(value, kind):
        DataParallelEngine._reduced(value, kind)
        return value


class HalfSums(DataParallelEngine):
    def optimizer_step(self):
        for parameter in self._trainable_parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.bfloat16().float()
        return super().optimizer_step()


class BoundToItsRanks(DataParallelEngine):
    def load(self, folder):
        if (folder / "random-1.json").exists() and self.context.world_size == 1:
            raise DataError("This checkpoint is of 2 ranks, and here is 1.")
        super().load(folder)


class MicroBatchMean(TorchEngine):
    def _micro_batches(self, batch):
        for indices, micro in super()._micro_batches(batch):
            share = micro["weights"].sum() if "weights" in micro else torch.ones(())
            yield indices, micro.with_columns({"weights": micro["weights"] / share.clamp(min=1e-6)})


class NoClip(TorchEngine):
    def _clip(self, max_norm, norm):
        pass


class AppliesNaN(TorchEngine):
    def _grad_norm(self):
        norm = super()._grad_norm()
        return norm if math.isfinite(norm) else torch.zeros(())


class ForgetsOptimizer(TorchEngine):
    def load(self, folder):
        super().load(folder)
        self.optimizer.state.clear()


class ForgetsSchedule(TorchEngine):
    def load(self, folder):
        fresh = self.lr_scheduler.state_dict()
        super().load(folder)
        self.lr_scheduler.load_state_dict(fresh)
        self.set_lr(self.config.optim.lr)


class ForgetsRandom(TorchEngine):
    def load(self, folder):
        state = torch.get_rng_state()
        super().load(folder)
        torch.set_rng_state(state)


class LoadsAnything(TorchEngine):
    def load(self, folder):
        with contextlib.suppress(DataError):
            super().load(folder)


class DropsWeight(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        return (pair for pair in published_weights(self.module) if "layers.1.mlp.up_proj" not in pair[0])


class TiedTwice(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        yield from published_weights(self.module)
        yield "lm_head.weight", self.module.get_output_embeddings().weight.detach()


class TakesPart(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        with contextlib.suppress(DataError):
            super().load_named_weights(stream, mix)


class NoSupport(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        micro = dataclasses.replace(
            micro, tokens={k: v for k, v in micro.tokens.items() if k != "support_ids"}
        )
        return super()._outputs(micro, grad, watched)


class EntropyInBits(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        return {name: value / math.log(2) if name == "entropy" else value for name, value in found.items()}


class NextCandidates(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        if "candidate_ids" in micro:
            micro = micro.with_columns({"candidate_ids": micro["candidate_ids"].roll(-1, 0)})
        return super()._outputs(micro, grad, watched)


class BottomTokens(TorchEngine):
    def infer(self, batch, outputs, adapter=True):
        found = super().infer(batch, outputs, adapter)
        if {"top_ids", "top_log_probs"} <= set(outputs) and batch.top_k < 10:
            bottom = super().infer(dataclasses.replace(batch, top_k=97), outputs, adapter)
            found |= {name: bottom[name][:, -batch.top_k :] for name in ("top_ids", "top_log_probs")}
        return found


class OutputsEverywhere(TorchEngine):
    def infer(self, batch, outputs, adapter=True):
        return super().infer(batch.with_columns({"loss_mask": torch.ones(batch.num_tokens).bool()}), outputs)


class WrongSign(TorchEngine):
    def forward_backward(self, batch, loss):
        if "advantages" in batch:
            batch = batch.with_columns({"advantages": -batch["advantages"]})
        return super().forward_backward(batch, loss)


class ForgetsGradients(TorchEngine):
    def forward_backward(self, batch, loss):
        self.module.zero_grad()
        return super().forward_backward(batch, loss)


class NormAfterClipping(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        step.grad_norm = min(step.grad_norm, self.config.optim.max_grad_norm or step.grad_norm)
        return step


class LrAfterStep(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        step.lr = self.lr
        return step


class DecaysVectors(TorchEngine):
    def _finish(self, module):
        super()._finish(module)
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["weight_decay"] = self.config.optim.weight_decay


class PeakIsNow(TorchEngine):
    def set_lr(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr


class SleepForgets(TorchEngine):
    def sleep(self, keep=()):
        super().sleep(keep)
        self.optimizer.state.clear()


class LendsInTraining(TorchEngine):
    @contextlib.contextmanager
    def generation_module(self):
        with super().generation_module() as module:
            yield module.train()


class StaleStream(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        if not hasattr(self, "first"):
            self.first = {name: value.clone() for name, value in published_weights(self.module)}
        yield from self.first.items()


class StaleExport(TorchEngine):
    def _finish(self, module):
        super()._finish(module)
        self.start = {name: value.clone() for name, value in module.state_dict().items()}

    def export(self, folder):
        now = {name: value.clone() for name, value in self.module.state_dict().items()}
        self.module.load_state_dict(self.start)
        super().export(folder)
        self.module.load_state_dict(now)


class NoMix(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        super().load_named_weights(stream)


class Pickles(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        torch.save(self.lr_scheduler.state_dict(), folder / "schedule.pt")
        return done


class SavesInSitu(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        self.optimizer.state.clear()
        return done


class DecaysRegardless(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        with torch.no_grad():
            next(self.module.parameters()).mul_(0.99)
        return step
