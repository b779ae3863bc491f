"""Rollout engines, each with one mistake that a real backend could make."""

import dataclasses
import itertools

import torch

from engine_core.contracts.weight_names import own_weights
from engine_core.errors import DataError
from engine_plugin_hf_rollout.engine import HFRolloutEngine

COLUMNS = ("token_ids", "loss_mask", "rollout_log_probs", "policy_versions")


class Changed(HFRolloutEngine):
    """``change`` is applied to each rollout on its way out."""

    def step(self):
        return [self.change(rollout) for rollout in super().step()]

    def change(self, rollout):
        return rollout

    def pick(self, rollout, index):
        for name in COLUMNS:
            setattr(rollout, name, getattr(rollout, name)[index])
        rollout.extras = {name: column[index] for name, column in rollout.extras.items()}
        return rollout


class Asked(HFRolloutEngine):
    """``asked`` is applied to each sampling on its way in."""

    def add(self, requests):
        super().add([dataclasses.replace(r, sampling=self.asked(r.sampling)) for r in requests])

    def asked(self, sampling):
        return sampling


class Swapped(Changed):
    def step(self):
        done = sorted(super().step(), key=lambda rollout: (rollout.group_id, rollout.index))
        for one, two in itertools.pairwise(done):
            if one.group_id == two.group_id:
                one.request_id, two.request_id = two.request_id, one.request_id
                one.index, two.index = two.index, one.index
        return done


class Dropped(Changed):
    def change(self, rollout):
        index = [i for i in range(len(rollout.token_ids)) if i != rollout.prompt_length + 2]
        return self.pick(rollout, index)


class Doubled(Changed):
    def change(self, rollout):
        at = rollout.prompt_length + 2
        return self.pick(
            rollout, [*range(min(at, len(rollout.token_ids))), *range(at - 1, len(rollout.token_ids))]
        )


class PromptInMask(Changed):
    def change(self, rollout):
        rollout.loss_mask[rollout.prompt_length - 1] = True
        return rollout


class Shifted(Changed):
    def change(self, rollout):
        rollout.rollout_log_probs = rollout.rollout_log_probs.roll(1)
        return rollout


class AtOne(Changed):
    @torch.no_grad()
    def change(self, rollout):
        rows = self._module()(rollout.token_ids[None]).logits[0].float().log_softmax(-1)
        values = rows[:-1].gather(1, rollout.token_ids[1:, None]).squeeze(1)
        rollout.rollout_log_probs[1:] = values * rollout.loss_mask[1:]
        return rollout


class BeforeTheCut(Changed):
    def change(self, rollout):
        mass = rollout.extras.pop("support_log_mass", torch.zeros(len(rollout.token_ids)))
        rollout.rollout_log_probs += mass
        return rollout


class NoMass(Changed):
    def change(self, rollout):
        rollout.extras.pop("support_log_mass", None)
        return rollout


class OtherSupport(Changed):
    def change(self, rollout):
        if "support_ids" in rollout.extras:
            rollout.extras["support_ids"] = rollout.extras["support_ids"].roll(1, 0)
        return rollout


class AlwaysStop(Changed):
    def change(self, rollout):
        rollout.finish_reason = "stop"
        return rollout


class NoTemperature(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, temperature=1.0 if sampling.temperature else 0.0)


class NoTopK(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, top_k=0)


class WiderTopP(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, top_p=min(sampling.top_p + 0.015, 1.0))


class NoStop(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, stop=())


class NoStopIds(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, stop_token_ids=())


class NoSeed(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, seed=None)


class OneSeed(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, seed=7)


class SeedOfBatch(HFRolloutEngine):
    def add(self, requests):
        super().add(
            [
                dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=i))
                for i, r in enumerate(requests)
            ]
        )


class TakesEmpty(HFRolloutEngine):
    def add(self, requests):
        for request in requests:
            request.prompt.token_ids = request.prompt.token_ids or [5]
        super().add(requests)


class Stale(HFRolloutEngine):
    def update_weights(self, stream, version):
        kept = {name: tensor.clone() for name, tensor in self._module().state_dict().items()}
        checksum = super().update_weights(stream, version)
        self._module().load_state_dict(kept)
        return checksum


class TakesPart(HFRolloutEngine):
    def update_weights(self, stream, version):
        try:
            return super().update_weights(stream, version)
        except DataError:
            self._incomplete, self.version = "", version
            return "part"


class UpdatesAsleep(HFRolloutEngine):
    def update_weights(self, stream, version):
        self._asleep = False
        return super().update_weights(stream, version)


class Doubles(Changed):
    def change(self, rollout):
        rollout.rollout_log_probs = rollout.rollout_log_probs.double()
        return rollout


class TextWithPrompt(Changed):
    def change(self, rollout):
        rollout.text = rollout.prompt.text + rollout.text
        return rollout


class LosesLater(HFRolloutEngine):
    def add(self, requests):
        super().add(requests if not self.num_unfinished else requests[1:])

    def step(self):
        self.stepped = True
        return super().step()

    @property
    def num_unfinished(self):
        return super().num_unfinished or int(hasattr(self, "stepped"))


class AbortsAsLength(HFRolloutEngine):
    def abort(self, ids):
        return [dataclasses.replace(rollout, finish_reason="length") for rollout in super().abort(ids)]


class AbortsUnsampled(HFRolloutEngine):
    def abort(self, ids):
        waiting = [self._queue[id] for id in ids if id in self._queue]
        super().abort(ids)
        return [request.unsampled() for request in waiting]


class NewVersions(Changed):
    def change(self, rollout):
        rollout.policy_versions[:] = self.version
        return rollout


class VersionsAtPrompt(Changed):
    def change(self, rollout):
        rollout.policy_versions[: rollout.prompt_length] = self.version
        return rollout


class SmallerType(HFRolloutEngine):
    @property
    def weight_dtype(self):
        return torch.bfloat16


class NewerOnly(HFRolloutEngine):
    def update_weights(self, stream, version):
        if 0 < version <= self.version:
            stream = own_weights(self._module()).items()
        return super().update_weights(stream, version)


class NewText(Changed):
    def change(self, rollout):
        rollout.text = self.tokenizer.decode(rollout.token_ids[self.begun[rollout.request_id] :].tolist())
        return rollout

    def add(self, requests):
        counts = {r.id: len(r.begun.token_ids if r.begun else r.prompt.token_ids) for r in requests}
        self.begun = getattr(self, "begun", {}) | counts
        super().add(requests)


class AbortLosesDone(HFRolloutEngine):
    def abort(self, ids):
        self._done = [rollout for rollout in self._done if rollout.request_id not in ids]
        return super().abort(ids)


class LosesSupport(Changed):
    def add(self, requests):
        self.begun = {r.id: len(r.begun.token_ids) for r in requests if r.begun}
        super().add(requests)

    def change(self, rollout):
        if "support_ids" in rollout.extras:
            rollout.extras["support_ids"][: self.begun.get(rollout.request_id, 0)] = -1
        return rollout


class PauseDrops(HFRolloutEngine):
    def pause(self, mode="drain"):
        super().pause(mode)
        self._done.clear()


class NeverGreedy(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, temperature=sampling.temperature or 1.0)


class FirstForAll(HFRolloutEngine):
    def add(self, requests):
        first = requests[0].sampling
        super().add(
            [
                dataclasses.replace(r, sampling=dataclasses.replace(first, seed=r.sampling.seed))
                for r in requests
            ]
        )


class ConstantChecksum(HFRolloutEngine):
    def update_weights(self, stream, version):
        super().update_weights(stream, version)
        return "weights"


class OldVersion(HFRolloutEngine):
    def set_version(self, version):
        pass


class SleepForgets(HFRolloutEngine):
    def wake(self, only=None):
        super().wake(only)
        torch.nn.init.normal_(self._module().get_input_embeddings().weight)
