"""The contracts of the two engines: what a backend promises, and what the core builds on it.

Left out on purpose: anything about GRPO or PPO (a train engine sees named outputs and a loss), and
anything about processes (a runtime calls these methods wherever the worker sits).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from engine_core.config import ModelConfig, RoleConfig, RolloutConfig
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Batch, LossCall, Request, Rollout, StepOutput, TrainOutput


@dataclass(frozen=True)
class Layout:
    """Where a worker stands among those of its role.

    Every rank of one data-parallel slice (tensor, pipeline, context ranks) is given the same
    sequences; results come from the slice's leader.
    """

    dp_rank: int = 0
    dp_size: int = 1
    is_leader: bool = True


@dataclass(frozen=True)
class WorkerContext:
    """What a worker knows besides its config."""

    plugins: PluginSet  # loaded in this process, from the names in the config
    role: str  # actor, ref, critic, rollout, reward_model, judge
    device: torch.device
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    total_steps: int = 0  # optimizer steps of the run, for learning-rate schedules
    live: Mapping[str, Any] | None = None  # objects given from Python: "model", "tokenizer"
    deterministic: bool = False  # `[run] deterministic`: torch's deterministic algorithms only
    # a training run never changes its weights: they are neither trained, refreshed nor exported
    frozen: bool = False
    actor: str = ""  # of the run's sampler: backend of the actor, whose plugin is asked for the model too


class TrainEngine(abc.ABC):
    """One model of one role in one worker: forward, backward, optimizer, weights, state.

    Args:
        config: the role's table; ``config.options`` is the backend's own.
        model_config: the ``[model]`` table.
        context: the worker's surroundings.
        trainable: False builds no optimizer (a reference model).

    The constructor builds everything through ``_build_model_optimizer``.
    """

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        self.config, self.model_config, self.context = config, model_config, context
        self.trainable = trainable
        self.module: nn.Module
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> Any:
        """Refuse what this machine cannot do, by key (``ConfigError``). Asked of every role before any is built."""

    @property
    def layout(self) -> Layout:
        """This worker's place among those of its role."""
        return Layout()

    @abc.abstractmethod
    def _build_model_optimizer(
        self,
        *,
        model_path: str,
        engine_config: Any,
        optim_config: Any,
        override_model_config: dict,
        role: str = "actor",
    ) -> Any:
        """Build what is trained: **the override point for custom models**.

        Args:
            model_path: folder or hub name.
            engine_config: the backend's option table.
            optim_config: the role's ``optim`` table, None for a role that is not trained.
            override_model_config: changes to the model's config.
            role: the role being built.

        Returns:
            The module alone (the engine then goes on by the step hooks: wrap units, shard, load,
            optimizer), or ``(module, optimizer, lr_scheduler)`` and nothing more is done.
        """

    @abc.abstractmethod
    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        """Compute outputs without gradient.

        Args:
            batch: any sequences; computed where ``batch["loss_mask"]`` is True, 0 elsewhere. With the column
                ``support_ids`` [T, K] ``log_probs`` are over those tokens alone, here and in
                ``forward_backward`` (capability ``support``).
            outputs: of ``log_probs``, ``entropy``, ``sum_pi_squared`` ([T]); at the K different tokens a
                position that the column ``candidate_ids`` [T, K] names, ``log_probs_at`` ([T, K]) and ``log_rest``
                ([T], of all other tokens together); of the ``batch.top_k`` likeliest tokens ``top_ids`` ([T, K]
                int64, the likeliest first), ``top_log_probs`` ([T, K]) and ``top_log_rest`` ([T]). Where K is the
                whole vocabulary, the rest has -1e4. Of a model with a value head (roles ``critic``,
                ``reward_model``) ``values``, ``scores`` ([T], see ``value_forward``).
            adapter: False leaves LoRA adapters out.

        Returns:
            float32 CPU tensors (ids: int64) in the batch's order. The micro-batch plan is that of
            ``forward_backward`` of the same batch, so an unchanged policy has ratio exactly 1.
        """

    @abc.abstractmethod
    def forward_backward(self, batch: Batch, loss: LossCall) -> TrainOutput:
        """Add the gradient of one mini-batch: plan micro-batches, forward, loss, backward.

        ``batch["weights"]`` [T] holds each token's share of the aggregated loss (it sums over the
        global mini-batch), so a loss is a sum and the result does not depend on the plan.
        """

    @abc.abstractmethod
    def optimizer_step(self) -> StepOutput:
        """Clip, step, schedule, clear gradients.

        With a non-finite gradient on any rank the step is skipped on every rank: weights,
        optimizer and schedule are left alone, and the gradients are cleared.
        """

    @abc.abstractmethod
    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Stream whole tensors under the names of ``save_pretrained``, tied weights once.

        Collective: every rank runs it to its end.

        Args:
            to: ``all`` ranks or the ``leader``.
            adapter: only the tensors of the LoRA adapter, by the names of an adapter file of peft. Without
                it, base and adapter come merged, as one model.
        """

    def adapter_config(self) -> bytes:
        """The file ``adapter_config.json`` of peft that belongs to ``named_weights(adapter=True)``."""
        raise NotImplementedError(f"{type(self).__name__} does not give its adapter to samplers.")

    @abc.abstractmethod
    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Take weights: ``w <- (1 - mix) * w + mix * new``. An unknown or missing name is an error.

        Of a model with a LoRA adapter: those of an adapter file, or of a whole model, after which the
        adapter adds nothing.
        """

    def without_adapter(self) -> contextlib.AbstractContextManager[None]:
        """Within it, forward passes are of the base model (capability ``lora``)."""
        raise NotImplementedError(f"{type(self).__name__} trains no LoRA adapters.")

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """The module, ready to sample from, where that is possible (capability ``generation_module``).

        With several ranks all of them enter and leave it together, and the module is used by each for itself: no
        collective in between, since ranks sample different numbers of tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} does not give its module to samplers.")
        yield  # pragma: no cover

    @property
    def lends_whole(self) -> bool:
        """With several ranks: each can use what ``generation_module`` gives without the others."""
        return True

    def mark(self) -> None:
        """A step ended here: a later ``save`` writes the random state of this moment.

        What interrupts the next step may have drawn numbers by then. By default the state when saving.
        """

    @abc.abstractmethod
    def save(self, folder: Path) -> Future[None]:
        """Write weights, optimizer, schedule and RNG state below ``folder``, no pickle.

        An ``OSError`` (a full disk) is a failed save that may be tried again. With several ranks, none may wait for
        one that could not write.
        """

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote, also under another world size."""

    @abc.abstractmethod
    def export(self, folder: Path, adapter: bool = False) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads (weights and config).

        Args:
            folder: a new one.
            adapter: only the LoRA adapter, as a folder that ``PeftModel.from_pretrained`` loads.
        """

    def set_lr(self, lr: float) -> None:
        """Replace the peak learning rate from the next step on (``[schedule]``)."""
        raise NotImplementedError

    def set_token_budget(self, tokens: int | str) -> None:
        """Replace `max_tokens_per_rank` from the next batch on (``[schedule]``)."""
        self.config = self.config.model_copy(update={"max_tokens_per_rank": tokens})

    def communicators(self) -> Mapping[str, ProcessGroup]:
        """Groups of several ranks that this worker talks in, by axis of its mesh."""
        return {}

    def measure_collectives(self, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
        """Measure how fast ranks communicate, for ``engine bench comm``. Collective.

        Args:
            sizes: bytes.
            repeats: the median of them is taken.
        """
        raise NotImplementedError(f"{type(self).__name__} does not measure its collectives.")

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Give back device memory by part: ``weights``, ``gradients``, ``optimizer``."""

    def wake(self, only: Sequence[str] | None = None) -> None:
        """Take it again."""

    def close(self) -> None:
        """Free everything; the engine is not used again."""


class RolloutEngine(abc.ABC):
    """A sampler: requests in, finished rollouts out, weights replaced in place.

    Args:
        config: the ``[rollout]`` table; ``config.options`` is the backend's own.
        model_config: the ``[model]`` table.
        context: the worker's surroundings; ``context.live["tokenizer"]`` is the run's tokenizer.
    """

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        self.config, self.model_config, self.context = config, model_config, context
        self.version = 0  # weight updates seen
        self.running: dict[str, Request] = {}  # of ``advance``, by id
        self.dropped: set[str] = set()
        self.deadlines = sampling.Deadlines()

    @property
    def step_hooks(self) -> Any:
        """The step hooks as the plugins of the run's sampler answer them; None for a sampler of another role."""
        plugins = self.context.plugins
        if self.context.role != "rollout" or plugins is None:
            return None
        named = (("rollout_engines", self.config.backend), ("train_engines", self.context.actor))
        return plugins.step("rollout", *(backend for backend in named if backend in plugins.chosen))

    def custom_module(self, model_config: ModelConfig) -> nn.Module | None:
        """Return the actor's module as a plugin builds it (capability ``custom_model``); None: the one of ``[model]``."""
        hooks, options = self.step_hooks, self.config.options
        return hooks and hooks.engine_build_model(role="rollout", model_config=model_config, options=options)

    @property
    def label(self) -> str:
        """The class, for messages."""
        return f"{type(self).__module__}.{type(self).__name__}"

    @property
    def layout(self) -> Layout:
        """All ranks of one tensor-parallel engine get the same calls in the same order."""
        return Layout()

    @property
    def capacity(self) -> int:
        """Requests that it samples at one time, where it finishes them before it takes others; 0: it takes all that come.

        Of a longer call a runtime of several ranks gives each as many, and more to the one that is free first.
        """
        return 0

    @abc.abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. A malformed one (no tokens, too long for the model) is an error here.

        Where a request has ``Sampling.max_support``, its rollout tells which tokens top-p and top-k left
        (``Rollout.extras``; capability ``support``). One with ``begun`` is the rest of a response that was stopped
        (capability ``partial``); one with nothing left to sample is an error.
        """

    @abc.abstractmethod
    def step(self) -> list[Rollout]:
        """Go on sampling; the rollouts that finished since the last call. Nothing queued: [].

        With the capability ``partial``, where ``config.steps_are_short``, it takes a bounded number of tokens of each
        sequence and what is unfinished stays under way, so that single requests can be stopped between two steps.
        """

    @property
    @abc.abstractmethod
    def num_unfinished(self) -> int:
        """Requests added and not yet returned."""

    @abc.abstractmethod
    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        """Stop these requests; what they have so far, with finish reason ``abort``.

        With the capability ``partial`` that is every token sampled, with its log-prob and policy version.
        """

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Sample all requests; rollouts in their order. Built on ``add`` and ``step``."""
        return sampling.generate(self, requests)

    def advance(
        self,
        requests: Sequence[Request] = (),
        dropped: Sequence[str] = (),
        stopped: Sequence[str] = (),
        rounds: int = 1,
    ) -> list[Rollout]:
        """One round for requests that come and go one by one: queue these, forget those, go on sampling once.

        Built on ``add``, ``step`` and ``abort``.

        Args:
            requests: new ones, with ids that none under way has.
            dropped: ids whose rollouts nobody waits for any more.
            stopped: ids whose rollouts are wanted as far as they are; an id that is not under way is passed over.
            rounds: how many times to go on, while anything is left.

        Returns:
            The rollouts that finished, of this and earlier calls, and those of ``stopped``. With nothing left to
            sample: [].
        """
        return sampling.advance(self, requests, dropped, stopped, rounds)

    def pause(self, mode: str = "drain") -> None:
        """Stop between calls: ``drain`` finishes, ``keep`` freezes, ``abort`` drops what runs."""

    def resume(self) -> None:
        """Go on after ``pause``."""

    @abc.abstractmethod
    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace the weights in place; returns a checksum of what was received.

        Refused while asleep. ``version`` becomes the policy version of later tokens.
        """

    def share_module(self, engine: TrainEngine) -> None:
        """Sample from this train engine's own module (capability ``share_module``).

        Weights then need no transport; ``set_version`` alone follows each update.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot sample from a train engine's module.")

    def set_version(self, version: int) -> None:
        """The shared module has changed: later tokens carry this version."""
        self.version = version

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Give back device memory by part: ``weights``, ``kv_cache``."""

    def wake(self, only: Sequence[str] | None = None) -> None:
        """Take it again."""

    def close(self) -> None:
        """Free everything; the engine is not used again."""
