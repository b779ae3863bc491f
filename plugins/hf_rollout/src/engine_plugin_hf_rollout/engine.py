"""The rollout engine ``hf``.

Each ``step`` samples one batch of queued requests, by default until all of them are finished. In one process with a
train engine it samples from that engine's module, so weights are never copied. A plugin's module
(``engine_build_model``) that is no transformers model is sampled without a cache.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from engine_core.contracts.checksum import Checksum
from engine_core.contracts.engines import RolloutEngine
from engine_core.contracts.weight_names import own_weights
from engine_core.contracts.weight_sync import common_dtype
from engine_core.data import load_tokenizer
from engine_core.errors import DataError, did_you_mean, near
from engine_core.sampling import check_request, logits_not_finite
from engine_core.types import SUPPORT, Rollout
from engine_plugin_hf_rollout.adapter import OwnAdapter
from engine_plugin_hf_rollout.decoding import Decoding, Sampled
from engine_plugin_hf_rollout.memory_need import memory_need
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_torch.model_loading import adopt_live, load_model, sampler_module
from engine_plugin_torch.precision import DTYPES
from engine_plugin_torch.weights import to_own_names

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import TrainEngine, WorkerContext
    from engine_core.contracts.memory import MemoryNeed, MemoryQuestion
    from engine_core.types import Request

PARTS = ("weights", "kv_cache")
PAUSES = ("abort", "drain", "keep")
NO_LIMIT = 1 << 30

log = logging.getLogger("engine")


class HFRolloutEngine(RolloutEngine):
    """The rollout engine that samples with transformers models.

    ``step`` samples a whole batch until all requests are finished. If the run may stop unfinished responses or change
    weights during them (``config.steps_are_short``), ``step`` samples `tokens_per_step` tokens of each sequence and
    returns the finished rollouts. The batch and its cache stay until all of it is finished, or the weights change.
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
        self._custom = False  # whether a plugin has built the sampler's own module
        self._adapter: OwnAdapter | None = None  # in ``_own``, from the first update on
        if self._given is None:
            self._own = self._build()
        self._queue: dict[str, Request] = {}
        self._steps = self.options.tokens_per_step if config.steps_are_short else 0
        self._batch: dict[int, Request] = {}  # rows of the batch that run, by number; the queue has them too
        self._decoding: Decoding | None = None
        self._done: list[Rollout] = []  # finished while pausing, returned by the next step
        self._paused = self._asleep = False
        self._incomplete = ""  # why the weights mix two versions; "" if they do not

    @classmethod
    def memory_need(
        cls, config: RolloutConfig, model_config: ModelConfig, question: MemoryQuestion
    ) -> MemoryNeed | None:
        """Return the speed of sampling; see ``memory_need``."""
        return memory_need(config.options or HFOptions(), model_config)

    # -- requests -----------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Number of requests added and not yet returned."""
        return len(self._queue) + len(self._done)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue all requests; raise an error and queue none if one is malformed."""
        vocabulary, positions = self._limits()
        taken = {*self._queue, *(rollout.request_id for rollout in self._done)}
        for request in requests:
            check_request(request, taken, vocabulary, positions)
            taken.add(request.id)
        self._queue |= {request.id: request for request in requests}

    def step(self) -> list[Rollout]:
        """Sample the next batch, or continue the present one; return the finished rollouts.

        Raises:
            RuntimeError: the sampler is paused or asleep.
            DataError: the weights mix two versions.
        """
        if self._paused:
            raise RuntimeError("The sampler is paused; call resume() first.")
        done, self._done = self._done, []
        return done + self._sample_next()

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        """Stop these requests; return their rollouts so far, with finish reason ``abort`` if unfinished."""
        wanted = set(ids)
        stopped = [rollout for rollout in self._done if rollout.request_id in wanted]
        self._done = [rollout for rollout in self._done if rollout.request_id not in wanted]
        under_way = {request.id: number for number, request in self._batch.items()}
        requests = [self._queue.pop(id) for id in dict.fromkeys(ids) if id in self._queue]
        numbers = [under_way[request.id] for request in requests if request.id in under_way]
        stopped += [request.unsampled() for request in requests if request.id not in under_way]
        if self._decoding is not None and numbers:
            self._decoding.stop(numbers)
            results = self._decoding.results(numbers)
            # the rows leave the batch: their ids may be queued again at once
            stopped += [self._rollout(self._batch.pop(at), r) for at, r in zip(numbers, results, strict=True)]
        return stopped

    def pause(self, mode: str = "drain") -> None:
        """Stop sampling: finish the queue (``drain``), freeze it (``keep``) or abort it (``abort``).

        Raises:
            ValueError: ``mode`` is not one of these.
        """
        if mode not in PAUSES:
            raise ValueError(f"Unknown pause mode '{mode}'." + did_you_mean(mode, PAUSES))
        if mode == "abort":
            self._done += self.abort(list(self._queue))
        while mode == "drain" and self._queue:
            self._done += self._sample_next()
        self._paused = True

    def resume(self) -> None:
        """Allow ``step`` again after ``pause``."""
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
        decoding = self._decoding
        try:
            with self._generation() as module:
                if decoding is None or decoding.over:
                    requests = self._next_batch()
                    self._batch = dict(enumerate(requests))
                    ends = frozenset([self.tokenizer.eos_token_id])
                    decoding = Decoding(module, requests, ends, self._decode, self._limits()[1])
                    self._decoding = decoding
                decoding.advance(module, self._steps)
        except BaseException:  # the requests are still in the queue and start again
            self._drop_batch()
            raise
        running = decoding.running()
        ended = [number for number in self._batch if not running[number]]
        finished = [
            self._rollout(self._batch[at], result)
            for at, result in zip(ended, decoding.results(ended), strict=True)
        ]
        for number in ended:
            del self._queue[self._batch.pop(number).id]
        if decoding.over:
            self._drop_batch()
        return finished

    def _next_batch(self) -> list[Request]:
        # similar lengths together for little padding; the longest first, so an out-of-memory error comes early
        ordered = sorted(self._queue.values(), key=lambda r: (-len(r.prompt.token_ids), r.prompt.token_ids))
        return ordered[: self.options.batch_size]

    def _drop_batch(self) -> None:
        self._batch, self._decoding = {}, None

    def _set_aside(self) -> None:
        """Drop the batch and its cache before weights or memory change; requests continue later from their tokens.

        The tokens so far are kept in the queue, and their keys and values are computed again.
        """
        if self._decoding is not None:
            results = self._decoding.results(list(self._batch))
            for request, result in zip(self._batch.values(), results, strict=True):
                self._queue[request.id] = replace(request, begun=self._rollout(request, result))
        self._drop_batch()

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=False)

    def _rollout(self, request: Request, sampled: Sampled) -> Rollout:
        if not all(map(math.isfinite, sampled.log_probs)):
            raise logits_not_finite(request.id, self.version)
        prompt, count = request.prompt.token_ids, len(sampled.tokens)
        versions = torch.tensor([0] * len(prompt) + [self.version] * count, dtype=torch.int32)
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
        """Sample from this train engine's module from now on."""
        self._set_aside()
        self._trainer, self._own, self._given = engine, None, None

    def set_version(self, version: int) -> None:
        """Set the policy version of later tokens; the batch's cache is dropped."""
        self._set_aside()
        super().set_version(version)

    def _module(self) -> nn.Module:
        """Return the sampler's own module; one given from Python is copied at the first call, because it is trained."""
        if self._own is None:
            self._own = self._build()
        return self._own

    def _build(self) -> nn.Module:
        """Build the sampler's own module: by a plugin, as a copy of one given from Python, or from ``[model]``."""
        device, dtype = self.context.device, DTYPES[self.options.dtype]
        built = sampler_module(self, device, dtype)
        if built is not None:
            self._custom = True
            log.info("The sampler has a %s of a plugin.", type(built).__name__)
        elif self._given is not None:
            built = adopt_live(self._given, self.model_config, self.context.role, device)
        else:
            built = load_model(self.model_config, device, dtype)
        return built.to(device).eval()

    def _limits(self) -> tuple[int, int]:
        """Return vocabulary size and most positions.

        Of a module without a transformers config: the tokenizer's size, and ``max_position_embeddings`` of the model
        folder's ``config.json``, else ``NO_LIMIT``.
        """
        module: Any = self._module() if self._trainer is None else self._trainer.module
        config = getattr(module, "config", None)
        if not isinstance(config, PretrainedConfig):
            file = Path(self.model_config.path) / "config.json"
            keys = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            keys |= self.model_config.override
            return len(self.tokenizer), keys.get("max_position_embeddings") or NO_LIMIT
        text = config.get_text_config()
        size = getattr(text, "vocab_size", None) or len(self.tokenizer)
        return size, getattr(text, "max_position_embeddings", None) or NO_LIMIT

    @contextlib.contextmanager
    def _generation(self) -> Iterator[nn.Module]:
        """Yield the module to sample from, without gradient."""
        shared: AbstractContextManager[nn.Module]
        shared = (
            contextlib.nullcontext(self._module())
            if self._trainer is None
            else self._trainer.generation_module()
        )
        with shared as module, torch.no_grad():
            yield module

    # -- weights ------------------------------------------------------------

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Type of the sampler's own weights, if they have one type."""
        if self._trainer is not None or self.options.adapter:
            return None
        return common_dtype(own_weights(self._module()).values())

    @torch.no_grad()
    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace the weights in place; after a broken stream, sampling is refused until an update is complete.

        Args:
            stream: names and tensors ``[D0, ...]``: all weights, or with `adapter` the adapter's.
            version: policy version of the new weights.

        Returns:
            Checksum of the received stream.

        Raises:
            RuntimeError: the sampler shares a train engine's module, or is asleep.
            DataError: a name or shape does not fit, or weights are missing.
        """
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
        """Return advice for a plugin that builds the actor's model but not the sampler's; else ""."""
        plugins = self.context.plugins
        if self._custom or plugins is None or not plugins.overrides("engine_build_model"):
            return ""
        return (
            " The sampler has the model of [model], since no plugin gives it another: let engine_build_model answer for the role "
            "'rollout' as for 'actor', or map the weights with engine_map_weights."
        )

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Drop the cache of the batch in progress and move the sampler's own weights to the CPU, except ``keep``."""
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
        """Move the sampler's own weights back to the device."""
        _check_parts(only or ())
        if only is not None and "weights" not in only:
            return
        if self._own is not None:
            self._own.to(self.context.device)
        self._asleep = False

    def close(self) -> None:
        """Drop all requests and release the module."""
        self._queue.clear()
        self._done.clear()
        self._drop_batch()
        self._own = self._given = self._trainer = self._adapter = None


def _check_parts(parts: Sequence[str]) -> None:
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"Unknown part '{part}' of a sampler." + did_you_mean(part, PARTS))
