"""Train engines, each with one mistake that shows in a run of several steps, another model, size, share or role."""

import contextlib
import dataclasses
import math
import pickle
import shutil
import zipfile
from concurrent.futures import Future
from unittest import mock

import torch
import torch.distributed as dist
from data_parallel_engine import DataParallelEngine

from engine_core.types import LossCall
from engine_plugin_torch import attention
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.weights import places, published_weights


class LearnsWatched(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        return super()._outputs(micro, (*grad, *watched))


class Outputs(TorchEngine):
    """The base of engines whose ``changed(name, value, micro)`` replaces an output."""

    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        return {name: self.changed(name, value, micro) for name, value in found.items()}


class EntropyDetached(Outputs):
    def changed(self, name, value, micro):
        return value.detach() if name == "entropy" else value


class RestTooSteep(Outputs):
    def changed(self, name, value, micro):
        still = value.detach()
        return still + micro.temperature * (value - still) if name == "log_rest" else value


class WholeGradient(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        if "support_ids" in micro:
            kept = {name: value for name, value in micro.tokens.items() if name != "support_ids"}
            whole = super()._outputs(dataclasses.replace(micro, tokens=kept), grad, watched)["log_probs"]
            found["log_probs"] = found["log_probs"].detach() + whole - whole.detach()
        return found


class Windowed(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        parts = [piece for n in micro.lengths.tolist() for piece in (min(n, 80), n - min(n, 80)) if piece]
        return super()._outputs(dataclasses.replace(micro, lengths=torch.tensor(parts)), grad, watched)


class DropsChunkEnds(Outputs):
    def changed(self, name, value, micro):
        kept = torch.arange(len(value)) % 128 != 127
        return value * kept


class CutsSequences(Outputs):
    def changed(self, name, value, micro):
        places = torch.arange(len(value)) - torch.repeat_interleave(micro.offsets[:-1], micro.lengths)
        return value * (places < 100)


class BetasExchanged(TorchEngine):
    def _finish(self, module):
        super()._finish(module)
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["betas"] = group["betas"][::-1]


class Uncorrected(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        for state in self.optimizer.state.values():
            state["step"] += 1000
        return step


class CoupledDecay(TorchEngine):
    def optimizer_step(self):
        for group in self.optimizer.param_groups:
            self.decay, group["weight_decay"] = max(getattr(self, "decay", 0.0), group["weight_decay"]), 0.0
        return super().optimizer_step()

    def _clip(self, max_norm, norm):
        super()._clip(max_norm, norm)
        for parameter in self._trainable_parameters():
            if parameter.grad is not None and parameter.ndim >= 2:
                parameter.grad += self.decay * parameter.detach()


class DecayAtPeak(TorchEngine):
    def optimizer_step(self):
        for group in self.optimizer.param_groups:
            if group["weight_decay"]:
                group["weight_decay"] = self.config.optim.weight_decay * self.config.optim.lr / group["lr"]
        return super().optimizer_step()


class RisesAgain(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        over = self.lr_scheduler.last_epoch - (self.config.optim.decay_steps or self.context.total_steps)
        for group in self.optimizer.param_groups if over > 0 else ():
            group["lr"] *= 1.1
        return step


class ScheduleOfCalls(TorchEngine):
    def forward_backward(self, batch, loss):
        if self._grads():
            self.lr_scheduler.step()
        return super().forward_backward(batch, loss)


class ClipsEach(TorchEngine):
    def _clip(self, max_norm, norm):
        for grad in self._grads():
            grad *= min(1.0, max_norm / float(grad.norm()))


class ClipsValues(TorchEngine):
    def _clip(self, max_norm, norm):
        for grad in self._grads():
            grad.clamp_(-max_norm / 10, max_norm / 10)


class ClipsLate(TorchEngine):
    def _clip(self, max_norm, norm):
        if norm > 1.01 * max_norm:
            super()._clip(max_norm, norm)


class HalfNorm(TorchEngine):
    def _grad_norm(self):
        exact = super()._grad_norm()
        squares = torch.stack([(grad.half() ** 2).sum() for grad in self._grads()])
        return exact if bool(squares.isfinite().all()) else squares.sum().sqrt()


class NoBiasGradient(TorchEngine):
    def optimizer_step(self):
        for name, parameter in self.module.named_parameters():
            if name.endswith("bias") and parameter.grad is not None:
                parameter.grad.zero_()
        return super().optimizer_step()


class PlainNorms(TorchEngine):
    def _place(self, module):
        for name, parameter in module.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.fill_(1.0)
        return super()._place(module)


class NoBiases(TorchEngine):
    def _place(self, module):
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()
        return super()._place(module)


class DropsOut(TorchEngine):
    def forward_backward(self, batch, loss):
        self.module.train()
        found = super().forward_backward(batch, loss)
        self.module.eval()
        return found


class BlamesTheScale(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        return dataclasses.replace(step, rescaled=step.skipped)


class TellsNoOverflow(TorchEngine):
    lost = False

    def forward_backward(self, batch, loss):
        output = super().forward_backward(batch, loss)
        self.lost |= not math.isfinite(output.loss)
        return output

    def optimizer_step(self):
        step = super().optimizer_step()
        return dataclasses.replace(step, rescaled=step.skipped and not self.lost)


class LongWindows(TorchEngine):
    def forward_backward(self, batch, loss):
        def longer(length, device, window=None, causal=attention._causal):
            return causal(length, device, window and window + 1)

        with mock.patch.object(attention, "_causal", longer):
            return super().forward_backward(batch, loss)


class Metrics(TorchEngine):
    """The base of engines whose ``reduced(name, values)`` replaces a metric, from its values in micro-batches."""

    def _resolve(self, loss):
        objective, self.seen = super()._resolve(loss), []

        def noted(outputs, micro):
            value, metrics = objective(outputs, micro)
            self.seen.append({name: float(figure) for name, figure in metrics.items()})
            return value, metrics

        return noted

    def forward_backward(self, batch, loss):
        output = super().forward_backward(batch, loss)
        for name in output.metrics:
            values = [each[name] for each in self.seen if name in each]
            output.metrics[name] = self.reduced(name, values, output.metrics[name])
        return output


class LastMetrics(Metrics):
    def reduced(self, name, values, right):
        return values[-1]


class MeanMetrics(Metrics):
    def reduced(self, name, values, right):
        return right if name.startswith("max/") else sum(values) / len(values)


class SummedMaxima(Metrics):
    def reduced(self, name, values, right):
        return sum(values) if name.startswith("max/") else right


class MaximaFromZero(Metrics):
    def reduced(self, name, values, right):
        return max(right, 0.0) if name.startswith("max/") else right


class OwnMaxima(DataParallelEngine):
    @staticmethod
    def _reduced(value, kind):
        whole = DataParallelEngine._reduced(value, kind)
        return value if kind is dist.ReduceOp.MAX else whole


class IdleRankForgets(DataParallelEngine):
    def forward_backward(self, batch, loss):
        if not len(batch):
            self.module.zero_grad()
        return super().forward_backward(batch, loss)


class SharesAlike(DataParallelEngine):
    def forward_backward(self, batch, loss):
        count = torch.tensor(float(len(batch)))
        dist.all_reduce(count)
        factor = float(count) / dist.get_world_size() / max(1, len(batch))
        return super().forward_backward(
            batch.with_columns({n: factor * v for n, v in batch.tokens.items() if n.startswith("probe/log")}),
            loss,
        )


class SplitsGroups(TorchEngine):
    def planned(self, together):
        return None

    def _micro_batches(self, batch):
        together = batch.keep_together
        if together is not None:
            batch = dataclasses.replace(batch, keep_together=self.planned(together))
        for indices, micro in super()._micro_batches(batch):
            kept = None if together is None else together[indices]
            yield indices, dataclasses.replace(micro, keep_together=kept)


class JoinsNeighbors(SplitsGroups):
    def planned(self, together):
        return torch.cat([torch.zeros(1), (together[1:] != together[:-1]).cumsum(0)]).long()


class OneBuffer(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        buffer = torch.empty(max(p.numel() for p in self.module.parameters()))
        for name, value in published_weights(self.module):
            yield name, buffer[: value.numel()].view(value.shape).copy_(value)


class ScalesInPlace(TorchEngine):
    def forward_backward(self, batch, loss):
        found = super().forward_backward(batch, loss)
        batch["weights"].div_(2)
        return found


class TakesColumns(TorchEngine):
    def infer(self, batch, outputs, adapter=True):
        batch.tokens.pop("advantages", None)
        return super().infer(batch, outputs, adapter)


class DrawsInStep(TorchEngine):
    def optimizer_step(self):
        torch.rand(1)
        return super().optimizer_step()


class KeepsMoments(TorchEngine):
    kept = "exp_avg"

    def load(self, folder):
        before = {key: dict(state) for key, state in self.optimizer.state.items()}
        super().load(folder)
        for key, state in before.items():
            self.optimizer.state[key][self.kept] = state[self.kept]


class KeepsStepCount(KeepsMoments):
    kept = "step"


class SavesOnce(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        self.first = getattr(self, "first", folder)
        for file in self.first.iterdir() if self.first != folder else ():
            shutil.copy(file, folder)
        return done


class SavesLate(TorchEngine):
    def save(self, folder):
        engine = super()

        class Late(Future):
            def result(self, timeout=None):
                return engine.save(folder).result()

        return Late()


class ExportsOnce(TorchEngine):
    def export(self, folder, adapter=False):
        super().export(folder, adapter)
        self.first = getattr(self, "first", folder)
        for file in self.first.iterdir() if self.first != folder else ():
            shutil.copy(file, folder)


class OldPickle(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        (folder / "extra.txt").write_bytes(pickle.dumps({"a": [1, 2]}, 0))
        return done


class NewPickle(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        (folder / "extra.bin").write_bytes(pickle.dumps({"a": [1, 2]}, 5))
        return done


class PickleInZip(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        with zipfile.ZipFile(folder / "extra.bin", "w") as members:
            members.writestr("notes.txt", "harmless")
            members.writestr("values.dat", pickle.dumps({"a": [1, 2]}, 1))
        return done


class OldMasters(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        self.masters = {name: value.clone() for name, value in self.module.state_dict().items()}
        super().load_named_weights(stream, mix)

    def _clip(self, max_norm, norm):
        super()._clip(max_norm, norm)

    def _grad_norm(self):
        norm = super()._grad_norm()
        if hasattr(self, "masters"):
            self.module.load_state_dict(self.masters)
        return norm


class KeepsReferences(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        held = dict(stream)
        super().load_named_weights(held.items(), mix)
        for name, place in places(self.module).items():
            if name in held and isinstance(place, torch.nn.Parameter):
                place.data = held[name]
        for name, parameter in self.module.named_parameters():
            if name in held:
                parameter.data = held[name]


class StepsAsleep(TorchEngine):
    def optimizer_step(self):
        self.wake()
        return super().optimizer_step()


class StillHead(TorchEngine):
    def optimizer_step(self):
        for name, parameter in self.module.named_parameters():
            if name.endswith("score.weight"):
                parameter.grad = None
        return super().optimizer_step()


class WholeValueLoss(TorchEngine):
    def _resolve(self, loss):
        objective = super()._resolve(loss)

        def doubled(outputs, micro):
            value, metrics = objective(outputs, micro)
            return 2 * value, metrics

        return doubled


class NoValueClip(TorchEngine):
    def _resolve(self, loss):
        if loss.name == "value":
            loss = LossCall(loss.name, {"value_clip": None}, loss.outputs, loss.watched)
        return super()._resolve(loss)


class ScoresBefore(Outputs):
    def changed(self, name, value, micro):
        return value.roll(1) if name == "scores" else value


class LastScores(Outputs):
    def changed(self, name, value, micro):
        last = torch.zeros(len(value))
        last[micro.offsets[1:] - 1] = 1.0
        return value * last if name == "scores" else value


class TrainsBase(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        for name, parameter in self.module.named_parameters():
            if "lora_" not in name:
                parameter.data.mul_(0.99)
        return step


class ScaledByRank(TorchEngine):
    def _finish(self, module):
        super()._finish(module)
        for layer in self.module.modules():
            if getattr(layer, "scaling", None) and isinstance(layer.scaling, dict):
                layer.scaling["default"] = 1 / math.sqrt(self.config.lora.rank)


class AlwaysAdapted(TorchEngine):
    def without_adapter(self):
        return contextlib.nullcontext()


class MergedTwice(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        if adapter or self.adapter is None:
            return super().named_weights(to, adapter)
        with self.adapter.off():
            base = {n.replace(".base_layer", ""): v for n, v in self.module.state_dict().items()}
        return iter([(n, 2 * v - base[n]) for n, v in super().named_weights(to)])


class HalfAdapter(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        return ((n, v) for n, v in super().named_weights(to, adapter) if not (adapter and "lora_A" in n))


class FasterHalf(TorchEngine):
    def optimizer_step(self):
        for name, parameter in self.module.named_parameters():
            if "lora_A" in name:
                parameter.grad.mul_(2)
        return super().optimizer_step()
