"""Train engines, each with one mistake of an option: of the policy's objective, a token budget, a rate, an adapter, or a state."""

import contextlib
import dataclasses
from concurrent.futures import Future
from unittest import mock

import torch
from broken_steps import Called, Scheduled

from engine_core.algorithms import correction, objectives
from engine_core.algorithms.objectives import make_policy
from engine_core.runs import state_files
from engine_plugin_torch import packed_forward
from engine_plugin_torch.attention import Prefixes
from engine_plugin_torch.engine import TorchEngine

# -- options of the policy's objective ----------------------------------------------


class IgnoresBypass(Called):
    def changed(self, parameters):
        return {**parameters, "bypass": False} if "bypass" in parameters else parameters


class Corrects(Called):
    """``corrected(table)`` changes the correction of the objective."""

    def changed(self, parameters):
        table = parameters.get("correction")
        return {**parameters, "correction": self.corrected(dict(table))} if table else parameters


class RejectsLate(Corrects):
    def corrected(self, table):
        return {**table, "reject_ratio": 2.5}


class ForgetsMask(Corrects):
    def corrected(self, table):
        return {**table, "mask": "off"} if table.get("reject", "off") != "off" else table


class LearnsAll(TorchEngine):
    def forward_backward(self, batch, loss):
        tokens = {name: value for name, value in batch.tokens.items() if name != "learned"}
        return super().forward_backward(dataclasses.replace(batch, tokens=tokens), loss)


class MeansOfSequences(TorchEngine):
    def forward_backward(self, batch, loss):
        def untruncated(micro, log_ratio, table, exact=correction.untruncated):
            if table.level == "sequence":
                counts = micro.sum_by_sequence(micro["loss_mask"].float()).clamp(min=1)
                log_ratio = log_ratio / micro.to_tokens(counts)
            return exact(micro, log_ratio, table)

        with mock.patch.object(correction, "untruncated", untruncated):
            return super().forward_backward(batch, loss)


class MaximaOfAll(TorchEngine):
    def forward_backward(self, batch, loss):
        def over_all(values, share, exact=objectives.over_tokens):
            largest = {
                name: value.detach().max() for name, value in values.items() if name.startswith("max/")
            }
            return {**exact(values, share), **largest}

        with mock.patch.object(objectives, "over_tokens", over_all):
            return super().forward_backward(batch, loss)


class WatchedOnly(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        return {name: value.detach() if name in watched else value for name, value in found.items()}


class TrainsInfinite(TorchEngine):
    def _resolve(self, loss):
        if loss.name != "policy":
            return super()._resolve(loss)
        return make_policy(self.context.plugins, **loss.parameters)


class WideValueClip(TorchEngine):
    def _resolve(self, loss):
        parameters = dict(loss.parameters)
        if parameters.get("value_clip"):
            parameters["value_clip"] *= 2.5
        return super()._resolve(dataclasses.replace(loss, parameters=parameters))


# -- prefixes, budgets and rates ---------------------------------------------------


class SharesEqualTokens(TorchEngine):
    """Computes equal tokens at one place of two neighbors once, also behind other beginnings."""

    def infer(self, batch, outputs, adapter=True):
        with mock.patch.object(packed_forward, "find_prefixes", equal_tokens):
            return super().infer(batch, outputs, adapter)


def equal_tokens(token_ids, lengths):
    first, sizes = torch.arange(len(token_ids)), lengths.tolist()
    parts, places = token_ids.split(sizes), first.split(sizes)
    for number in range(1, len(parts)):
        most = min(sizes[number - 1 : number + 1])
        same = parts[number][:most] == parts[number - 1][:most]
        places[number][:most] = torch.where(same, places[number - 1][:most], places[number][:most])
    kept, row = first.unique(return_inverse=True)
    return Prefixes(kept, row) if len(kept) < len(first) else None


class AutoIsShort(TorchEngine):
    def set_token_budget(self, tokens):
        super().set_token_budget(16 if tokens == "auto" else tokens)


class DecaysInTwo(Scheduled):
    def rate(self, step, whole):
        late = step - self.optim.warmup_steps
        if self.end - self.optim.warmup_steps != 1 or late != 1:
            return whole(step)
        return (1 + whole(step)) / 2


class StaysAtZero(TorchEngine):
    def set_lr(self, lr):
        if self.lr:
            super().set_lr(lr)


# -- tensors of a stream ------------------------------------------------------------


class ReadsInOrder(TorchEngine):
    """Reads a tensor in the order of its memory."""

    def load_named_weights(self, stream, mix=1.0):
        super().load_named_weights(
            ((name, torch.as_strided(v, v.shape, torch.empty(v.shape).stride())) for name, v in stream), mix
        )


class TakesHalfAsInt(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        super().load_named_weights(
            ((name, v.view(torch.int16) if v.dtype == torch.bfloat16 else v) for name, v in stream), mix
        )


class MostIsWhole(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        whole = self.adapter is not None and mix > 0.5
        super().load_named_weights(stream, 1.0 if whole else mix)


class TrainsOnceLent(TorchEngine):
    @contextlib.contextmanager
    def generation_module(self):
        with super().generation_module() as module:
            yield module
        module.train()


# -- a sleep, a save, random weights -------------------------------------------------


class Sleepless(TorchEngine):
    """A call of an engine asleep is accepted."""

    def awake(self, call, *arguments):
        kept, self.store.asleep = self.store.asleep, set()
        try:
            return call(*arguments)
        finally:
            self.store.asleep = kept


class TrainsAsleep(Sleepless):
    def forward_backward(self, batch, loss):
        return self.awake(super().forward_backward, batch, loss)


class LendsAsleep(Sleepless):
    def generation_module(self):
        kept, self.store.asleep = self.store.asleep, set()
        made = super().generation_module()
        enter = made.__enter__

        def entered():
            try:
                return enter()
            finally:
                self.store.asleep = kept

        made = mock.MagicMock(wraps=made)
        made.__enter__.side_effect = lambda: entered()
        return made


class IgnoresFullDisk(TorchEngine):
    def save(self, folder):
        try:
            return super().save(folder)
        except OSError:
            done = Future()
            done.set_result(None)
            return done


class LeavesFilesOut(TorchEngine):
    def save(self, folder):
        def save_tensors(file, tensors, exact=state_files.save_tensors):
            with contextlib.suppress(OSError):
                exact(file, tensors)

        with mock.patch.object(state_files, "save_tensors", save_tensors):
            return super().save(folder)


class NeverDone(TorchEngine):
    def save(self, folder):
        try:
            return super().save(folder)
        except OSError:
            return Future()


class OneSeed(TorchEngine):
    def _build_model_optimizer(self, **arguments):
        self.model_config = self.model_config.model_copy(update={"seed": 0})
        return super()._build_model_optimizer(**arguments)


class SeedsTorch(TorchEngine):
    def _build_model_optimizer(self, **arguments):
        torch.manual_seed(self.model_config.seed)
        return super()._build_model_optimizer(**arguments)


# -- adapters ------------------------------------------------------------------------


class OtherTable(TorchEngine):
    """``table(lora)`` returns changes to ``[actor.lora]``."""

    def _distribute(self, module):
        if self.config.lora is not None:
            lora = self.config.lora.model_copy(update=self.table(self.config.lora))
            self.config = self.config.model_copy(update={"lora": lora})
        return super()._distribute(module)


class AlwaysKaiming(OtherTable):
    def table(self, lora):
        return {"init": "kaiming"}


class SearchesLayers(OtherTable):
    def table(self, lora):
        asked = lora.target_modules
        return {"target_modules": f".*{asked}.*"} if asked != "all-linear" and isinstance(asked, str) else {}


class NoAdaptedBiases(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        for name, value in super().named_weights(to, adapter):
            lost = self.adapter is not None and not adapter and name.endswith("_proj.bias")
            yield name, 0 * value if lost else value


class StillHeadOfAdapter(TorchEngine):
    def optimizer_step(self):
        for name, parameter in self.module.named_parameters():
            if self.adapter is not None and "score" in name:
                parameter.grad = None
        return super().optimizer_step()
