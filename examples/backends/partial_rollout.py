"""A rollout engine whose responses can be stopped and continued: each step samples one token of each request."""

from dataclasses import replace

import torch

from engine_core import hookimpl
from engine_core.contracts.checksum import Checksum
from engine_core.contracts.engines import RolloutEngine
from engine_core.errors import DataError
from engine_core.sampling import check_request
from engine_core.specs import RolloutBackend
from engine_plugin_torch.model_loading import load_model
from engine_plugin_torch.weights import take_weights, to_own_names


class PartialRollout(RolloutEngine):
    def __init__(self, config, model_config, context):
        super().__init__(config, model_config, context)
        self.end = context.live["tokenizer"].eos_token_id
        self.module = load_model(model_config, context.device, torch.float32).eval()
        self.in_flight, self.complete = {}, True  # by id: the request and its rollout so far

    def update_weights(self, stream, version):
        checksum, self.complete = Checksum(), False
        take_weights(self.module, to_own_names(self.module, checksum.of(stream)))
        self.version, self.complete = version, True
        return checksum.result()

    def add(self, requests):
        config, taken = self.module.config, set(self.in_flight)
        for request in requests:
            check_request(request, taken, config.vocab_size, config.max_position_embeddings)
            taken.add(request.id)
        self.in_flight |= {request.id: (request, request.unsampled()) for request in requests}

    @property
    def num_unfinished(self):
        return len(self.in_flight)

    def step(self):
        if not self.complete:
            raise DataError("The last weight update was not completed. Send the weights again.")
        for id, (request, rollout) in self.in_flight.items():
            self.in_flight[id] = request, self.with_one_token(request, rollout)
        return self.abort([id for id, (_, r) in self.in_flight.items() if r.finish_reason != "abort"])

    def abort(self, ids):
        return [self.in_flight.pop(id)[1] for id in ids if id in self.in_flight]

    @torch.no_grad()
    def with_one_token(self, request, rollout):
        sampling, ids = request.sampling, rollout.token_ids
        logits = self.module(input_ids=ids[None].to(self.context.device)).logits[0, -1].float().cpu()
        probs = torch.softmax(logits / (sampling.temperature or 1.0), dim=-1)
        generator = torch.Generator()  # for this token; a request with a seed does not depend on others
        generator.seed() if sampling.seed is None else generator.manual_seed(hash((sampling.seed, len(ids))))
        greedy = sampling.temperature == 0
        token = probs.argmax()[None] if greedy else torch.multinomial(probs, 1, generator=generator)
        room = self.module.config.max_position_embeddings - rollout.prompt_length
        full = rollout.response_length + 1 == min(sampling.max_response_tokens, room)
        ended = int(token) in {self.end, *sampling.stop_token_ids}
        return replace(
            rollout,
            token_ids=torch.cat([ids, token]),
            loss_mask=torch.cat([rollout.loss_mask, torch.tensor([True])]),
            rollout_log_probs=torch.cat([rollout.rollout_log_probs, probs[token].log()]),
            policy_versions=torch.cat(
                [rollout.policy_versions, torch.tensor([self.version], dtype=torch.int32)]
            ),
            finish_reason="stop" if ended else "length" if full else "abort",
            text="",  # of `begun`; the core decodes the whole response
        )


@hookimpl
def engine_rollout_engines():
    options = frozenset({"temperature", "max_response_tokens", "stop_token_ids"})
    return {
        "partial": RolloutBackend(load=PartialRollout, capabilities=frozenset({"partial"}), sampling=options)
    }
