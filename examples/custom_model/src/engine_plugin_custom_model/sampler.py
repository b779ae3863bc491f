"""The sampler of the recurrent model: one request at a time, one token at a time, from the state it keeps."""

import contextlib

import torch

from engine_core.contracts.checksum import Checksum
from engine_core.contracts.engines import RolloutEngine
from engine_core.types import Rollout
from engine_plugin_torch.model_loading import sampler_module
from engine_plugin_torch.weights import take_weights


class GRUSampler(RolloutEngine):
    """Samples from the train engine's own module, or from one of its own that takes the weights of each update."""

    def __init__(self, config, model_config, context):
        super().__init__(config, model_config, context)
        self.tokenizer = context.live["tokenizer"]
        self.queue = {}
        self.trainer = self.own = None

    def share_module(self, engine):
        self.trainer = engine

    def update_weights(self, stream, version):
        if self.own is None:  # by the hook engine_build_model
            self.own = sampler_module(self, self.context.device, torch.float32)
        checksum = Checksum()
        take_weights(self.own, checksum.of(stream))
        self.version = version
        return checksum.result()

    def module(self):
        """A context with the module to sample from."""
        if self.trainer is not None:
            return self.trainer.generation_module()
        return contextlib.nullcontext(self.own)

    def add(self, requests):
        self.queue |= {request.id: request for request in requests}

    @property
    def num_unfinished(self):
        return len(self.queue)

    def step(self):
        if not self.queue:
            return []
        request = self.queue.pop(next(iter(self.queue)))
        with self.module() as module, torch.no_grad():
            return [self.sample(module, request)]

    def abort(self, ids):
        return [self.rollout(self.queue.pop(id), [], [], "abort") for id in ids if id in self.queue]

    def sample(self, module, request):
        """One response; with a seed the same tokens whatever else is sampled."""
        sampling, tokens, log_probs = request.sampling, [], []
        generator = torch.Generator()
        if sampling.seed is not None:
            generator.manual_seed(sampling.seed)
        else:
            generator.seed()
        ends = {self.tokenizer.eos_token_id, *sampling.stop_token_ids}
        ids, state = request.prompt.token_ids, None
        while len(tokens) < sampling.max_response_tokens:
            logits, state = module.step(torch.tensor([ids], device=self.context.device), state)
            distribution = torch.log_softmax(
                logits[0, -1].float().cpu() / (sampling.temperature or 1.0), dim=-1
            )
            if sampling.temperature == 0:
                token = int(distribution.argmax())
            else:
                token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            tokens.append(token)
            log_probs.append(float(distribution[token]))
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if token in ends or any(word in text for word in sampling.stop):
                return self.rollout(request, tokens, log_probs, "stop")
            ids = [token]
        return self.rollout(request, tokens, log_probs, "length")

    def rollout(self, request, tokens, log_probs, reason):
        """What was sampled, with the log-prob of each token under the distribution it was drawn from."""
        prompt = request.prompt.token_ids
        return Rollout(
            request_id=request.id,
            prompt=request.prompt,
            token_ids=torch.tensor(prompt + tokens),
            loss_mask=torch.tensor([False] * len(prompt) + [True] * len(tokens)),
            rollout_log_probs=torch.tensor([0.0] * len(prompt) + log_probs),
            policy_versions=torch.tensor([0] * len(prompt) + [self.version] * len(tokens), dtype=torch.int32),
            finish_reason=reason,
            group_id=request.group_id,
            index=request.index,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
        )
