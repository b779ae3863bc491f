"""The tables of the roles: the models of a run, their optimizers and adapters, and the sampler."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from engine_core.tables import (
    ChoosingTable,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SamplingOptions,
    Seed,
    Table,
)


class ModelConfig(Table):
    """``[model]``: the model from which every role starts."""

    path: str = ""
    """Model folder in the layout of ``save_pretrained``, or a hub name. A relative folder starts at the folder of the TOML file that names it, if the folder exists there."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; default: `path`."""
    override: dict[str, Any] = {}
    """Changes to the model's config, by the names of its keys: ``override = { rope_theta = 1e6 }``."""
    attention: str = "auto"
    """Attention implementation. ``auto`` chooses by model and device; the log gives the choice and the reason. ``varlen``: the implementation of this project for packed sequences. Implementations of transformers: ``sdpa``, ``eager``, ``flash_attention_2`` (needs flash-attn), ``flash_attention_3``, ``flash_attention_4``, ``flex_attention``."""
    trust_remote_code: bool = False
    """Run Python code of the model folder. The code runs with your permissions, and the log reports it."""
    seed: Seed = 0
    """Seed of weights that the folder does not contain. A folder with only a config gives a random model."""


class OptimConfig(Table):
    """``[actor.optim]``: the optimizer of one role."""

    lr: Fraction = 1e-6
    """Peak learning rate, at most 1."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay. It applies only to matrices, not to vectors such as norms and biases."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum global norm of the gradients; larger gradients are scaled down. 0: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps in which the learning rate rises linearly: step n = 1, 2, ... of these uses `lr` * n / `warmup_steps`. Unlike the schedules of transformers, the first step is not 0."""
    decay_steps: NonNegativeInt = 0
    """Number of optimizer steps, including the warm-up, after which `schedule` reaches `min_lr_ratio`; 0: the length of the run."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a share of `lr`."""
    max_skipped_steps: PositiveInt = 3
    """An optimizer step with non-finite gradients is skipped. This many skipped steps in a row end the run (exit code 6). Overflows that lower the loss scale of fp16 do not count."""


class LoRAConfig(Table):
    """``[actor.lora]``: train a low-rank adapter. The model's weights do not change. Needs the package peft."""

    rank: PositiveInt = 16
    """r: rank of the adapter. Each chosen layer learns a product B A with this inner dimension. The product starts at 0."""
    alpha: PositiveFloat = 32.0
    """The product is scaled by alpha / rank (`rslora`: alpha / sqrt(rank))."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter. ``all-linear``: every linear layer except the head, the feed-forward layers of a model with experts, and ``out_proj`` of Mamba layers. A list contains the ends of module names, ``["q_proj", "v_proj"]``. Any other string is a regular expression for whole names."""
    modules_to_save: list[str] = []
    """Modules that are trained fully, in addition to the adapter. The list contains the ends of their names."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank). Larger ranks then learn as fast as smaller ranks (https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Learn the length and the direction of each row separately (https://arxiv.org/abs/2402.09353); slower."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initialization of A. B starts at 0, so training starts from the unchanged model."""
    dropout: float = 0.0
    """Must be 0. With dropout the log-probs of an unchanged policy would differ between passes, and its ratio would not be 1."""
    path: str | None = None
    """Adapter folder from which training starts, as written by peft or ``engine export --adapter``. The adapter's rank, alpha and modules then apply. A relative path starts at the folder of the TOML file that names it."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                "dropout must be 0: engines run in eval mode, so that the log-probs of an unchanged policy are the "
                "same in each pass. Leave the key out; weight_decay in [actor.optim] works against overfitting."
            )
        return value


class RoleConfig(ChoosingTable):
    """``[actor]``, ``[ref]``, ``[teacher]``: a model that is trained or that scores, and the engine that runs it."""

    backend: str = "torch"
    """Train engine, by name (``engine plugins``). The options of the engine are in the table of that name. The default of `ref`, `critic` and `teacher` is the actor's engine with its options. The engines ``vllm`` and ``vllm_server`` never train a model. They serve `teacher` and reward models; `actor`, `critic` and `ref` refuse them."""
    max_tokens_per_rank: PositiveInt | Literal["auto"] = "auto"
    """Token budget of one micro-batch on one rank. The default of `ref`, `critic` and `teacher` is the actor's. A longer sequence gets a separate micro-batch. ``auto``: the estimated maximum that fits in memory, at most 65536. The value is chosen at the first use, after all models and the sampler are loaded. On the CPU and for models without an estimate, ``auto`` is 8192."""
    path: str | None = None
    """Model folder of this role; default: `[model] path`."""
    optim: OptimConfig = OptimConfig()
    """The optimizer; not read for `ref` and `teacher`."""
    lora: LoRAConfig | None = None
    """LoRA: where the table is present, an adapter is trained instead of the model."""

    def take_options(self, actor: RoleConfig) -> None:
        """Have the backend's table of the actor: the same backend, and none of the role's own."""
        self.options = actor.options

    @property
    def micro_batch(self) -> str:
        """For people."""
        tokens = self.max_tokens_per_rank
        return f"{'as many tokens a micro-batch as fit' if tokens == 'auto' else f'at most {tokens} tokens a micro-batch'}."


class CriticOptimConfig(OptimConfig):
    """``[critic.optim]``: the optimizer of the critic."""

    lr: Fraction = 1e-5
    """Peak learning rate."""


class CriticConfig(RoleConfig):
    """``[critic]``: the model that predicts the return of each token. Advantage estimators such as ``gae`` need it."""

    optim: CriticOptimConfig = CriticOptimConfig()
    """The optimizer."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps at the start of the run in which only the critic learns and the policy does not change."""
    clip_ratio: NonNegativeFloat = 0.5
    """Maximum change of a value, in units of reward, compared to the value before the updates of the step. A value that changed more is no longer trained. 0: no clipping."""

    @classmethod
    def like(cls, actor: RoleConfig) -> CriticConfig:
        """Return the critic of a run without the table: the defaults, on the actor's backend."""
        made = cls(backend=actor.backend, max_tokens_per_rank=actor.max_tokens_per_rank)
        made.take_options(actor)
        return made

    def take_options(self, actor: RoleConfig) -> None:
        super().take_options(actor)
        if self.lora is None and getattr(self.options, "quantize", None):
            self.options = self.options.model_copy(update={"quantize": None})  # all its weights are trained


class ProcessConfig(Table):
    """``[rollout.process]``: with this table the rollout engine runs in a separate process."""

    python: str = ""
    """Python interpreter of another environment. This environment must contain the same version of engine-core-rl and the rollout plugin. Empty: the interpreter of the run. A relative path starts at the folder of the TOML file that names it."""
    engines: PositiveInt = 1
    """Number of engines, each in a separate process. Requests are distributed by load; all responses of one prompt go to one engine. On GPUs each engine has a separate device."""
    startup_timeout_minutes: PositiveFloat = 15.0
    """Maximum time to build the engine."""
    heartbeat_timeout_seconds: PositiveFloat = 60.0
    """A process that sends no heartbeat for this time counts as hanging. Possible causes: the process is suspended, or the engine holds the interpreter lock."""
    command_timeout_minutes: PositiveFloat = 30.0
    """A process counts as hanging if one step of the engine, or one command, takes longer than this."""
    max_restarts: NonNegativeInt | Literal["auto"] = "auto"
    """Maximum number of restarts, in one run, of processes that died or hang. The next loss ends the run (exit code 6). ``auto``: 3; with several processes in the sampler's pool 0, because each of them would keep a copy of the whole model in host memory for a restart, and write it in every update."""

    @property
    def interpreter(self) -> str:
        """The command of the interpreter."""
        return self.python or sys.executable

    def restarts(self, world_size: int) -> int:
        """Return the number of restarts in a pool of ``world_size`` processes."""
        return (3 if world_size == 1 else 0) if self.max_restarts == "auto" else self.max_restarts


class RolloutConfig(ChoosingTable, SamplingOptions):  # type: ignore[misc]  # a table is not frozen
    """``[rollout]``: how responses are sampled."""

    backend: str = "hf"
    """Rollout engine, by name. The options of the engine are in the table of that name."""
    group_size: PositiveInt = 8
    """G: responses sampled for each prompt."""
    max_support: NonNegativeInt = 256
    """With `top_p` or `top_k`: each sampled token also records the ids of the candidate tokens that the cut distribution kept (4 bytes for each id). If more than this many candidates were kept, the token records no ids. 0: no ids are recorded. See `algorithm.correction.support`."""
    weights: Literal["auto", "shared", "own"] = "auto"
    """``shared``: the sampler uses the actor's module; a sharded actor gathers the module on each rank during sampling. ``own``: the sampler has a copy of the weights, which is updated after each step. ``auto``: ``shared`` if both backends support it, both run in the same processes, and the whole model fits in memory in addition to the actor's state."""
    transport: str = "auto"
    """Transport that sends weights to a sampler with a separate copy, by name. Options are in the table of that name. ``same_process``: the sampler runs in the actor's processes. ``tcp``: a TCP connection. ``broadcast``: a process group. ``ipc``: GPU memory that both sides see. ``auto`` chooses by the locations of actor and sampler; the log gives the choice and the reason."""
    overlap_rewards: bool = True
    """Compute the rewards of a group as soon as the group is complete, while other groups are still sampled. The results do not change. Three kinds of rewards wait for all samples: rewards that read all samples at once (``group_ids``), rewards of a model, and rewards with `workers = 0`."""
    stream_update: bool | Literal["auto"] = False
    """Reward and learn from complete groups while other groups are still sampled; the gradient is scaled once, before the optimizer step. The weights do not change in between. ``auto``: where the algorithm and the placement allow it; the log says why not. ``true``: otherwise an error."""
    stream_deterministic: bool = False
    """Learn from one group at a time, in the order of the prompts, so that the update does not depend on when responses finish. With `stream_update = false` it is the same update after sampling, bit for bit in float32."""
    request_timeout_seconds: NonNegativeFloat = 0.0
    """Maximum time for one response, in seconds, from the request to the sampler; time in the queue counts. After this time the response is stopped, keeps its tokens and follows `on_timeout`. With an environment it is the limit of a turn. 0: no limit."""
    on_timeout: Literal["drop", "zero", "keep", "fail"] = "drop"
    """Treatment of a response that was stopped at `request_timeout_seconds`. ``drop``: leave the response out of the update. ``zero``: give it reward 0. ``keep``: score it like a truncated response. ``fail``: end the run."""
    over_sampling: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Each step samples its number of prompts times this factor. The step ends as soon as it has all its groups; responses of the other groups are stopped. See `partial_rollouts`."""
    partial_rollouts: bool = False
    """Continue responses that `over_sampling` stopped. The next step continues them from their last token, before it starts new prompts. Each token keeps its log-prob and its policy version. ``false``: stopped responses are dropped, so long responses are rarer in the update than among all samples."""
    partial_max_staleness: PositiveInt = 8
    """With `partial_rollouts`: maximum age of a group's oldest token, in policy versions. An older group is dropped and counted."""
    max_log_prob_gap: NonNegativeFloat = 1.0
    """Maximum of mean |rollout log-prob - train log-prob| before an update. A larger gap is an error, because sampler and trainer then have different policies."""
    log_probs_every_steps: PositiveInt = 1
    """Request log-probs from the sampler only in every n-th step, starting with the first step. The gap to the trainer is measured and checked only in these steps. vLLM takes 5 to 10% longer with log-probs. A value over 1 is refused if anything else reads the log-probs; it needs `algorithm.correction.level = "off"`, for example."""
    process: ProcessConfig | None = None
    """Run the engine in a separate process: in another Python environment, started again when it dies or hangs."""
    transport_options: Any = Field(default=None, exclude=True)
    """The transport's own table, filled in by the loader."""

    _updates_under_way: bool = PrivateAttr(default=False)

    def expect_updates(self) -> None:
        """Record that weights may change during sampling, as the trainer's table says."""
        self._updates_under_way = True

    @property
    def stops_responses(self) -> bool:
        """Whether responses may be stopped before their end."""
        return self.request_timeout_seconds > 0 or self.over_sampling > 1

    @property
    def steps_are_short(self) -> bool:
        """Whether engines that sample in rounds end a step before its responses, to stop them or to change weights."""
        return self.stops_responses or self._updates_under_way or bool(self.stream_update)
