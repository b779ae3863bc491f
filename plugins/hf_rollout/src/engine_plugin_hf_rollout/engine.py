"""The rollout engine ``hf``.

It finishes whole batches: each ``step`` samples one batch of queued requests to its end. In one
process with a train engine it samples from that engine's own module and weights never move. A module that is not of
transformers, of a plugin (``engine_build_model``), is sampled from without a cache.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from engine_core.contracts.checksum import Checksum
from engine_core.contracts.engines import RolloutEngine
from engine_core.contracts.weight_names import near, own_weights
from engine_core.data import load_tokenizer
from engine_core.errors import DataError, TrainingFailed, did_you_mean
from engine_core.sampling import check_request
from engine_core.types import SUPPORT, Rollout
from engine_plugin_hf_rollout.adapter import OwnAdapter
from engine_plugin_hf_rollout.decoding import Decode, Decoding, Sampled, sample
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_torch.linear_products import use_quicker_products
from engine_plugin_torch.model_loading import adopt_live, load_model, sampler_module
from engine_plugin_torch.precision import DTYPES
from engine_plugin_torch.weights import to_own_names

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import TrainEngine, WorkerContext
    from engine_core.types import Request

PARTS = ("weights", "kv_cache")
PAUSES = ("abort", "drain", "keep")
NO_LIMIT = 1 << 30

log = logging.getLogger("engine")


class HFRolloutEngine(RolloutEngine):
    """See ``RolloutEngine``.

    ``step`` samples a whole batch to its end. Where the run stops responses before theirs, or changes weights under them
    (``config.steps_are_short``), it takes `tokens_per_step` tokens of each sequence, and what finished comes back; the
    batch and its cache stay until the rest has, or weights change.
    """

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        super().__init__(config, model_config, context)
        self.options: HFOptions = config.options or HFOptions()
        live = context.live or {}
        self.tokenizer: Any = live.get("tokenizer") or load_tokenizer(model_config)
        if self.tokenizer.eos_token_id is None:
            raise DataError("The tokenizer has no end-of-sequence token, so a response could never end.")
        self._trainer: TrainEngine | None = None
        self._own: nn.Module | None = None
        self._given: nn.Module | None = live.get("model")
        self._custom = False  # a plugin has built the sampler's own module
        self._adapter: OwnAdapter | None = None  # over ``_own``, once an update has brought one
        if self._given is None:
            self._own = self._build()
        self._queue: dict[str, Request] = {}
        self._steps = self.options.tokens_per_step if config.steps_are_short else 0
        self._batch: list[Request] = []  # under way, and waiting in the queue too
        self._decoding: Decoding | None = None
        self._done: list[Rollout] = []  # finished while pausing, returned by the next step
        self._paused = self._asleep = False
        self._incomplete = ""  # why the weights are not those of one version

    # -- requests -----------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self.options.batch_size

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + len(self._done)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: all of them, or none where one is malformed."""
        vocabulary, positions = self._limits()
        taken = set(self._queue)
        for request in requests:
            check_request(request, taken, vocabulary, positions)
            taken.add(request.id)
        self._queue |= {request.id: request for request in requests}

    def step(self) -> list[Rollout]:
        if self._paused:
            raise RuntimeError("The sampler is paused; call resume() first.")
        done, self._done = self._done, []
        return done + self._sample_next()

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        wanted = set(ids)
        stopped = [rollout for rollout in self._done if rollout.request_id in wanted]
        self._done = [rollout for rollout in self._done if rollout.request_id not in wanted]
        under_way = {request.id: number for number, request in enumerate(self._batch)}
        requests = [self._queue.pop(id) for id in dict.fromkeys(ids) if id in self._queue]
        numbers = [under_way[request.id] for request in requests if request.id in under_way]
        stopped += [request.unsampled() for request in requests if request.id not in under_way]
        if self._decoding is not None and numbers:
            self._decoding.stop(numbers)
            results = self._decoding.results(numbers)
            stopped += [self._rollout(self._batch[at], r) for at, r in zip(numbers, results, strict=True)]
        return stopped

    def pause(self, mode: str = "drain") -> None:
        if mode not in PAUSES:
            raise ValueError(f"Unknown pause mode '{mode}'." + did_you_mean(mode, PAUSES))
        if mode == "abort":
            self._done += self.abort(list(self._queue))
        while mode == "drain" and self._queue:
            self._done += self._sample_next()
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def _sample_next(self) -> list[Rollout]:
        if not self._queue:
            return []
        if self._asleep:
            raise RuntimeError("The sampler is asleep; call wake() first.")
        if self._incomplete:
            raise DataError(
                f"The sampler holds weights of two versions ({self._incomplete}). Update them again."
            )
        if not self._steps:
            batch = self._next_batch()
            with self._generation() as module:
                sampled = sample(module, batch, *self._how())
            return [self._end(request, result) for request, result in zip(batch, sampled, strict=True)]
        decoding = None
        try:
            with self._generation() as module:
                if self._decoding is None or self._decoding.over:
                    self._batch = self._next_batch()
                    self._decoding = Decoding(module, self._batch, *self._how())
                self._decoding.advance(module, self._steps)
            decoding = self._decoding
        finally:
            if decoding is None:  # cut in two: what is in the queue begins again
                self._drop_batch()
        over = [
            number
            for number, runs in enumerate(decoding.running())
            if not runs and self._batch[number].id in self._queue
        ]
        return [
            self._end(self._batch[at], result)
            for at, result in zip(over, decoding.results(over), strict=True)
        ]

    def _end(self, request: Request, result: Sampled) -> Rollout:
        rollout = self._rollout(request, result)
        del self._queue[request.id]
        return rollout

    def _next_batch(self) -> list[Request]:
        # similar lengths together: little padding; the longest first, so that memory runs out at once or never
        ordered = sorted(self._queue.values(), key=lambda r: (-len(r.prompt.token_ids), r.prompt.token_ids))
        return ordered[: self.options.batch_size]

    def _how(self) -> tuple[frozenset[int], Decode, int]:
        """What ends a sequence, what decodes it, what the model can hold."""
        ends = frozenset([self.tokenizer.eos_token_id])
        return ends, self._decode, self._limits()[1]

    def _drop_batch(self) -> None:
        self._batch, self._decoding = [], None

    def _set_aside(self) -> None:
        """Weights or memory change: what is under way goes on from its tokens, its prefix computed anew."""
        if self._decoding is not None:
            for request, runs, result in zip(
                self._batch, self._decoding.running(), self._decoding.results(), strict=True
            ):
                if runs and request.id in self._queue:
                    self._queue[request.id] = replace(request, begun=self._rollout(request, result))
        self._drop_batch()

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=False)

    def _rollout(self, request: Request, sampled: Sampled) -> Rollout:
        if not all(map(math.isfinite, sampled.log_probs)):
            raise TrainingFailed(
                f"The model gives logits that are not numbers (request '{request.id}', policy version "
                f"{self.version}): its weights have diverged. Lower the learning rate, or go back to a checkpoint."
            )
        prompt, count = request.prompt.token_ids, len(sampled.tokens)
        versions = torch.full((len(prompt) + count,), self.version, dtype=torch.int32)
        if request.begun is not None:
            versions[: len(request.begun.policy_versions)] = request.begun.policy_versions
        zeros = [0.0] * len(prompt)
        extras = {}
        if request.sampling.cuts:
            extras["support_log_mass"] = torch.tensor(zeros + sampled.log_mass)
            if sampled.support is not None:
                none = torch.full((len(prompt), sampled.support.shape[1]), -1, dtype=torch.int32)
                extras[SUPPORT] = torch.cat([none, sampled.support])
        return Rollout(
            request_id=request.id,
            prompt=request.prompt,
            token_ids=torch.tensor(prompt + sampled.tokens),
            loss_mask=torch.tensor([False] * len(prompt) + [True] * count),
            rollout_log_probs=torch.tensor(zeros + sampled.log_probs),
            policy_versions=versions,
            finish_reason=sampled.finish_reason,
            group_id=request.group_id,
            index=request.index,
            text=self.tokenizer.decode(sampled.tokens, skip_special_tokens=True),
            extras=extras,
        )

    # -- the module ---------------------------------------------------------

    def share_module(self, engine: TrainEngine) -> None:
        self._set_aside()
        self._trainer, self._own, self._given = engine, None, None

    def set_version(self, version: int) -> None:
        self._set_aside()
        super().set_version(version)

    def _module(self) -> nn.Module:
        """The sampler's own module. One given from Python is copied when it is first needed: others train it."""
        if self._own is None:
            self._own = self._build()
        return self._own

    def _build(self) -> nn.Module:
        """A module of the sampler's own: a plugin's, a copy of the one given from Python, or that of ``[model]``."""
        device, dtype = self.context.device, DTYPES[self.options.dtype]
        built = sampler_module(self, device, dtype)
        if built is not None:
            self._custom = True
            log.info("The sampler has a %s of a plugin.", type(built).__name__)
        elif self._given is not None:
            built = adopt_live(self._given, self.model_config, self.context.role, device)
        else:
            built = load_model(self.model_config, device, dtype)
        built = built.to(device).eval()
        use_quicker_products(built)
        return built

    def _limits(self) -> tuple[int, int]:
        """Tokens that the model knows, and tokens that it can hold; of a module without a config the tokenizer's, and no limit."""
        module: Any = self._module() if self._trainer is None else self._trainer.module
        config = getattr(module, "config", None)
        if not isinstance(config, PretrainedConfig):
            return len(self.tokenizer), NO_LIMIT
        text = config.get_text_config()
        return text.vocab_size, getattr(text, "max_position_embeddings", None) or NO_LIMIT

    @contextlib.contextmanager
    def _generation(self) -> Iterator[nn.Module]:
        """The module to sample from, without gradient."""
        shared: AbstractContextManager[nn.Module]
        shared = (
            contextlib.nullcontext(self._module())
            if self._trainer is None
            else self._trainer.generation_module()
        )
        with shared as module, torch.no_grad():
            yield module

    # -- weights ------------------------------------------------------------

    @torch.no_grad()
    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """As the contract says. When the stream breaks half way, sampling is refused until a whole one came."""
        if self._trainer is not None:
            raise RuntimeError("The sampler uses the trainer's own module; there is nothing to update.")
        if self._asleep:
            raise RuntimeError("The sampler is asleep: its weights cannot be updated. Call wake() first.")
        self._set_aside()
        module = self._module()
        checksum = Checksum()
        self._incomplete = f"an update to version {version} did not come to its end"
        if self.options.adapter:
            self._adapter = self._adapter or OwnAdapter(module, self.model_config.path)
            self._adapter.take(checksum.of(stream), version)
            self._incomplete, self.version = "", version
            return checksum.result()
        own = own_weights(module)
        left = set(own)
        for name, tensor in to_own_names(module, checksum.of(stream)):
            if name not in own:
                raise DataError(
                    f"Unknown weight '{name}' in the update to version {version}."
                    + near(name, own)
                    + self._whose_model()
                )
            if own[name].shape != tensor.shape:
                raise DataError(
                    f"Weight '{name}' came as {list(tensor.shape)}; expected {list(own[name].shape)}."
                )
            own[name].copy_(tensor)
            left.discard(name)
        if left:
            raise DataError(
                f"The update to version {version} lacks {len(left)} weights, such as '{min(left)}'."
                + self._whose_model()
            )
        self._incomplete, self.version = "", version
        return checksum.result()

    def _whose_model(self) -> str:
        """What to do where a plugin builds the actor's model, and not the sampler's."""
        plugins = self.context.plugins
        if self._custom or plugins is None or not plugins.overrides("engine_build_model"):
            return ""
        return (
            " The sampler has the model of [model], since no plugin gives it another: let engine_build_model answer for the role "
            "'rollout' as for 'actor', or map the weights with engine_map_weights."
        )

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """The cache of a batch under way is given up; weights of its own go to the CPU."""
        _check_parts(keep)
        if "kv_cache" not in keep:
            self._set_aside()
        if "weights" in keep:
            return
        if self._own is not None:
            self._own.to("cpu")
            if self.context.device.type != "cpu":
                torch.accelerator.empty_cache()
        self._asleep = True

    def wake(self, only: Sequence[str] | None = None) -> None:
        _check_parts(only or ())
        if only is not None and "weights" not in only:
            return
        if self._own is not None:
            self._own.to(self.context.device)
        self._asleep = False

    def close(self) -> None:
        self._queue.clear()
        self._done.clear()
        self._drop_batch()
        self._own = self._given = self._trainer = None


def _check_parts(parts: Sequence[str]) -> None:
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"Unknown part '{part}' of a sampler." + did_you_mean(part, PARTS))
