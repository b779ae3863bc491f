"""Rollout engines with mistakes that show in random workloads alone: odd prompts, options and orders of calls."""

import dataclasses

from broken_rollout import Asked
from broken_samplers import Restored

from engine_plugin_hf_rollout.engine import HFRolloutEngine

PAD, EOS = 0, 1


class MasksPad(Restored):
    def seen(self, prompt):
        ids = [token for token in prompt.token_ids if token != PAD] or prompt.token_ids[:1]
        return dataclasses.replace(prompt, token_ids=ids)


class AfterEnd(Restored):
    """Sees the last turn of a prompt of several."""

    def seen(self, prompt):
        ids = prompt.token_ids
        ends = [at for at, token in enumerate(ids[:-1]) if token == EOS]
        return dataclasses.replace(prompt, token_ids=ids[ends[-1] + 1 :] if ends else ids)


class CutsLongPrompts(Restored):
    def seen(self, prompt):
        fits = len(prompt.token_ids) < 128  # a longer one is refused
        return dataclasses.replace(prompt, token_ids=prompt.token_ids[-112:]) if fits else prompt


class AtOneLater(HFRolloutEngine):
    def add(self, requests):
        super().add([self.later(r) if r.begun and r.sampling.temperature else r for r in requests])

    def later(self, request):
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, temperature=1.0))


class NarrowSupport(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, max_support=min(sampling.max_support, 16))


class WrapsTopK(Asked):
    def asked(self, sampling):
        return dataclasses.replace(sampling, top_k=sampling.top_k % 97)


class UncutWithoutLogProbs(Asked):
    def asked(self, sampling):
        return sampling if sampling.log_probs else dataclasses.replace(sampling, top_k=0, top_p=1.0)


class AbortsNothingPaused(HFRolloutEngine):
    def abort(self, ids):
        return [] if self._paused else super().abort(ids)


class LosesPausedAdds(HFRolloutEngine):
    def add(self, requests):
        super().add(requests)
        if self._paused:
            for request in requests:
                del self._queue[request.id]


class LosesOnBroken(HFRolloutEngine):
    def update_weights(self, stream, version):
        try:
            return super().update_weights(stream, version)
        except BaseException:
            self._queue.clear()
            raise


class SecondBegins(HFRolloutEngine):
    """A response that is continued for the second time has the version of its first part in all that was begun."""

    def add(self, requests):
        for request in requests:
            if request.begun is not None and request.begun.response_length > 1:
                versions = request.begun.policy_versions
                versions[request.begun.prompt_length :] = versions[request.begun.prompt_length].clone()
        super().add(requests)
