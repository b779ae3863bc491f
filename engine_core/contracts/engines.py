"""The contracts of train engines and rollout engines: the methods of a backend, and what the core builds on them.

Left out on purpose: anything about GRPO or PPO (a train engine sees named outputs and a loss), and
anything about processes (a runtime calls these methods, in whatever process the worker runs).
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

    from engine_core.config import ModelConfig, RoleConfig, RolloutConfig
    from engine_core.contracts.memory import MemoryNeed, MemoryQuestion
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Batch, LossCall, Request, Rollout, StepOutput, TrainOutput


@dataclass(frozen=True)
class Layout:
    """The position of a worker among the workers of its role.

    All ranks of one data-parallel slice (tensor, pipeline, context ranks) get the same
    sequences; the slice's leader returns the results.
    """

    dp_rank: int = 0  #: number of the data-parallel slice, from 0
    dp_size: int = 1  #: number of data-parallel slices
    is_leader: bool = True  #: whether this worker returns the results of its slice


@dataclass(frozen=True)
class WorkerContext:
    """The surroundings of a worker: what it knows in addition to its config."""

    plugins: PluginSet  #: loaded in this process, from the names in the config
    role: str  #: actor, ref, critic, rollout, reward_model, judge
    device: torch.device  #: where tensors of this worker are
    rank: int = 0  #: among the workers of its pool, from 0
    world_size: int = 1  #: number of workers of its pool
    seed: int = 0  #: `run.seed`
    total_steps: int = 0  #: optimizer steps of the run, for learning-rate schedules
    #: "tokenizer": the run's; "model": if it was given from Python
    live: Mapping[str, Any] | None = None
    deterministic: bool = False  #: `[run] deterministic`: torch's deterministic algorithms only
    #: the run never changes the weights: they are not trained, refreshed or exported
    frozen: bool = False
    #: the run mixes shares of the actor's weights into this role's (`ref_refresh_mix` below 1)
    mixed: bool = False
    actor: str = ""  #: for the run's sampler: backend of the actor, whose plugin may build the model


class TrainEngine(abc.ABC):
    """A model of one role in one worker: forward, backward, optimizer, weights, state.

    Args:
        config: the role's table; ``config.options`` is the backend's option table.
        model_config: the ``[model]`` table with the role's model folder as its path (``ref.path``, ``critic.path``, ...).
        context: the worker's surroundings.
        trainable: False builds no optimizer (a reference model).

    The constructor builds everything through ``_build_model_optimizer``. The base class keeps the arguments as ``config``,
    ``model_config``, ``context`` and ``trainable``; a subclass sets ``module``, and ``optimizer`` and ``lr_scheduler`` for
    a role that is trained.
    """

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        self.config, self.model_config, self.context = config, model_config, context  #: constructor argument
        self.trainable = trainable  #: whether an optimizer is built
        self.module: nn.Module  #: the model; set by a subclass
        self.optimizer: torch.optim.Optimizer | None = None  #: set by a subclass for a role that is trained
        self.lr_scheduler: Any = None  #: set by a subclass for a role that is trained

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> Any:
        """Refuse options that this machine cannot serve. Called for every role before any engine is built.

        Raises:
            ConfigError: names the key.
        """

    @classmethod
    def check_model(
        cls, config: RoleConfig, model_config: ModelConfig, role: str, processes: int | None
    ) -> Any:
        """Refuse options that do not fit the model or the number of processes. ``--dry-run`` calls it, on any machine.

        Args:
            config: the role's table.
            model_config: ``[model]`` with the role's model folder, which no plugin builds.
            role: name of the role.
            processes: of the role; None: not known yet.

        Raises:
            ConfigError: names the key.
        """

    @classmethod
    def memory_need(
        cls, config: RoleConfig, model_config: ModelConfig, question: MemoryQuestion
    ) -> MemoryNeed | None:
        """Estimate the device memory and speed of a role on an accelerator, without one; None: unknown.

        Args:
            config: the role's table.
            model_config: ``[model]`` with the role's model folder, which no plugin builds.
            question: facts about the run.
        """
        return None

    @property
    def layout(self) -> Layout:
        """Position of this worker among the workers of its role."""
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
        """Build the model and its optimizer: **the override point for custom models**.

        Args:
            model_path: folder or hub name.
            engine_config: the backend's option table.
            optim_config: the role's ``optim`` table, None for a role that is not trained.
            override_model_config: changes to the model's config.
            role: the role being built.

        Returns:
            The module alone (the engine then continues with the step hooks: wrap units, shard, load,
            optimizer), or ``(module, optimizer, lr_scheduler)``, which are used as they are.
        """

    @abc.abstractmethod
    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        """Compute outputs without gradient.

        Args:
            batch: any sequences; outputs are computed where ``batch["loss_mask"]`` is True, and 0 elsewhere. With the
                column ``support_ids`` [T, K], ``log_probs`` are normalized over those tokens only, here and in
                ``forward_backward`` (capability ``support``).
            outputs: names of outputs. ``log_probs``, ``entropy``, ``sum_pi_squared`` are [T]. At the K distinct tokens
                per position in the column ``candidate_ids`` [T, K]: ``log_probs_at`` [T, K] and ``log_rest``
                [T] (all other tokens together). Of the ``batch.top_k`` most likely tokens: ``top_ids`` [T, K]
                (int64, most likely first), ``top_log_probs`` [T, K] and ``top_log_rest`` [T]. If K is the
                whole vocabulary, the rest is -1e4. Of a model with a value head (roles ``critic``,
                ``reward_model``): ``values``, ``scores`` [T].
            adapter: False leaves LoRA adapters out.

        Returns:
            CPU tensors by name, float32 (ids: int64), in the batch's order. The micro-batch plan is that of
            ``forward_backward`` of the same batch, so an unchanged policy has a ratio of exactly 1.
        """

    @abc.abstractmethod
    def forward_backward(self, batch: Batch, loss: LossCall) -> TrainOutput:
        """Add the gradient of one mini-batch: plan micro-batches, forward, loss, backward.

        Args:
            batch: this rank's sequences, on the CPU, with T tokens in total; T may be 0. ``weights`` [T] float32 holds each
                token's share of the loss over the global mini-batch. A loss is therefore a sum, and the result does not
                depend on the plan. ``token_share`` [T] holds each token's share in metrics, and ``loss_mask`` [T] bool marks
                the learned tokens. The other columns are those that the loss needs.
            loss: name and parameters of the objective; ``resolve_loss`` turns it into a function of outputs and batch.

        Returns:
            Loss (in the unit of the objective) and metrics, over all ranks and equal on each; the number of this rank's
            micro-batches.
        """

    @abc.abstractmethod
    def optimizer_step(self) -> StepOutput:
        """Clip the gradients, do an optimizer step, advance the schedule, clear the gradients.

        If any rank has a non-finite gradient, every rank skips the step: weights,
        optimizer and schedule are unchanged, and the gradients are cleared. ``StepOutput.rescaled`` says that the engine
        lowered a loss scale because of it: such a step does not count for `max_skipped_steps`.
        """

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of all calls of ``forward_backward`` since the last step (capability ``late_scale``).

        Raises:
            NotImplementedError: the engine does not override the method.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot scale gradients before a step.")

    @abc.abstractmethod
    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield unsharded tensors ``[D1, ..., Dn]`` under the names of ``save_pretrained``, tied weights once.

        Collective: every rank must run the iterator to its end. A tensor stays as it is until the weights change.

        Args:
            to: ranks that get the tensors: ``all`` or the ``leader``.
            adapter: only the tensors of the LoRA adapter, under the names of a peft adapter file; else base and
                adapter are merged into one model.
        """

    def adapter_config(self) -> bytes:
        """Return the bytes of peft's ``adapter_config.json`` for ``named_weights(adapter=True)``.

        Raises:
            NotImplementedError: the engine does not override the method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not give its adapter to samplers.")

    @abc.abstractmethod
    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load weights: ``w <- (1 - mix) * w + mix * new``. An unknown or missing name is an error.

        Args:
            stream: names and unsharded tensors ``[D1, ..., Dn]``. For a model with a LoRA adapter: those of an adapter
                file, or those of a whole model, after which the adapter adds nothing.
            mix: share of the new weights.
        """

    def without_adapter(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which forward passes are those of the base model (capability ``lora``).

        Raises:
            NotImplementedError: the engine does not override the method.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no LoRA adapters.")

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """Yield the module, ready to sample from (capability ``generation_module``).

        With several ranks, all ranks enter and leave the context together. In between each rank uses the module without
        collectives, since ranks sample different numbers of tokens.

        Raises:
            NotImplementedError: the engine does not override the method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not give its module to samplers.")
        yield  # pragma: no cover

    @property
    def lends_whole(self) -> bool:
        """Whether each of several ranks can use the module of ``generation_module`` without the other ranks."""
        return True

    def mark(self) -> None:
        """Note the random state at the end of a step, for a later ``save``.

        An interrupted step may have drawn random numbers before ``save``. By default ``save`` writes the present state.
        """

    @abc.abstractmethod
    def save(self, folder: Path) -> Future[None]:
        """Write weights, optimizer, schedule and RNG state below ``folder``, no pickle.

        An ``OSError`` (a full disk) is a failed save that may be tried again. With several ranks, no rank may wait
        for a rank that could not write.
        """

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Load the state that ``save`` wrote, also under another world size."""

    @abc.abstractmethod
    def export(self, folder: Path, adapter: bool = False) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads (weights and config).

        Args:
            folder: a new folder.
            adapter: write only the LoRA adapter, as a folder that ``PeftModel.from_pretrained`` loads.
        """

    def set_lr(self, lr: float) -> None:
        """Replace the peak learning rate from the next step on (``[schedule]``).

        Raises:
            NotImplementedError: the engine does not override the method.
        """
        raise NotImplementedError

    def set_token_budget(self, tokens: int | str) -> None:
        """Replace `max_tokens_per_rank` from the next batch on (``[schedule]``)."""
        self.config = self.config.model_copy(update={"max_tokens_per_rank": tokens})

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Free device memory of the parts ``weights``, ``gradients`` and ``optimizer``, except those in ``keep``."""

    def wake(self, only: Sequence[str] | None = None) -> None:
        """Bring the parts back to device memory; default: all of them."""

    def close(self) -> None:
        """Free everything; the engine is not used again."""


class RolloutEngine(abc.ABC):
    """A sampler, which turns requests into finished rollouts and whose weights are replaced in place.

    Args:
        config: the ``[rollout]`` table; ``config.options`` is the backend's option table.
        model_config: the ``[model]`` table.
        context: the worker's surroundings; ``context.live["tokenizer"]`` is the run's tokenizer.

    The base class keeps the arguments as ``config``, ``model_config`` and ``context``, the policy version of the weights as
    ``version`` (0 at first), and the requests of ``advance`` in flight as ``running``.
    """

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        self.config, self.model_config, self.context = config, model_config, context  #: constructor argument
        self.version = 0  #: policy version of the weights
        self.running: dict[str, Request] = {}  #: in-flight requests of ``advance``, by id
        self.dropped: set[str] = set()
        self.deadlines = sampling.Deadlines()

    @classmethod
    def check_pool(cls, config: RolloutConfig, role: str, processes: int) -> Any:
        """Refuse options that do not fit the pool. Called before any engine is built, and by ``--dry-run``.

        Args:
            config: the sampler's table.
            role: ``rollout``, or ``judge`` for the sampler of a reward.
            processes: number of processes of the pool.

        Raises:
            ConfigError: names the key.
        """

    @classmethod
    def load_libraries(cls) -> None:
        """Import what the engine needs: in a process of ``[rollout.process]`` while the actor is still being built."""

    @classmethod
    def memory_need(
        cls, config: RolloutConfig, model_config: ModelConfig, question: MemoryQuestion
    ) -> MemoryNeed | None:
        """Estimate the memory and speed of the sampler as ``TrainEngine.memory_need`` does; None: unknown."""
        return None

    @property
    def step_hooks(self) -> Any:
        """Step hooks of the plugins of sampler and actor; None for a sampler of another role."""
        plugins = self.context.plugins
        if self.context.role != "rollout" or plugins is None:
            return None
        named = (("rollout_engines", self.config.backend), ("train_engines", self.context.actor))
        return plugins.step("rollout", *(backend for backend in named if backend in plugins.chosen))

    def custom_module(self, model_config: ModelConfig) -> nn.Module | None:
        """Return the actor's module if a plugin builds it (capability ``custom_model``); None: use ``[model]``."""
        hooks, options = self.step_hooks, self.config.options
        return hooks and hooks.engine_build_model(role="rollout", model_config=model_config, options=options)

    @property
    def label(self) -> str:
        """Full name of the class, for messages."""
        return f"{type(self).__module__}.{type(self).__name__}"

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Type that every floating-point weight has in the sampler, so that a sender may round before it sends; None: unknown."""
        return None

    @property
    def layout(self) -> Layout:
        """Position of this worker; all ranks of one tensor-parallel engine get the same calls in the same order."""
        return Layout()

    @abc.abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue all requests, or none. Called before ``step``, also while others are in flight.

        If a request has ``Sampling.max_support``, its rollout records the tokens that top-p and top-k left
        (``Rollout.extras``; capability ``support``). A request with ``begun`` continues a response that was stopped
        (capability ``partial``); it is an error if nothing is left to sample.

        Raises:
            DataError or ValueError: a request is malformed: no tokens, too long for the model, an id in flight.
                ``check_request`` raises them.
        """

    @abc.abstractmethod
    def step(self) -> list[Rollout]:
        """Continue sampling; return the rollouts that finished since the last call, [] if nothing is queued.

        With the capability ``partial`` and ``config.steps_are_short``, a call samples a bounded number of tokens of
        each sequence. Unfinished requests stay in flight, so that single requests can be stopped between two steps.
        """

    @property
    @abc.abstractmethod
    def num_unfinished(self) -> int:
        """Number of requests that were added and whose rollouts were not returned yet."""

    @abc.abstractmethod
    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        """Stop these requests; return their rollouts so far, with finish reason ``abort``. Ignore ids that are not in flight.

        With the capability ``partial`` they hold every sampled token, with its log-prob and policy version.
        """

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Sample all requests with ``add`` and ``step``; return the rollouts in the order of the requests."""
        return sampling.generate(self, requests)

    def advance(
        self,
        requests: Sequence[Request] = (),
        dropped: Sequence[str] = (),
        stopped: Sequence[str] = (),
        rounds: int = 1,
    ) -> list[Rollout]:
        """Do a round of continuous sampling: queue, drop and stop requests, then continue sampling.

        Built on ``add``, ``step`` and ``abort``.

        Args:
            requests: new requests, whose ids differ from those in flight.
            dropped: ids of requests to cancel without a rollout.
            stopped: ids of requests to stop and return as they are; ids that are not in flight are ignored.
            rounds: number of calls of ``step``, while requests are in flight.

        Returns:
            The rollouts that finished, requested in this or earlier calls, and those of ``stopped``; [] if nothing is
            left to sample.
        """
        return sampling.advance(self, requests, dropped, stopped, rounds)

    def pause(self, mode: str = "drain") -> None:
        """Pause: ``step`` raises until ``resume``, and every request is still answered once.

        Args:
            mode: ``drain`` finishes the requests in flight and ``abort`` ends them as the method ``abort`` does; the next
                ``step`` after ``resume`` returns their rollouts. ``keep`` freezes them; they continue after ``resume``.

        Raises:
            ValueError: another mode.
        """

    def resume(self) -> None:
        """Continue after ``pause``."""

    @abc.abstractmethod
    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace the weights in place; return a text that identifies the received weights.

        The constructor loads the weights of ``[model]``; the conformance kit samples from them before any update. A run
        calls ``update_weights`` before its first request and after each update; requests may be in flight only after
        ``pause``. The runtime compares the texts of all samplers; ``engine_core.contracts.checksum.Checksum`` makes a cheap
        one. Refused while asleep.

        Args:
            stream: names and unsharded tensors ``[D1, ..., Dn]``.
            version: policy version of the tokens that are sampled from now on.

        Raises:
            EngineError, ValueError or RuntimeError: a weight is unknown, missing or misshapen (named), or the stream breaks.
                ``version`` stays, and ``step`` raises until a whole update has arrived.
        """

    def share_module(self, engine: TrainEngine) -> None:
        """Sample from this train engine's own module (capability ``share_module``).

        Weights then need no transport: each update is followed only by ``set_version``.

        Raises:
            NotImplementedError: the engine does not override the method.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot sample from a train engine's module.")

    def set_version(self, version: int) -> None:
        """Set the policy version of later tokens, after the shared module has changed."""
        self.version = version

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Free device memory of the parts ``weights`` and ``kv_cache``, except those in ``keep``, while the trainer works.

        ``step`` and ``update_weights`` raise an error while the weights are asleep; requests wait.
        """

    def wake(self, only: Sequence[str] | None = None) -> None:
        """Bring the parts back to device memory; default: all of them."""

    def close(self) -> None:
        """Free everything; the engine is not used again."""
