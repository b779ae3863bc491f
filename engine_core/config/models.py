"""The TOML as typed models: one class per table, one docstring per key, one source of defaults.

The tables of models and samplers are in ``roles``, those of evaluations in ``evaluation``. Unknown keys are refused.
A table that belongs to a chosen name (``[actor.torch]`` next to ``backend = "torch"``) is checked against that
plugin's own model and is in ``options``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from engine_core.config.evaluation import EvalConfig
from engine_core.config.rewards import PREFIX, FrozenScorer, RewardConfig
from engine_core.config.roles import CriticConfig, ModelConfig, RoleConfig, RolloutConfig
from engine_core.tables import (
    ChoosingTable,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Table,
)


class EnvironmentConfig(ChoosingTable):
    """``[environment]``: with this table each rollout is an episode of the environment, in training and evaluation."""

    name: str
    """The environment, by name (``engine plugins``). Its options are in ``[environment.NAME]``."""
    reward_weights: dict[str, float] = {}
    """Factors, in the sum of rewards, of the rewards that the episodes set, by name; default: 1. A reward with factor 0 is only measured."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of the policy in one episode. Each turn is cut after `rollout.max_response_tokens`."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of an episode, including the prompt and the answers of tools; default: the model's maximum."""
    timeout_seconds: PositiveFloat = 600.0
    """Maximum time for one episode from its start, including the wait for the sampler. After this time the episode follows `on_timeout`. A turn that reaches `rollout.request_timeout_seconds` ends its episode in the same way."""
    tool_timeout_seconds: PositiveFloat = 10.0
    """Maximum time for one tool call. After this time the policy reads that the tool gave no answer."""
    max_tool_characters: PositiveInt = 50_000
    """Maximum number of characters of a tool's answer. The middle of a longer one is left out."""
    tool_format: str = "auto"
    """The form in which the policy writes tool calls, by name. ``auto``: the form that the chat template writes."""
    tool_format_options: Any = Field(default=None, exclude=True)
    max_concurrent: NonNegativeInt = 0
    """Maximum number of episodes that run at the same time; 0: all episodes that are requested."""
    on_error: Literal["drop", "zero", "fail"] = "drop"
    """Treatment of an episode that raises an error or never asks the policy. ``drop``: leave its rollout out of the update. ``zero``: give it reward 0. ``fail``: end the run."""
    on_timeout: Literal["drop", "zero", "fail"] = "drop"
    """Treatment of an episode that exceeds `timeout_seconds`: same values as `on_error`."""
    max_failure_share: Fraction = 0.5
    """Maximum share of episodes that may fail in one step. A step with a larger share ends the run."""


class StageConfig(ChoosingTable):
    """``[[stage]]``: a processing step between rewards and advantages. Stages run in the order of the file."""

    name: str
    """The stage, by name. Its options are in ``[stage.NAME]`` below."""


class CorrectionConfig(Table):
    """``[algorithm.correction]``: importance weights between the sampler's and the trainer's policy."""

    level: Literal["auto", "off", "token", "sequence"] = "auto"
    """Level of truncated importance sampling (TIS): weight min(ratio, `cap`) per ``token`` or per ``sequence``. ``off``: only measure the ratio. ``auto``: ``token``, but ``off`` if the sampler reads the actor's module."""
    support: Literal["auto", "replay", "off"] = "auto"
    """Log-probs of a distribution that `rollout.top_p` or `rollout.top_k` cut. ``replay``: compute all log-probs over the candidate tokens that the cut kept. ``off``: compute them over the whole vocabulary. ``auto``: ``replay`` if the sampler and the train engines support it."""
    cap: PositiveFloat | None = None
    """Upper bound of the weights. Default: 2. If `level` and `mask` are both ``token`` (IcePop) or both ``sequence`` (MIS), the default is `mask_high`."""
    normalize: bool = False
    """Divide the weights by their mean over the mini-batch's tokens that `mask` and `reject` keep."""
    mask: Literal["off", "token", "sequence", "geometric"] = "off"
    """Learn only if the ratio is within the bounds. ``token``: the ratio of a token. ``sequence``: the product of a sequence's ratios. ``geometric``: the geometric mean of a sequence's ratios."""
    mask_low: PositiveFloat | None = None
    """Lower bound of the ratio; default: 0.5 for tokens and sequences, 0.99 for the geometric mean."""
    mask_high: PositiveFloat | None = None
    """Upper bound of the ratio; default: 5 for tokens, 2 for sequences, 1.01 for the geometric mean."""
    reject: Literal["off", "k1", "k2", "k3"] = "off"
    """Learn only from rollouts whose mean k1, k2 or k3 between sampler and trainer is within the bound. The bound is the value of k1, k2 or k3 at the ratio `reject_ratio`."""
    reject_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 1.1
    """Bound of `reject`, as a ratio r. With ``k1``, the geometric mean of the ratios must be between 1 / r and r."""
    off_policy_threshold: PositiveFloat | None = None
    """Off-policy mask (OPSM, https://arxiv.org/abs/2512.02556). A rollout counts as off-policy if the mean of (sampler log-prob - policy log-prob) over its tokens is above this threshold, in nats. Tokens with a negative advantage in off-policy rollouts are dropped."""
    bypass: bool = False
    """Use the sampler's log-probs as the old log-probs. This saves the pass that computes them. The loss's own ratio p / p_rollout then corrects the gap. So a `level` is possible only for losses without a ratio (``reinforce``, ``dro``)."""
    max_masked_share: Fraction = 0.5
    """Maximum share of a mini-batch's loss tokens that `mask` and `reject` together may drop. A larger share ends the run before the update."""
    min_effective_sample_share: Fraction = 0.0
    """Minimum effective sample size of a mini-batch's weights, as a share of its loss tokens: ``(mean w)^2 / mean w^2``. A smaller value ends the run before the update. 0: no bound."""


class AlgorithmConfig(Table):
    """``[algorithm]``: how the policy learns from the rollouts."""

    advantage: str = "grpo"
    """Advantage estimator, by name. Its options are in the table of that name."""
    loss: str = "ppo_clip"
    """Policy loss, by name. Its options are in the table of that name."""
    loss_aggregation: Literal[
        "auto",
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ] = "auto"
    """How token losses are reduced to one number. The reduction is over the global mini-batch, never over a micro-batch. ``auto``: the definition of the loss, which is ``token-mean`` for most losses."""
    loss_length_norm: PositiveInt | None = None
    """Constant length L of ``seq-mean-token-sum-norm`` (sum over tokens / L); default: `rollout.max_response_tokens`."""
    mini_batch_prompts: NonNegativeInt = 0
    """Number of prompts in one optimizer step; 0: all prompts of the step."""
    epochs: PositiveInt = 1
    """Number of passes over the rollouts of a step."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model. 0: no reference model is loaded for the KL."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of the KL per token (http://joschu.net/blog/kl-approx.html). With ``+`` the estimator has the gradient of k2, which is the correct gradient on policy."""
    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: add the KL to the loss. ``reward``: subtract the KL from the rewards."""
    kl_target: PositiveFloat | None = None
    """Target of the mean KL per token. Each step adapts the weight of the KL to reach the target; the weight starts at `kl_coef` (https://arxiv.org/abs/1909.08593)."""
    kl_horizon: PositiveFloat = 10000.0
    """With `kl_target`: number of rollouts over which the weight can change by a factor of about 1.2."""
    ref_refresh_steps: NonNegativeInt = 0
    """Update the reference with the actor's weights after every n steps; 0: never."""
    ref_refresh_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the actor in the updated reference. 1: a copy of the actor. Below 1: a moving average, for which the reference needs float32 weights."""
    mask_truncated: bool = False
    """Learn nothing from responses that were cut at `rollout.max_response_tokens`. Their rewards still count in their group."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. The bonus is subtracted from the loss."""
    entropy_target: PositiveFloat | None = None
    """Lower bound of the mean entropy. Each step adapts the weight of the bonus to stay above the bound; the weight starts at `entropy_coef` (https://arxiv.org/abs/2505.22312)."""
    entropy_delta: PositiveFloat = 0.005
    """With `entropy_target`: change of the weight in one step."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the mini-batch's tokens that are learned: the tokens with the highest entropy (https://arxiv.org/abs/2506.01939)."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction of the gap between sampler and trainer."""
    advantage_options: Any = Field(default=None, exclude=True)
    """The estimator's own table, filled in by the loader."""
    loss_options: Any = Field(default=None, exclude=True)
    """The loss's own table, filled in by the loader."""


class ColumnsConfig(Table):
    """``[data.columns]``: the columns of the files and their meaning."""

    prompt: str = "prompt"
    """The prompt: text, or a list of ``{role, content}`` messages."""
    response: str = "response"
    """SFT: the response to learn, as text or a list of assistant messages. The column is not read from rows that are whole conversations."""
    messages: str = "messages"
    """A whole conversation as a list of ``{role, content}``."""
    answer: str = "answer"
    """The ground truth. Rewards receive the column under the name ``answer``."""
    chosen: str = "chosen"
    """Pairs: the better response, as text or messages."""
    rejected: str = "rejected"
    """Pairs: the worse response, as text or messages."""
    margin: str = "margin"
    """Pairs: number that gives how much better the chosen response is. Rows may lack this column."""
    label: str = "label"
    """KTO: whether the response is desirable, true or false."""
    tools: str = "tools"
    """JSON schemas of the tools that the chat template shows, as a list. Empty: rows have no tools."""
    id: str | None = None
    """Name of the row; default: the number of the row in the file."""


class MixPart(Table):
    """``[[data.mix]]``: a part of the training data, and the share of the rows that come from it."""

    weight: PositiveFloat
    """Weight of the part, relative to the weights of the others."""
    path: str | list[str] = []
    """Files of the part, as in `data.train`."""
    source: str = ""
    """Data source of a plugin, by name, in place of `path`. Its options are in ``[data.NAME]``."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] | None = None
    """Name of the part, for the metric ``data/mix/NAME``; default: its number, from 0."""


class DataConfig(Table):
    """``[data]``: the source and the format of the prompts."""

    train: str | list[str] = []
    """Training files: JSONL, Parquet or CSV. A relative path starts at the folder of the TOML file that names it; on the command line, at the working directory."""
    validation: str | list[str] = []
    """Held-out files for ``[eval]``."""
    source: str = ""
    """Data source of a plugin, by name, in place of `train`. Its options are in ``[data.NAME]``. The source also gives the held-out rows if `validation` names no file."""
    mix: list[MixPart] = []
    """Parts with weights, in place of `train`. Each part gives its share of the rows of an epoch. An epoch has as many rows as all parts together."""
    format: Literal["auto", "prompt", "messages", "sharegpt", "trl", "verl"] = "auto"
    """Layout of a row. ``auto`` chooses by the columns of the first row."""
    columns: ColumnsConfig = ColumnsConfig()
    """Names of the columns."""
    system: str | None = None
    """System message that is put before each prompt without a system message."""
    chat_template: bool | None = None
    """Render prompts with the tokenizer's chat template. Default: true for a row that is a conversation, if the tokenizer has a chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as ``{ enable_thinking = false }``."""
    control_tokens: Literal["text", "allow"] = "text"
    """Treatment of control tokens, such as ``<|im_end|>``, in messages of the data and of an environment. ``text``: the tokens become plain text, which cannot imitate a role or an end. ``allow``: the tokenizer recognizes the tokens."""
    prompts_per_step: PositiveInt = 64
    """P: number of prompts in one step. SFT: number of sequences in one optimizer step."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt, in tokens. A longer prompt follows `over_long`."""
    over_long: Literal["error", "skip"] = "skip"
    """Treatment of a prompt that is too long. ``error``: the run ends. ``skip``: the row is skipped; skipped rows are counted and named."""
    shuffle: bool = True
    """Use a new order of the rows in each epoch. The order depends on `run.seed`."""
    curriculum: str = ""
    """Curriculum of a plugin, by name. It chooses the rows of each round and their order, in place of `shuffle`. Its options are in ``[data.NAME]``."""
    max_bad_rows: NonNegativeInt = 0
    """Maximum number of unusable rows. Unusable rows are named, counted and skipped; one more ends the run."""
    num_workers: NonNegativeInt = 0
    """Number of processes that read and tokenize rows ahead; 0: the controller reads them."""
    prefetch_factor: PositiveInt = 2
    """Number of steps that each of these processes prepares ahead."""
    options: dict[str, Any] = Field(default={}, exclude=True)
    """The tables of the data sources by bare name, filled in by the loader."""
    curriculum_options: Any = Field(default=None, exclude=True)
    """The curriculum's own table, filled in by the loader."""

    @property
    def parts(self) -> list[MixPart]:
        """The parts of `mix`; without a mix, one part with the rows of `train` or `source`."""
        return self.mix or [MixPart(weight=1, path=self.train, source=self.source)]


class RunConfig(Table):
    """``[run]``: the folder and the length of the run."""

    dir: str = "runs"
    """Folder that contains the run folders, relative to the working directory."""
    name: str | None = None
    """Name of the run folder; default: name of the run file, date and time."""
    steps: PositiveInt | None = None
    """Number of training steps; default: the steps of `epochs` passes over the data."""
    epochs: PositiveInt = 1
    """Number of passes over the training data if `steps` is not set. Stages that replace groups take more rows."""
    seed: Seed = 0
    """Seed of the data order and of sampling."""
    finish_above: dict[str, float] = {}
    """Metrics and goals, ``{ "reward/mean" = 0.9 }``. The run ends after the first step in which a metric is above its goal (exit code 0)."""
    finish_below: dict[str, float] = {}
    """Metrics and goals, ``{ "eval/loss" = 0.5 }``. The run ends after the first step in which a metric is below its goal (exit code 0)."""
    fail_above: dict[str, PositiveFloat] = {}
    """Metrics and bounds, ``{ "actor/approx_kl" = 0.5 }``. A step in which a metric is above its bound ends the run as failed (exit code 6) and is not saved."""
    deterministic: bool = False
    """Use torch's deterministic algorithms. An operation without such an algorithm raises an error."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str | None) -> str | None:
        if name is not None and (name in ("", ".", "..", "latest") or "/" in name or "\0" in name):
            raise ValueError("this is no name for a folder. Expected one like 'first-try', without '/'.")
        return name


class CheckpointConfig(Table):
    """``[checkpoint]``: when the whole state is saved."""

    every_steps: NonNegativeInt = 0
    """Save after every n steps; 0: only after the last step."""
    every_minutes: NonNegativeFloat = 0.0
    """Save after the first step that ends at least this many minutes after the last save; 0: no saves by time."""
    at_end: bool = True
    """Save after the last step."""
    at_stop: bool = True
    """Save the last finished step when a signal stops the run or a sampler is lost."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints that are kept. Older checkpoints are deleted once a newer checkpoint is verified."""
    keep_best: PositiveInt = 1
    """Number of checkpoints with the best `best_metric` that are kept in addition to `keep_last`."""
    best_metric: str | None = None
    """A metric such as ``eval/accuracy``. A step is also saved if its metric is better than in all saved steps."""
    best_mode: Literal["max", "min"] = "max"
    """``max``: a higher `best_metric` is better. ``min``: a lower `best_metric` is better."""
    max_failures: PositiveInt = 3
    """Number of failed saves in a row that ends the run (exit code 5). Before that, a failed save (for example, a full disk) is only a warning."""


class TrackingConfig(Table):
    """``[tracking]``: records of a run. ``metrics.jsonl`` is always written."""

    trackers: list[str] = []
    """Trackers, by name, such as ``tensorboard``. Their options are in ``[tracking.NAME]``."""
    rollouts_every_steps: NonNegativeInt = 1
    """Write the rollouts of every n-th step as a Parquet file; 0: never."""
    options: dict[str, Any] = Field(default={}, exclude=True)
    """The trackers' own tables by bare name, filled in by the loader."""


class ProfileConfig(Table):
    """``[profile]``: steps that torch's profiler records in every process, into the folder ``profile`` of the run."""

    steps: list[PositiveInt] = []
    """Numbers of these steps, ``[5, 6]``. Each takes longer; other steps do not."""


class PluginsConfig(Table):
    """``[plugin]``: a table ``[plugin.NAME]`` for each plugin of ``plugins`` that has options."""

    options: dict[str, Any] = Field(default={}, exclude=True)
    """The tables by name, filled in by the loader."""


class RuntimeConfig(ChoosingTable):
    """``[runtime]``: the runtime that runs the workers."""

    backend: str = "local"
    """Runtime, by name. The options of the runtime are in the table of that name."""


class PlacementConfig(Table):
    """``[placement]``: the devices of each role."""

    pools: dict[str, PositiveInt] = {}
    """Device pools by name, each with its number of processes; default: one pool for all roles."""
    actor: str | None = None
    """Pool of the actor."""
    critic: str | None = None
    """Pool of the critic."""
    ref: str | None = None
    """Pool of the reference model."""
    teacher: str | None = None
    """Pool of the teacher."""
    rollout: str | None = None
    """Pool of the sampler."""
    reward: str | None = None
    """Pool of the reward models."""

    def pool_of(self, role: str) -> str | None:
        """Return a role's own pool, else the actor's, else the first one; None without pools."""
        own = getattr(self, role.partition(".")[0], None) or (None if role == "rollout" else self.actor)
        return own or next(iter(self.pools), None)


class EngineConfig(ChoosingTable):
    """A whole run file."""

    trainer: str = "rl"
    """The training loop, by name; options in the table of that name."""
    plugins: list[str] = []
    """Plugins with step hooks or observers by name, and one-file plugins by path (``./my_plugin.py``); options in ``[plugin.NAME]``."""
    plugin: PluginsConfig = PluginsConfig()
    model: ModelConfig = ModelConfig()
    actor: RoleConfig = RoleConfig()
    ref: RoleConfig | None = None
    """Reference model; default: like `actor`. Built only when the algorithm needs it."""
    critic: CriticConfig | None = None
    """Critic; default: like `actor`, with its own optimizer. Built only when the advantage needs values."""
    teacher: RoleConfig | None = None
    """Teacher of a distillation, a model that is not trained; `path` must be set. Built only when something learns from it."""
    rollout: RolloutConfig = RolloutConfig()
    reward: list[RewardConfig] = []
    environment: EnvironmentConfig | None = None
    """Several turns a rollout; without the table each prompt gets one response."""
    stage: list[StageConfig] = []
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    placement: PlacementConfig = PlacementConfig()
    schedule: dict[str, list[tuple[NonNegativeInt, float | bool]]] = {}
    """Settings that change by step: ``"rollout.temperature" = [[0, 1.0], [100, 0.7]]`` holds each value from its step on."""

    _source: Any = PrivateAttr(default=None)  # the RawConfig it was made from: origins of every key

    @property
    def ref_is_base(self) -> bool:
        """Whether the reference is the actor without its adapter: LoRA, and no `[ref]` with its own model."""
        if self.actor.lora is None:
            return False
        ref = self.ref or self.actor
        same = (ref.path or self.model.path) == (self.actor.path or self.model.path)
        return self.ref is None or (same and ref.lora is None and ref.backend == self.actor.backend)

    @property
    def unread(self) -> list[str]:
        """The tables that are present and that this run does not read, with the reason."""
        return list(self._source.unread) if self._source is not None else []

    @property
    def chosen_metrics(self) -> list[tuple[str, str]]:
        """Each metric that the run names, after its key."""
        bounds = ("finish_above", "finish_below", "fail_above")
        named = [(f"run.{key}", name) for key in bounds for name in getattr(self.run, key)]
        best = self.checkpoint.best_metric
        return [*named, ("checkpoint.best_metric", best)] if best else named

    def rewarding(self, role: str) -> RewardConfig | None:
        """Return the reward whose model has this role; None for other roles."""
        return next((reward for reward in self.reward if f"{PREFIX}{reward.name}" == role), None)

    def model_of(self, role: str) -> ModelConfig:
        """Return what a role's model is built from: `[model]` with the role's folder, or the table of a reward's model.

        `override` changes the config of the trained model, not the teacher's.
        """
        if (reward := self.rewarding(role)) is not None:
            return reward.own_model.as_model(self.model)
        path = None if role == "rollout" else self.role(role).path
        changes: dict[str, Any] = {"path": path} if path else {}
        if role == "teacher":
            changes["override"] = {}
        return self.model.model_copy(update=changes) if changes else self.model

    def sampler(self, role: str) -> RolloutConfig:
        """Return the table of a role that samples."""
        reward = self.rewarding(role)
        return self.rollout if reward is None or reward.judge is None else reward.judge.as_sampler()

    def role(self, name: str) -> RoleConfig:
        """Return the table of a train role; a role without one is like the actor."""
        if (reward := self.rewarding(name)) is not None:
            assert isinstance(reward.own_model, FrozenScorer)
            return reward.own_model.as_role()
        if name == "critic":
            return self.critic or CriticConfig.like(self.actor)
        return {"ref": self.ref, "teacher": self.teacher}.get(name) or self.actor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineConfig) and dict(self) == dict(other)  # wherever the values came from
