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
    """``[model]``: which model every role starts from."""

    path: str = ""
    """Folder in the layout of ``save_pretrained``, or a hub name. Relative to the folder of the TOML that names it when it exists there."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; default: `path`."""
    override: dict[str, Any] = {}
    """Changes to the model's own config, by its key names: ``override = { rope_theta = 1e6 }``."""
    attention: str = "auto"
    """Attention implementation: ``auto`` chooses by model and device, and the log says what and why; ``varlen`` (packed sequences, ours), or one of transformers: ``sdpa``, ``eager``, ``flash_attention_2`` (needs flash-attn), ``flash_attention_3``, ``flash_attention_4``, ``flex_attention``."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. It is executed with your rights; said in the log."""
    seed: Seed = 0
    """Seed of weights that the folder does not hold (a folder with a config alone is a random model)."""


class OptimConfig(Table):
    """``[actor.optim]``: the optimizer of one role."""

    lr: Fraction = 1e-6
    """Peak learning rate, at most 1."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices only (vectors such as norms and biases have none)."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: NonNegativeInt = 0
    """Optimizer steps, warm-up included, after which `schedule` has reached `min_lr_ratio`; 0: the run's length."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a share of `lr`."""
    max_skipped_steps: PositiveInt = 3
    """That many optimizer steps in a row skipped for non-finite gradients end the run (exit code 6)."""


class LoRAConfig(Table):
    """``[actor.lora]``: train a low-rank adapter and leave the model's own weights as they are (needs the package peft)."""

    rank: PositiveInt = 16
    """r: each chosen layer learns a product B A of this inner dimension, which starts at 0."""
    alpha: PositiveFloat = 32.0
    """The product is scaled by alpha / rank (`rslora`: alpha / sqrt(rank))."""
    target_modules: str | list[str] = "all-linear"
    """``all-linear``: every linear layer but the head. Or the ends of module names, ``["q_proj", "v_proj"]``, or one regular expression for whole names."""
    modules_to_save: list[str] = []
    """Ends of names of modules that are trained whole, in addition to the adapter."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank): larger ranks then learn as fast (https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Learn each row's length apart from its direction (https://arxiv.org/abs/2402.09353); slower."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How A begins. B begins at 0, so that training starts from the model as it is."""
    dropout: float = 0.0
    """Must be 0: with dropout an unchanged policy would give other log-probs in each pass, and its ratio would not be 1."""
    path: str | None = None
    """Adapter folder to start from, as peft or ``engine export --adapter`` writes it; its rank, alpha and modules are then used. Relative to the folder of the TOML that names it."""

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
    """``[actor]``, ``[ref]``, ``[teacher]``: one model in training or scoring, and the engine that runs it."""

    backend: str = "torch"
    """Train engine, by name (``engine plugins``); its options stand in the table of that name. An engine of models that are never trained (``vllm``, ``vllm_server``) is for `teacher` and models of rewards; `actor`, `critic` and `ref` refuse it."""
    max_tokens_per_rank: PositiveInt | Literal["auto"] = "auto"
    """Token budget of one micro-batch on one rank; a longer sequence has its own micro-batch. ``auto``: as many as fit by an estimate, at most 65536, chosen at the first use, once all models and the sampler are in memory; 8192 on the CPU and for models without an estimate."""
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
    """``[critic]``: the model that predicts the return of each token, for an advantage such as ``gae``."""

    optim: CriticOptimConfig = CriticOptimConfig()
    """The optimizer."""
    warmup_steps: NonNegativeInt = 0
    """In the first n steps of the run only the critic learns, the policy stays as it is."""
    clip_ratio: NonNegativeFloat = 0.5
    """A value that has moved further than this from what it was before the step's updates, in units of reward, learns no more; 0 turns clipping off."""

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
    """The table ``[rollout.process]``: with it the rollout engine runs in a separate process."""

    python: str = ""
    """Interpreter of another environment, with engine-core-rl of the same version and the rollout plugin; empty: the run's own. Relative to the folder of the TOML that names it."""
    engines: PositiveInt = 1
    """Engines, each in a separate process; requests are distributed by load, and the responses of one prompt go to one engine. On GPUs each has its own device."""
    startup_timeout_minutes: PositiveFloat = 15.0
    """Time for the engine to be built."""
    heartbeat_timeout_seconds: PositiveFloat = 60.0
    """Without a sign of life for so long, the process counts as hanging: it is stopped, or the engine holds the interpreter."""
    command_timeout_minutes: PositiveFloat = 30.0
    """One step of the engine, or one command, that takes longer counts as hanging."""
    max_restarts: NonNegativeInt = 3
    """A process that died or hangs is started again so many times in a run; the next loss ends the run (exit code 6)."""

    @property
    def interpreter(self) -> str:
        """The command of the interpreter."""
        return self.python or sys.executable


class RolloutConfig(ChoosingTable, SamplingOptions):  # type: ignore[misc]  # a table is not frozen
    """``[rollout]``: how responses are sampled."""

    backend: str = "hf"
    """Rollout engine, by name; its options stand in the table of that name."""
    group_size: PositiveInt = 8
    """G: responses sampled for each prompt."""
    max_support: NonNegativeInt = 256
    """With `top_p` or `top_k`: each token comes with the ids of those that it was drawn from, where they are at most this many (4 bytes each), see `algorithm.correction.support`."""
    weights: Literal["auto", "shared", "own"] = "auto"
    """``shared``: the sampler uses the actor's module, which a sharded actor gathers on each rank while samples are drawn. ``own``: it has a copy, updated after each step. ``auto``: shared, where both backends can, they are on the same processes and the whole model fits in addition to what the actor holds."""
    transport: str = "auto"
    """How weights are sent to a sampler with a separate copy, by name, options in the table of that name: ``same_process`` (it is in the actor's processes), ``tcp``, ``broadcast`` (a process group), ``ipc`` (memory of a GPU that both see). ``auto`` chooses by where the two are, and the log says what and why."""
    overlap_rewards: bool = True
    """Rewards of a group are worked out as soon as it is complete, while others are still sampled. The results are the same; rewards that see all samples at once (``group_ids``), those of a model and those with `workers = 0` wait."""
    request_timeout_seconds: NonNegativeFloat = 0.0
    """Seconds for one response from when the sampler is asked for it, waiting included; then it is stopped as far as it came and follows `on_timeout`. 0: no limit."""
    on_timeout: Literal["drop", "zero", "keep", "fail"] = "drop"
    """A response that was stopped at `request_timeout_seconds`: leave it out of the update, give it reward 0, score it as a truncated one, or end the run."""
    over_sampling: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """A step samples this many times its prompts and ends as soon as it has all its groups; responses of the others are stopped. See `partial_rollouts`."""
    partial_rollouts: bool = False
    """What `over_sampling` stopped continues in the next step from where it was, before new prompts; each token keeps its log-prob and policy version. Else it is dropped, and long responses are rarer in the update than they are."""
    partial_max_staleness: PositiveInt = 8
    """With `partial_rollouts`: a group whose oldest token is of more policy versions ago than this is dropped and counted."""
    max_log_prob_gap: NonNegativeFloat = 1.0
    """Before an update: mean |rollout log-prob - train log-prob| over this is an error, because the sampler and the trainer are then not the same policy."""
    log_probs_every_steps: PositiveInt = 1
    """Ask the sampler for log-probs in each n-th step alone, the first among them: vLLM takes 5 to 10% longer with them. The gap to the trainer is then measured, and bounded, in those steps. Over 1 only where nothing else reads them: with `algorithm.correction.level = "off"`."""
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
        return self.stops_responses or self._updates_under_way
