"""A rollout engine: one request at a time, the whole sequence again for each token."""

import torch

from engine_core import hookimpl
from engine_core.contracts.checksum import Checksum
from engine_core.contracts.engines import RolloutEngine
from engine_core.errors import DataError
from engine_core.sampling import check_request
from engine_core.specs import RolloutBackend
from engine_core.types import Rollout
from engine_plugin_torch.model_loading import load_model
from engine_plugin_torch.weights import take_weights, to_own_names


class PlainRollout(RolloutEngine):
    def __init__(self, config, model_config, context):
        super().__init__(config, model_config, context)
        self.tokenizer = context.live["tokenizer"]
        self.module = load_model(model_config, context.device, torch.float32).eval()
        self.queue, self.whole = {}, True

    def update_weights(self, stream, version):
        checksum, self.whole = Checksum(), False  # should the stream break, no mixture is sampled from
        take_weights(self.module, to_own_names(self.module, checksum.of(stream)))
        self.version, self.whole = version, True
        return checksum.result()

    def add(self, requests):
        config, taken = self.module.config, set(self.queue)
        for request in requests:
            check_request(request, taken, config.vocab_size, config.max_position_embeddings)
            taken.add(request.id)
        self.queue |= {request.id: request for request in requests}

    @property
    def num_unfinished(self):
        return len(self.queue)

    def step(self):
        if not self.whole:
            raise DataError("The last update of weights did not come to its end. Update them again.")
        return [self.sample(self.queue.pop(next(iter(self.queue))))] if self.queue else []

    def abort(self, ids):
        return [self.rollout(self.queue.pop(id), [], [], [], "abort") for id in ids if id in self.queue]

    @torch.no_grad()
    def sample(self, request):
        sampling, tokens, log_probs, masses = request.sampling, [], [], []
        generator = torch.Generator()
        generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
        ends = {self.tokenizer.eos_token_id, *sampling.stop_token_ids}
        room = self.module.config.max_position_embeddings - len(request.prompt.token_ids)
        while len(tokens) < min(sampling.max_response_tokens, room):
            ids = torch.tensor([request.prompt.token_ids + tokens], device=self.context.device)
            probs, mass = distribution(self.module(input_ids=ids).logits[0, -1].float().cpu(), sampling)
            greedy = sampling.temperature == 0
            token = int(probs.argmax() if greedy else torch.multinomial(probs, 1, generator=generator))
            tokens.append(token)
            log_probs.append(float(probs[token].log()))
            masses.append(float(mass.log()))
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            if token in ends or any(stop in text for stop in sampling.stop):
                return self.rollout(request, tokens, log_probs, masses, "stop")
        return self.rollout(request, tokens, log_probs, masses, "length")

    def rollout(self, request, tokens, log_probs, masses, reason):
        prompt = request.prompt.token_ids
        zeros, count = [0.0] * len(prompt), len(prompt) + len(tokens)
        return Rollout(
            request_id=request.id,
            prompt=request.prompt,
            token_ids=torch.tensor(prompt + tokens),
            loss_mask=torch.arange(count) >= len(prompt),
            rollout_log_probs=torch.tensor(zeros + log_probs),
            policy_versions=torch.tensor([0] * len(prompt) + [self.version] * len(tokens), dtype=torch.int32),
            finish_reason=reason,
            group_id=request.group_id,
            index=request.index,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            extras={"support_log_mass": torch.tensor(zeros + masses)},
        )


def distribution(logits, sampling):
    """What is sampled from, [V], and the share of the whole that top-k and top-p leave."""
    probs = torch.softmax(logits / (sampling.temperature or 1.0), dim=-1)
    if not sampling.cuts:  # greedy, or neither top-k nor top-p
        return probs, torch.tensor(1.0)
    ranked, order = probs.sort(descending=True)
    if sampling.top_k:
        ranked[sampling.top_k :] = 0.0
    left = ranked / ranked.sum()
    ranked[left.cumsum(0) - left >= sampling.top_p] = 0.0
    mass = ranked.sum()
    return torch.zeros_like(probs).scatter(0, order, ranked / mass), mass


@hookimpl
def engine_rollout_engines():
    return {"plain": RolloutBackend(load=PlainRollout)}
