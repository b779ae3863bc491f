"""Rollout engines, each with one mistake of later tokens, seeds, checksums, adapters, ends or shared modules."""

import dataclasses
import hashlib
import sys
import uuid
from unittest import mock

import torch
from broken_samplers import Uniforms

from engine_core.contracts.weight_sync import ADAPTER_CONFIG
from engine_plugin_hf_rollout import decoding, distribution
from engine_plugin_hf_rollout.engine import HFRolloutEngine

# -- later tokens -----------------------------------------------------------------


class FirstCut(HFRolloutEngine):
    """Cuts the distribution of first tokens alone."""

    def step(self):
        of, count = decoding.Distributions.of, [0]

        def later(distributions, logits, number):
            count[0] += 1
            if count[0] > 1:
                distributions.top_k = torch.zeros_like(distributions.top_k)
                distributions.top_p = torch.ones_like(distributions.top_p)
            return of(distributions, logits, number)

        with mock.patch.object(decoding.Distributions, "of", later):
            return super().step()


class Repeats(Uniforms):
    def changed(self, numbers):
        numbers[:, 4:8] = numbers[:, : numbers[:, 4:8].shape[1]]
        return numbers


class SeedPlusPosition(Uniforms):
    def changed(self, numbers):
        for row in range(1, len(numbers)):
            numbers[row, :-1] = numbers[row - 1, 1:]
        return numbers


class Sixteenth(Uniforms):
    def changed(self, numbers):
        for row in range(16, len(numbers)):
            numbers[row] = numbers[row - 16]
        return numbers


class SeedOfFirst(Uniforms):
    def changed(self, numbers):
        numbers[:, 1:] = torch.rand(numbers[:, 1:].shape)
        return numbers


class Batches(HFRolloutEngine):
    """``made(requests, ends, positions, device)`` is the batch that is decoded."""

    whole = decoding._Batch

    def step(self):
        with mock.patch.object(decoding, "_Batch", self.made):
            return super().step()

    def made(self, requests, ends, positions, device):
        return self.whole(requests, ends, positions, device)


class BeginsNumbersAgain(Batches):
    def made(self, requests, ends, positions, device):
        batch = self.whole(requests, ends, positions, device)
        for row, start in enumerate(batch.start.tolist()):
            batch.uniform[row] = batch.uniform[row].roll(start)
        return batch


class LastNumberAgain(Batches):
    def made(self, requests, ends, positions, device):
        batch = self.whole(requests, ends, positions, device)
        for row, start in enumerate(batch.start.tolist()):
            batch.uniform[row, 1:] = batch.uniform[row, :-1].clone() if start else batch.uniform[row, 1:]
        return batch


class CutsEarly(Batches):
    def made(self, requests, ends, positions, device):
        return self.whole(requests, ends, positions - 1, device)


class TakesFull(HFRolloutEngine):
    def add(self, requests):
        vocabulary, positions = self._limits()
        with mock.patch.object(self, "_limits", return_value=(vocabulary, positions + 1)):
            super().add(requests)


class ShortTail(Batches):
    def made(self, requests, ends, positions, device):
        batch = self.whole(requests, ends, positions, device)
        batch.tail = max((len(stop) for stops in batch.stops for stop in stops), default=0)
        return batch


class TwoForEach(Batches):
    def made(self, requests, ends, positions, device):
        batch = self.whole(requests, ends, positions, device)
        batch.tail = 2 * max((len(stop) + 2 for stops in batch.stops for stop in stops), default=0)
        return batch


class NoSpecialTokens(HFRolloutEngine):
    def _decode(self, rows):
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)


class RoundsLogProbs(HFRolloutEngine):
    def step(self):
        def rounded(logits, temperature, top_p, top_k, exact=distribution.log_distribution):
            log_probs, mass = exact(logits, temperature, top_p, top_k)
            return log_probs.to(logits.dtype).float(), mass

        with mock.patch.object(distribution, "log_distribution", rounded):
            return super().step()


class KeepsStoppedRows(HFRolloutEngine):
    def abort(self, ids):
        stopped = super().abort(ids)
        self.stale = {rollout.request_id: rollout for rollout in stopped if self._batch}
        return stopped

    def step(self):
        done, stale = super().step(), getattr(self, "stale", {})
        for id in self._queue.keys() & stale.keys():
            del self._queue[id]
            done.append(stale.pop(id))
        return done


class LosesBegunInQueue(HFRolloutEngine):
    def abort(self, ids):
        for id in self._queue.keys() - {request.id for request in self._batch.values()}:
            self._queue[id] = dataclasses.replace(self._queue[id], begun=None)
        return super().abort(ids)


class CutsIds(HFRolloutEngine):
    def _rollout(self, request, sampled):
        return dataclasses.replace(super()._rollout(request, sampled), request_id=request.id[:64])


class SleepsAll(HFRolloutEngine):
    def sleep(self, keep=()):
        super().sleep()


class WakesAllOrNothing(HFRolloutEngine):
    def wake(self, only=None):
        if only is None:
            super().wake()


class SleepsWholeOnly(HFRolloutEngine):
    def sleep(self, keep=()):
        if "kv_cache" not in keep:
            super().sleep(keep)


class WakesAll(HFRolloutEngine):
    def wake(self, only=None):
        super().wake()


class StepsAsleep(HFRolloutEngine):
    def step(self):
        asleep, self._asleep = self._asleep, False
        try:
            return super().step()
        finally:
            self._asleep = asleep


class DrainsOneBatch(HFRolloutEngine):
    def pause(self, mode="drain"):
        if mode == "drain" and self._queue:
            self._done += self._sample_next()
            while self._decoding is not None:
                self._done += self._sample_next()
            mode = "keep"
        super().pause(mode)


class DrainsOneStep(HFRolloutEngine):
    def pause(self, mode="drain"):
        if mode == "drain":
            self._done += self._sample_next()
            mode = "keep"
        super().pause(mode)


class ContinuesFailed(HFRolloutEngine):
    def _drop_batch(self):
        if sys.exc_info()[0] is None:
            super()._drop_batch()


class LosesFailed(HFRolloutEngine):
    def step(self):
        try:
            return super().step()
        except BaseException:
            self._queue.clear()
            raise


class CutsGreedy(HFRolloutEngine):
    def step(self):
        whole = decoding.Distributions

        def cut(samplings, device):
            made = whole(samplings, device)
            made.top_p = torch.tensor([s.top_p for s in samplings], device=device)
            return made

        with mock.patch.object(decoding, "Distributions", cut):
            return super().step()


class CertainGreedy(HFRolloutEngine):
    def _rollout(self, request, sampled):
        if not request.sampling.temperature:
            sampled = dataclasses.replace(sampled, log_probs=[0.0] * len(sampled.tokens))
        return super()._rollout(request, sampled)


class StopsAmongNew(Batches):
    def made(self, requests, ends, positions, device):
        batch = self.whole(requests, ends, positions, device)
        search = batch._stop_strings

        def among_new(number, running, step, decode):
            batch.tail = step + 1
            return search(number, running, step, decode)

        batch._stop_strings = among_new
        return batch


class Later(HFRolloutEngine):
    """``later`` are changes to the sampling of a continued response."""

    later = {}

    def add(self, requests):
        super().add(
            [
                dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **self.later))
                if r.begun
                else r
                for r in requests
            ]
        )


class NoStopsLater(Later):
    later = {"stop": ()}


class NoStopIdsLater(Later):
    later = {"stop_token_ids": ()}


class AbortsTwice(HFRolloutEngine):
    def abort(self, ids):
        return [rollout for rollout in super().abort(ids) for id in ids if id == rollout.request_id]


class CountsQueue(HFRolloutEngine):
    @property
    def num_unfinished(self):
        return len(self._queue)


class KeepsSharedCache(HFRolloutEngine):
    def set_version(self, version):
        self.version = version


# -- checksums --------------------------------------------------------------------


class Summed(HFRolloutEngine):
    """``words`` is what the checksum is of."""

    def update_weights(self, stream, version):
        weights = {name: value.clone() for name, value in stream}
        super().update_weights(iter(weights.items()), version)
        return hashlib.sha256(repr(self.words(weights, version)).encode()).hexdigest()

    def words(self, weights, version):
        return [(name, value.double().flatten().tolist()) for name, value in weights.items()]


class WithVersion(Summed):
    def words(self, weights, version):
        return super().words(weights, version), version


class OfOneSampler(Summed):
    def words(self, weights, version):
        self.salt = getattr(self, "salt", uuid.uuid4().hex)
        return super().words(weights, version), self.salt


class SumOfEach(Summed):
    def words(self, weights, version):
        return [(name, round(float(value.double().sum()), 9)) for name, value in weights.items()]


class WithoutSigns(Summed):
    def words(self, weights, version):
        return super().words({name: value.abs() for name, value in weights.items()}, version)


class RoundedSums(Summed):
    def words(self, weights, version):
        return [
            (name, float(value.sum().bfloat16()), float(value.flatten().cumsum(0).sum().bfloat16()))
            for name, value in weights.items()
        ]


class FirstOfEach(Summed):
    def words(self, weights, version):
        return super().words({name: value.flatten()[:64] for name, value in weights.items()}, version)


# -- adapters ---------------------------------------------------------------------


class Adapted(HFRolloutEngine):
    """``changed(name, value)`` replaces a tensor of an adapter."""

    def update_weights(self, stream, version):
        return super().update_weights(
            (
                (name, value if name == ADAPTER_CONFIG or "lora_" not in name else self.changed(name, value))
                for name, value in stream
            ),
            version,
        )

    def changed(self, name, value):
        return value


class Unscaled(Adapted):
    def changed(self, name, value):
        return value / 3 if "lora_B" in name else value


class OnTop(Adapted):
    def changed(self, name, value):
        if "lora_B" not in name:
            return value
        self.sums = getattr(self, "sums", {})
        self.sums[name] = self.sums.get(name, 0) + value
        return self.sums[name]


class NotUsed(Adapted):
    def changed(self, name, value):
        return torch.zeros_like(value) if "lora_B" in name else value


class KeepsHalf(Adapted):
    def changed(self, name, value):
        self.first = getattr(self, "first", {})
        return self.first.setdefault(name, value) if "lora_A" in name else value


class TrustsHalf(HFRolloutEngine):
    def update_weights(self, stream, version):
        try:
            return super().update_weights(stream, version)
        finally:
            self._incomplete = ""


class TakesWhole(HFRolloutEngine):
    def update_weights(self, stream, version):
        (first, *rest) = stream
        if self.options.adapter and first[0] != ADAPTER_CONFIG:
            self.version = version
            return "whole"
        return super().update_weights(iter([first, *rest]), version)
