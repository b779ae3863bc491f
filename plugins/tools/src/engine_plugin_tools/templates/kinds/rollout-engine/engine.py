"""The rollout engine: one request at a time, the whole sequence again for each token. Slow, and correct."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_core.contracts.checksum import Checksum
from engine_core.contracts.engines import RolloutEngine, WorkerContext
from engine_core.errors import DataError
from engine_core.sampling import check_request
from engine_core.types import Request, Rollout
from engine_plugin_torch.model_loading import load_model
from engine_plugin_torch.weights import take_weights, to_own_names

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RolloutConfig


class TemplateName(RolloutEngine):
    """A sampler with separate weights, which the trainer sends after each update."""

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        super().__init__(config, model_config, context)
        self.tokenizer = (context.live or {})["tokenizer"]
        self.module = load_model(model_config, context.device, torch.float32).eval()
        self.queue: dict[str, Request] = {}
        self.complete = True  # False: an update broke off, and the weights are a mixture

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Copy the weights and return their checksum."""
        checksum, self.complete = Checksum(), False
        take_weights(self.module, to_own_names(self.module, checksum.of(stream)))
        self.version, self.complete = version, True
        return checksum.result()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: all of them, or none if one is malformed."""
        config, taken = self.module.config, set(self.queue)
        for request in requests:
            check_request(request, taken, config.vocab_size, config.max_position_embeddings)
            taken.add(request.id)
        self.queue |= {request.id: request for request in requests}

    @property
    def num_unfinished(self) -> int:
        """Requests without an answer."""
        return len(self.queue)

    def step(self) -> list[Rollout]:
        """Answer the oldest request."""
        if not self.complete:
            raise DataError("The last weight update was not completed. Send the weights again.")
        return [self.sample(self.queue.pop(next(iter(self.queue))))] if self.queue else []

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        """Return queued requests without a response."""
        return [self.rollout(self.queue.pop(name), [], [], "abort") for name in ids if name in self.queue]

    @torch.no_grad()
    def sample(self, request: Request) -> Rollout:
        """Sample a response; the temperature 0 takes the likeliest token."""
        sampling, tokens, log_probs = request.sampling, list[int](), list[float]()
        generator = torch.Generator()
        generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
        ends = {self.tokenizer.eos_token_id, *sampling.stop_token_ids}
        room = self.module.config.max_position_embeddings - len(request.prompt.token_ids)
        while len(tokens) < min(sampling.max_response_tokens, room):
            ids = torch.tensor([[*request.prompt.token_ids, *tokens]], device=self.context.device)
            logits = self.module(input_ids=ids).logits[0, -1].float().cpu()
            probs = torch.softmax(logits / (sampling.temperature or 1.0), dim=-1)
            if sampling.temperature == 0:
                token = int(probs.argmax())
            else:
                token = int(torch.multinomial(probs, 1, generator=generator))
            tokens.append(token)
            log_probs.append(float(probs[token].log()))
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            if token in ends or any(stop in text for stop in sampling.stop):
                return self.rollout(request, tokens, log_probs, "stop")
        return self.rollout(request, tokens, log_probs, "length")

    def rollout(self, request: Request, tokens: list[int], log_probs: list[float], reason: str) -> Rollout:
        """Return prompt and response, each token with its log-prob and the version of the weights."""
        prompt = request.prompt.token_ids
        count = len(prompt) + len(tokens)
        return Rollout(
            request_id=request.id,
            prompt=request.prompt,
            token_ids=torch.tensor([*prompt, *tokens]),
            loss_mask=torch.arange(count) >= len(prompt),
            rollout_log_probs=torch.tensor([0.0] * len(prompt) + log_probs),
            policy_versions=torch.tensor([0] * len(prompt) + [self.version] * len(tokens), dtype=torch.int32),
            finish_reason=reason,
            group_id=request.group_id,
            index=request.index,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
        )
