"""Rollout engines with mistakes of other models, sizes, later tokens, weights in flight, ownership and text."""

import contextlib
import copy
import dataclasses
from unittest import mock

import numpy as np
import torch
from broken_rollout import Asked, Changed

from engine_plugin_hf_rollout import cache, decoding
from engine_plugin_hf_rollout.engine import HFRolloutEngine

# -- other models ---------------------------------------------------------------


class Drops(HFRolloutEngine):
    def _build(self):
        return super()._build().train()


class MatricesOnly(HFRolloutEngine):
    def update_weights(self, stream, version):
        own = self._module().state_dict()
        stream = ((name, own[name].clone() if tensor.ndim == 1 else tensor) for name, tensor in stream)
        return super().update_weights(stream, version)


class TiesHead(HFRolloutEngine):
    def _build(self):
        module = super()._build()
        module.lm_head.weight = module.get_input_embeddings().weight
        return module


class SharesTraining(HFRolloutEngine):
    @contextlib.contextmanager
    def _generation(self):
        if self._trainer is None:
            with super()._generation() as module:
                yield module
        else:
            with torch.no_grad():
                yield self._trainer.module.train()


# -- sizes ------------------------------------------------------------------------


class Restored(HFRolloutEngine):
    """``seen`` is what is sampled from in place of a request's prompt."""

    def add(self, requests):
        self.asked = getattr(self, "asked", {}) | {request.id: request for request in requests}
        super().add([dataclasses.replace(r, prompt=self.seen(r.prompt)) for r in requests])

    def step(self):
        return [self.restored(rollout) for rollout in super().step()]

    def restored(self, rollout):
        prompt, old = self.asked[rollout.request_id].prompt, rollout.prompt_length
        ids, missing = torch.tensor(prompt.token_ids), len(prompt.token_ids) - old
        for name in ("loss_mask", "rollout_log_probs", "policy_versions"):
            column = getattr(rollout, name)
            setattr(rollout, name, torch.cat([column.new_zeros(max(missing, 0)), column])[max(-missing, 0) :])
        rollout.token_ids = torch.cat([ids, rollout.token_ids[old:]])
        rollout.prompt = prompt
        return rollout


class Window(Restored):
    def seen(self, prompt):
        return dataclasses.replace(prompt, token_ids=prompt.token_ids[-64:])


class PrefixOfAnother(Restored):
    def seen(self, prompt):
        first = tuple(prompt.token_ids[:16])
        self.cached = getattr(self, "cached", {})
        if len(prompt.token_ids) <= 16:
            return prompt
        known = self.cached.setdefault((first, len(prompt.token_ids) // 16), prompt.token_ids)
        ids = known[: len(known) // 16 * 16] + prompt.token_ids[len(known) // 16 * 16 :]
        return dataclasses.replace(prompt, token_ids=ids)


class OfOneId(HFRolloutEngine):
    def add(self, requests):
        prompts = {request.prompt.id: request.prompt for request in requests}
        super().add([dataclasses.replace(r, prompt=prompts[r.prompt.id]) for r in requests])


class LosesMany(HFRolloutEngine):
    def add(self, requests):
        super().add(requests[:128])


class Forgetful(HFRolloutEngine):
    def step(self):
        def grown(like, filled, room):
            return like.new_zeros((*like.shape[:-2], room, like.shape[-1]))

        with mock.patch.object(cache, "_grown", grown):
            return super().step()


class LateShift(Changed):
    def change(self, rollout):
        at = rollout.prompt_length + 64
        rollout.rollout_log_probs[at:] = rollout.rollout_log_probs[at:].roll(-1)
        return rollout


# -- later tokens -------------------------------------------------------------------


class Uniforms(HFRolloutEngine):
    """``changed`` is applied to the random numbers [B, N] of a batch."""

    def step(self):
        whole = decoding.uniforms
        with mock.patch.object(decoding, "uniforms", lambda *given: self.changed(whole(*given))):
            return super().step()


class OneNumber(Uniforms):
    def changed(self, numbers):
        return numbers[:, :1].expand_as(numbers).clone()


class Middle(Uniforms):
    def changed(self, numbers):
        numbers[:, 1:] = 0.25 + numbers[:, 1:] / 2
        return numbers


class NoTail(Uniforms):
    def changed(self, numbers):
        numbers[:, 1:] *= 0.85
        return numbers


class Neighbours(Uniforms):
    def changed(self, numbers):
        numbers[1::2] = numbers[: len(numbers) // 2 * 2 : 2]
        return numbers


class CoolsLater(HFRolloutEngine):
    """Draws later tokens at 0.8 of the temperature and reports log-probs at the temperature."""

    def step(self):
        whole, count = decoding.draw, [0]

        def draw(log_probs, uniform, greedy):
            count[0] += 1
            sharper = torch.log_softmax(log_probs / 0.8, -1) if count[0] > 1 else log_probs
            return whole(sharper, uniform, greedy)

        with mock.patch.object(decoding, "draw", draw):
            return super().step()


# -- weights in flight ----------------------------------------------------------------


class InFlight(HFRolloutEngine):
    """Keeps the batch and its cache over updates; each token has the version that drew it."""

    def update_weights(self, stream, version):
        before = [(r.id, len(s.tokens)) for r, s in zip(self._batch.values(), self._results(), strict=True)]
        self.drawn = getattr(self, "drawn", {})
        for id, count in before:
            self.drawn.setdefault(id, []).append((count, self.version))
        self._set_aside, keep = lambda: None, self._set_aside
        try:
            return super().update_weights(stream, version)
        finally:
            self._set_aside = keep

    def _results(self):
        return self._decoding.results(list(self._batch)) if self._decoding else []

    def _rollout(self, request, sampled):
        rollout, start = super()._rollout(request, sampled), len(request.prompt.token_ids)
        for count, version in reversed(self.drawn.pop(request.id, []) if hasattr(self, "drawn") else []):
            rollout.policy_versions[start : start + count] = version
        return rollout


class KeepsKeys(InFlight):
    pass


class KeepsOldWeights(InFlight):
    def update_weights(self, stream, version):
        if self._batch:
            self.frozen = getattr(self, "frozen", None) or copy.deepcopy(self._module())
        return super().update_weights(stream, version)

    @contextlib.contextmanager
    def _generation(self):
        with super()._generation() as module:
            yield self.frozen if self._batch and getattr(self, "frozen", None) else module


class VersionOfTheEnd(HFRolloutEngine):
    def _rollout(self, request, sampled):
        rollout = super()._rollout(request, sampled)
        rollout.policy_versions[rollout.prompt_length :] = self.version
        return rollout


class BeginsAgain(HFRolloutEngine):
    def _set_aside(self):
        self._drop_batch()


class SleepLoses(HFRolloutEngine):
    def sleep(self, keep=()):
        for request in self._batch.values():
            self._queue.pop(request.id, None)
        self._drop_batch()
        super().sleep(keep)


class SleepBeginsElsewhere(HFRolloutEngine):
    def sleep(self, keep=()):
        super().sleep(keep)
        for id, request in self._queue.items():
            if request.begun is not None:
                begun = dataclasses.replace(request.begun, token_ids=request.begun.token_ids.clone())
                begun.token_ids[-1] = 2 + (begun.token_ids[-1] + 1) % 90
                self._queue[id] = dataclasses.replace(request, begun=begun)


# -- what belongs to the caller -----------------------------------------------------------


class KeepsTensors(HFRolloutEngine):
    def update_weights(self, stream, version):
        weights = dict(stream)
        checksum = super().update_weights(iter(weights.items()), version)
        for name, parameter in self._module().named_parameters():
            parameter.data = weights.get(name, parameter.data)
        return checksum


class ChangesStream(HFRolloutEngine):
    def update_weights(self, stream, version):
        def rounded():
            for name, tensor in stream:
                yield name, tensor
                tensor.copy_(tensor.bfloat16())

        return super().update_weights(rounded(), version)


class ChangesRequests(HFRolloutEngine):
    def add(self, requests):
        super().add(requests)
        for request in requests:
            request.prompt.columns["sampled"] = True


class SeedsGlobally(HFRolloutEngine):
    def step(self):
        torch.manual_seed(next(iter(self._queue.values())).sampling.seed or 0) if self._queue else None
        return super().step()


class DrawsFromNumpy(HFRolloutEngine):
    def step(self):
        np.random.rand()
        return super().step()


class OneWeightSum(HFRolloutEngine):
    def update_weights(self, stream, version):
        weights = dict(stream)
        super().update_weights(iter(weights.items()), version)
        return str(weights[min(weights)].double().sum().item())


class PlainSum(HFRolloutEngine):
    def update_weights(self, stream, version):
        weights = dict(stream)
        super().update_weights(iter(weights.items()), version)
        return str(sum(tensor.double().sum().item() for tensor in weights.values()))


# -- text -----------------------------------------------------------------------------------


class SmallSeeds(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, seed=None if sampling.seed is None else sampling.seed & 0xFFFF)


class NoEndWithStops(HFRolloutEngine):
    def step(self):
        finish = decoding._Batch.finish

        def changed(batch, *given):
            if any(batch.stops):
                batch.ends = torch.where(batch.ends == 1, -5, batch.ends)
            return finish(batch, *given)

        with mock.patch.object(decoding._Batch, "finish", changed):
            return super().step()


class ShortStops(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, stop=tuple(stop[-2:] for stop in sampling.stop))


class FirstStop(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, stop=sampling.stop[:1])


class StopsOrTokens(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, stop_token_ids=() if sampling.stop else sampling.stop_token_ids)


class StopInPrompt(HFRolloutEngine):
    def step(self):
        self._shown = {request.id: request.prompt.token_ids for request in self._queue.values()}
        return super().step()

    def _decode(self, rows):
        begin = self.tokenizer.decode(next(iter(self._shown.values())))
        return [begin + text for text in super()._decode(rows)]


class LastIsLength(Changed):
    def change(self, rollout):
        if rollout.response_length == self.most.get(rollout.request_id):
            rollout.finish_reason = "length"
        return rollout

    def add(self, requests):
        self.most = {request.id: request.sampling.max_response_tokens for request in requests}
        super().add(requests)


class EndIsLength(LastIsLength):
    """Only where the end of sequence is the last token allowed."""

    def change(self, rollout):
        return super().change(rollout) if int(rollout.token_ids[-1]) == 1 else rollout


class Strips(Changed):
    def change(self, rollout):
        rollout.text = rollout.text.strip()
        return rollout


class CleansUp(Changed):
    def change(self, rollout):
        rollout.text = rollout.text.replace(" .", ".").replace(" ,", ",")
        return rollout


class OneByOne(Changed):
    def change(self, rollout):
        tokens = rollout.token_ids[rollout.prompt_length :].tolist()
        rollout.text = "".join(self.tokenizer.decode([token], skip_special_tokens=True) for token in tokens)
        return rollout


# -- memory -------------------------------------------------------------------------


class KeepsCache(HFRolloutEngine):
    """What a sleep sets aside stays in memory until the next batch."""

    def _set_aside(self):
        self.kept = self._decoding
        super()._set_aside()


class KeepsModule(HFRolloutEngine):
    def close(self):
        self.kept = self._own
        super().close()
