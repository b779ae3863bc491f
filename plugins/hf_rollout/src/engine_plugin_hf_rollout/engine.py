"""The rollout engine ``hf``.

It finishes whole batches: each ``step`` samples one batch of queued requests to its end. In one
process with a train engine it samples from that engine's own module and weights never move.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.data import load_tokenizer
from engine_core.engines.base import RolloutEngine
from engine_core.engines.model_loading import DTYPES, load_model
from engine_core.errors import ConfigError, DataError, did_you_mean
from engine_core.types import Rollout
from engine_plugin_hf_rollout.decoding import Sampled, sample
from engine_plugin_hf_rollout.plugin import HFOptions

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.engines.base import TrainEngine, WorkerContext
    from engine_core.types import Request


class HFRolloutEngine(RolloutEngine):
    """See ``RolloutEngine``. ``step`` returns whole batches, so ``abort`` gives back unsampled requests."""

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        super().__init__(config, model_config, context)
        self.options: HFOptions = config.options or HFOptions()
        live = context.live or {}
        self.tokenizer = live.get("tokenizer") or load_tokenizer(model_config)
        self._trainer: TrainEngine | None = None
        self._module: nn.Module | None = live.get("model")
        if self._module is None:
            self._module = load_model(model_config, context.device, DTYPES[self.options.dtype])
        self._module_config = self._module.config.get_text_config()
        self._end_ids = _end_ids(self.tokenizer, self._module)
        self._queue: dict[str, Request] = {}
        self._done: list[Rollout] = []  # finished while pausing, returned by the next step
        self._paused = self._asleep = False
        self._incomplete = ""  # why the weights are not those of one version

    # requests

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + len(self._done)

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._check(request)
        self._queue |= {request.id: request for request in requests}

    def step(self) -> list[Rollout]:
        if self._paused:
            raise RuntimeError("The sampler is paused; call resume() first.")
        done, self._done = self._done, []
        return done + self._sample_next()

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        requests = [self._queue.pop(id) for id in ids if id in self._queue]
        return [self._rollout(request, Sampled(finish_reason="abort")) for request in requests]

    def pause(self, mode: str = "drain") -> None:
        if mode == "abort":
            self._done += self.abort(list(self._queue))
        elif mode == "drain":
            while self._queue:
                self._done += self._sample_next()
        elif mode != "keep":
            raise ValueError(f"Unknown pause mode '{mode}'." + did_you_mean(mode, ("abort", "drain", "keep")))
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def _sample_next(self) -> list[Rollout]:
        if not self._queue:
            return []
        if self._asleep:
            raise RuntimeError("The sampler is asleep; call wake() first.")
        if self._incomplete:
            raise DataError(f"The sampler holds weights of two versions ({self._incomplete}). Update them again.")
        # similar lengths together: little padding; the longest first, so that memory runs out at once or never
        ordered = sorted(self._queue.values(), key=lambda r: (-len(r.prompt.token_ids), r.prompt.token_ids))
        batch = ordered[: self.options.batch_size]
        with self._generation() as module:
            sampled = sample(module, batch, self._end_ids, self._stopped, self._max_positions)
        for request in batch:
            del self._queue[request.id]
        return [self._rollout(request, result) for request, result in zip(batch, sampled, strict=True)]

    def _check(self, request: Request) -> None:
        ids, vocabulary = request.prompt.token_ids, self._module_config.vocab_size
        where = f"Request '{request.id}' (prompt '{request.prompt.id}')"
        if request.id in self._queue:
            raise ValueError(f"{where} is queued already.")
        if not ids:
            raise DataError(f"{where} has no tokens. An empty prompt cannot be continued; give it a start token.")
        if min(ids) < 0 or max(ids) >= vocabulary:
            wrong = next(i for i in ids if not 0 <= i < vocabulary)
            raise DataError(f"{where} has token {wrong}, and the model knows 0 to {vocabulary - 1}. Check the tokenizer.")
        if len(ids) >= self._max_positions:
            raise DataError(
                f"{where} has {len(ids)} tokens, and the model holds {self._max_positions} with the response. "
                "Lower data.max_prompt_tokens."
            )

    @property
    def _max_positions(self) -> int:
        return getattr(self._module_config, "max_position_embeddings", None) or 1 << 30

    def _stopped(self, request: Request, tokens: list[int]) -> bool:
        """Whether the response ends in a stop string; a match may span tokens, several of which may be one character."""
        longest = max(map(len, request.sampling.stop))
        tail = self.tokenizer.decode(tokens[-(4 * longest + 8) :], skip_special_tokens=False)
        last = self.tokenizer.decode(tokens[-1:], skip_special_tokens=False)
        window = tail[-(longest + len(last)) :]
        return any(stop in window for stop in request.sampling.stop)

    def _rollout(self, request: Request, sampled: Sampled) -> Rollout:
        prompt, count = request.prompt.token_ids, len(sampled.tokens)
        zeros = [0.0] * len(prompt)
        extras = {}
        if request.sampling.temperature > 0 and (request.sampling.top_p < 1 or request.sampling.top_k > 0):
            extras["support_log_mass"] = torch.tensor(zeros + sampled.log_mass)
        return Rollout(
            request_id=request.id,
            prompt=request.prompt,
            token_ids=torch.tensor(prompt + sampled.tokens),
            loss_mask=torch.tensor([False] * len(prompt) + [True] * count),
            rollout_log_probs=torch.tensor(zeros + sampled.log_probs),
            policy_versions=torch.full((len(prompt) + count,), self.version, dtype=torch.int32),
            finish_reason=sampled.finish_reason,
            group_id=request.group_id,
            index=request.index,
            text=self.tokenizer.decode(sampled.tokens, skip_special_tokens=True),
            extras=extras,
        )

    # weights

    def share_module(self, engine: TrainEngine) -> None:
        self._trainer, self._module = engine, None

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """As the contract says. When the stream breaks half way, sampling is refused until a whole one came."""
        if self._asleep:
            raise RuntimeError("The sampler is asleep: its weights cannot be updated. Call wake() first.")
        if self._module is None:
            raise RuntimeError("The sampler uses the trainer's own module; there is nothing to update.")
        own = _own_weights(self._module)
        left, digest = set(own), hashlib.blake2b(digest_size=16)
        self._incomplete = f"an update to version {version} did not come to its end"
        for name, tensor in stream:
            if name not in own:
                raise DataError(f"Unknown weight '{name}' in the update to version {version}." + _near(name, own))
            if own[name].shape != tensor.shape:
                raise DataError(f"Weight '{name}' came as {list(tensor.shape)}; expected {list(own[name].shape)}.")
            own[name].copy_(tensor)
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            left.discard(name)
        if left:
            raise DataError(f"The update to version {version} lacks {len(left)} weights, such as '{min(left)}'.")
        self._incomplete, self.version = "", version
        return digest.hexdigest()

    @contextlib.contextmanager
    def _generation(self) -> Iterator[Any]:
        """The module to sample from, in eval mode, without gradient."""
        shared: AbstractContextManager[Any]
        shared = contextlib.nullcontext(self._module) if self._trainer is None else self._trainer.generation_module()
        with shared as module, torch.no_grad():
            module.eval()
            yield module

    # memory

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """The cache lives only within ``step``; weights of its own go to the CPU."""
        if "weights" in keep:
            return
        if self._module is not None:
            self._module.to("cpu")
        self._asleep = True

    def wake(self, only: Sequence[str] | None = None) -> None:
        if only is None or "weights" in only:
            if self._module is not None:
                self._module.to(self.context.device)
            self._asleep = False

    def close(self) -> None:
        self._queue.clear()
        self._module = self._trainer = None


def _end_ids(tokenizer: Any, module: nn.Module) -> frozenset[int]:
    """Tokens that end a sequence: the tokenizer's, and those of the model's generation config."""
    configured = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    found = frozenset(id for id in (*listed, tokenizer.eos_token_id) if id is not None)
    if not found:
        raise ConfigError("Neither the tokenizer nor the model names an end token; responses would never stop.")
    return found


def _own_weights(module: nn.Module) -> dict[str, Tensor]:
    """Tensors under the names of ``save_pretrained``, tied ones once."""
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    seen: set[int] = set()
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in tied and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def _near(name: str, own: dict[str, Tensor]) -> str:
    import difflib

    close = difflib.get_close_matches(name, own, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
