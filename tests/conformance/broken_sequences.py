"""Train engines, each with one mistake that shows only after certain calls in a certain order."""

import copy
import dataclasses
import json
import weakref
from unittest import mock

import torch

from engine_core import packing
from engine_core.algorithms import objectives
from engine_core.contracts.weight_sync import ADAPTER_PREFIX
from engine_plugin_torch.engine import TorchEngine


class DecaysSkipped(TorchEngine):
    def optimizer_step(self):
        step = super().optimizer_step()
        for group in self.optimizer.param_groups if step.skipped else ():
            for weight in group["params"]:
                weight.data *= 1 - group["lr"] * group["weight_decay"]
        return step


class KeepsScaleOfSkipped(TorchEngine):
    late = 1.0

    def scale_gradients(self, factor):
        self.late *= factor

    def optimizer_step(self):
        super().scale_gradients(self.late)
        step = super().optimizer_step()
        self.late = self.late if step.skipped else 1.0
        return step


class StaleCopy(TorchEngine):
    """Infers with copies of the weights, as an engine does that computes in another type."""

    copies = None

    def infer(self, batch, outputs, adapter=True):
        weights = list(self.module.parameters())
        if self.copies is None:
            self.copies = [weight.detach().clone() for weight in weights]
        own = [weight.data for weight in weights]
        for weight, held in zip(weights, self.copies, strict=True):
            weight.data = held
        try:
            return super().infer(batch, outputs, adapter)
        finally:
            for weight, held in zip(weights, own, strict=True):
                weight.data = held

    def optimizer_step(self):
        self.copies = None
        return super().optimizer_step()


class TemperatureOfInfer(TorchEngine):
    asked = None

    def infer(self, batch, outputs, adapter=True):
        self.asked = batch.temperature
        return super().infer(batch, outputs, adapter)

    def forward_backward(self, batch, loss):
        return super().forward_backward(
            dataclasses.replace(batch, temperature=self.asked or batch.temperature), loss
        )


class SharesWithFrozen(TorchEngine):
    trained = weakref.WeakValueDictionary()

    def _finish(self, module):
        super()._finish(module)
        path = self.model_config.path
        if self.trainable:
            self.trained[path] = self.module
        elif path in self.trained:
            for weight, other in zip(self.module.parameters(), self.trained[path].parameters(), strict=True):
                weight.data = other.data


class StaleHostCopy(TorchEngine):
    """Copies weights to the host only in the first sleep after a step."""

    host = None

    def optimizer_step(self):
        self.host = None
        return super().optimizer_step()

    def sleep(self, keep=()):
        super().sleep(keep)
        if "weights" in self.store.asleep and self.host is None:
            self.host = [weight.detach().clone() for weight in self.module.parameters()]

    def wake(self, only=None):
        slept = "weights" in self.store.asleep
        super().wake(only)
        if slept and "weights" not in self.store.asleep:
            for weight, held in zip(self.module.parameters(), self.host, strict=True):
                weight.data = held.clone()


class SavesHostMoments(TorchEngine):
    host = None

    def sleep(self, keep=()):
        super().sleep(keep)
        if self.optimizer is not None and "optimizer" in self.store.asleep:
            self.host = copy.deepcopy(self.optimizer.state_dict()["state"])

    def save(self, folder):
        if not self.host:
            return super().save(folder)
        now = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.load_state_dict({**now, "state": self.host})
        try:
            return super().save(folder)
        finally:
            self.optimizer.load_state_dict(now)


class LoadsBudget(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        (folder / "budget.json").write_text(json.dumps(self.config.max_tokens_per_rank))
        return done

    def load(self, folder):
        super().load(folder)
        self.set_token_budget(json.loads((folder / "budget.json").read_text()))


class PeakClearsMoments(TorchEngine):
    def set_lr(self, lr):
        if lr != self.config.optim.lr:
            self.optimizer.state.clear()
        super().set_lr(lr)


class PlacesOfLengths(TorchEngine):
    """Learns at the places of the first loss mask of each list of lengths."""

    def _outputs(self, micro, grad, watched=()):
        self.places = getattr(self, "places", {})
        if bool(micro["loss_mask"].any()):
            mask = self.places.setdefault(tuple(micro.lengths.tolist()), micro["loss_mask"])
            micro = micro.with_columns({"loss_mask": mask})
        return super()._outputs(micro, grad, watched)


class HotValues(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        return {n: value / micro.temperature if n == "values" else value for n, value in found.items()}


class TurnsKL(TorchEngine):
    def forward_backward(self, batch, loss):
        def turned(log_probs, ref_log_probs, estimator, exact=objectives.kl_estimate):
            pair = (ref_log_probs, log_probs) if estimator == "k3" else (log_probs, ref_log_probs)
            return exact(*pair, estimator)

        with mock.patch.object(objectives, "kl_estimate", turned):
            return super().forward_backward(batch, loss)


class KeepsMerged(TorchEngine):
    merged = None

    def named_weights(self, to="all", adapter=False):
        if adapter or self.adapter is None:
            return super().named_weights(to, adapter)
        if self.merged is None:
            self.merged = {name: value.clone() for name, value in super().named_weights(to)}
        return iter(self.merged.items())

    def optimizer_step(self):
        self.merged = None
        return super().optimizer_step()

    def load(self, folder):
        self.merged = None
        super().load(folder)

    def load_named_weights(self, stream, mix=1.0):
        given = dict(stream)
        if not all(name.startswith(ADAPTER_PREFIX) for name in given):
            self.merged = None
        super().load_named_weights(given.items(), mix)


class Planned(TorchEngine):
    """``sizes(batch)`` replaces the lengths by which micro-batches are planned, ``together(batch)`` what stays together."""

    def sizes(self, batch):
        return batch.lengths.tolist()

    def together(self, batch):
        return None if batch.keep_together is None else batch.keep_together.tolist()

    def _micro_batches(self, batch):
        for indices in packing.plan_micro_batches(
            self.sizes(batch), self.budget.tokens, self.together(batch)
        ):
            yield indices, batch.select(indices)


class BudgetOfLongest(Planned):
    def sizes(self, batch):
        if batch.keep_together is None:
            return super().sizes(batch)
        longest, sizes = {}, []
        for group, size in zip(batch.keep_together.tolist(), batch.lengths.tolist(), strict=True):
            sizes.append(max(0, size - longest.get(group, 0)))  # a group's sum is its longest sequence
            longest[group] = max(size, longest.get(group, 0))
        return sizes


class BudgetOfLearned(Planned):
    def sizes(self, batch):
        learned = batch.sum_by_sequence(batch["loss_mask"].long()) > 0
        return (batch.lengths * learned).tolist()


class ForgetsGroups(Planned):
    """Splits groups once the token budget has been changed."""

    changed = False

    def set_token_budget(self, tokens):
        self.changed = True
        super().set_token_budget(tokens)

    def together(self, batch):
        return None if self.changed else super().together(batch)


class Aggregated(TorchEngine):
    """``count(batch)`` replaces the number of sequences by which an aggregation divides."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        exact = objectives.with_weights

        def wrong(batch, mode, length_norm=1, unit=0.0):
            made = exact(batch, mode, length_norm, unit)
            if unit or not mode.startswith("seq-mean"):
                return made
            right = (batch.sum_by_sequence(batch["loss_mask"].long()) > 0).sum().clamp(min=1)
            return made.with_columns({"weights": made["weights"] * right / self.count(batch)})

        self.patch = mock.patch.object(objectives, "with_weights", wrong)
        self.patch.start()

    def close(self):
        self.patch.stop()
        super().close()


class CountsDropped(Aggregated):
    def count(self, batch):
        return len(batch)


class CountsGroups(Aggregated):
    def count(self, batch):
        ids = torch.arange(len(batch)) if batch.keep_together is None else batch.keep_together
        learned = batch.sum_by_sequence(batch["loss_mask"].long()) > 0
        return max(1, len(ids[learned].unique()))
