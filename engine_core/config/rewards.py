"""``[[reward]]``, and the models that a reward may have: a scorer, a judge that writes, a judge that is read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine_core.config.roles import ModelConfig, RoleConfig
from engine_core.config.tables import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Table,
)

PREFIX = "reward."
"""Before a reward's name: the role of its model."""


class FrozenModel(Table):
    """What every model of a reward has: it is loaded once and never trained."""

    path: str
    """Model folder or hub name. Relative to the folder of the TOML that names it when it exists there."""
    tokenizer: str | None = None
    """Folder or hub name of its tokenizer; default: `path`."""
    attention: str | None = None
    """Attention implementation; default: that of ``[model]``."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. It is executed with your rights; said in the log."""

    def as_model(self, model: ModelConfig) -> ModelConfig:
        """As a ``[model]`` table of its own; what `[model]` overrides is the actor's alone."""
        return ModelConfig(
            path=self.path,
            tokenizer=self.tokenizer,
            attention=self.attention or model.attention,
            trust_remote_code=self.trust_remote_code,
        )


class FrozenScorer(FrozenModel):
    """A reward's model that is read in one forward pass, by a train engine without an optimizer."""

    backend: str = "torch"
    """Train engine that runs it, by name; its options stand in the table of that name."""
    max_tokens_per_rank: PositiveInt = 8192
    """Token budget of one micro-batch on one rank; a longer sequence has a micro-batch of its own."""
    max_tokens: PositiveInt | None = None
    """Longest sequence; a longer one fails by `on_error`. Default: what the model's config says."""
    options: Any = Field(default=None, exclude=True)
    """The backend's own table, filled in by the loader."""

    def as_role(self) -> RoleConfig:
        """As the table of a train role."""
        role = RoleConfig(backend=self.backend, max_tokens_per_rank=self.max_tokens_per_rank, path=self.path)
        role.options = self.options
        return role


class RewardModelConfig(FrozenScorer):
    """``[reward.model]``: the reward is the score of a sequence classifier with one label, such as ``trainer = "reward_model"`` makes."""

    chat_template: bool | None = None
    """Render conversations with the reward model's own chat template; default: where the row is one and it has one."""
    own_tokens: bool = True
    """Score the sampled tokens themselves where its tokenizer is the actor's. False always renders the text anew."""
    score_at: Literal["end", "sampled"] = "end"
    """``end``: read the score where the chat template (plain text: the end of sequence) ends a response, which is added where it lacks that. ``sampled``: at the last sampled token."""


MODELS = ("model",)
"""Tables of which one may stand in a ``[[reward]]``."""


class RewardConfig(Table):
    """``[[reward]]``: one reward; several are summed by weight."""

    name: str
    """The reward, by name (``engine plugins``); its options stand in ``[reward.NAME]`` below. With a model of its own: any name."""
    weight: float = 1.0
    """Factor in the sum of rewards. 0 only measures."""
    clip: tuple[float, float] | None = None
    """Clip raw values to this range before weighting."""
    normalize: bool = False
    """Divide by the running standard deviation of this reward (after clipping)."""
    timeout_seconds: PositiveFloat = 10.0
    """Time for one sample; after it the worker is killed and the sample follows `on_timeout`."""
    workers: NonNegativeInt = 1
    """Worker processes; 0 runs the function in the controller, where it cannot be killed."""
    max_memory_gb: NonNegativeFloat = 0.0
    """Address space of one worker, 10^9 bytes; more is a MemoryError in the function. 0: no limit."""
    on_error: Literal["drop", "zero", "fail"] = "drop"
    """When the function raises, dies or returns nonsense: leave the sample out of the update, give it 0, or end the run."""
    on_timeout: Literal["drop", "zero", "fail"] = "drop"
    """The same for a time-out."""
    max_failure_share: Fraction = 0.5
    """A step in which more than this share of samples failed ends the run."""
    model: RewardModelConfig | None = None
    """A reward model gives the reward, and no plugin."""
    options: Any = Field(default=None, exclude=True)
    """The reward's own table, filled in by the loader."""

    @property
    def role(self) -> str:
        """The role of its model, where it has one."""
        return f"{PREFIX}{self.name}"

    @property
    def models(self) -> dict[str, FrozenModel]:
        """The tables of models that it has, by name; one at most in a valid file."""
        return {kind: getattr(self, kind) for kind in MODELS if getattr(self, kind) is not None}

    @property
    def has_model(self) -> bool:
        """Whether a model of its own gives the reward, instead of a function."""
        return bool(self.models)

    @property
    def own_model(self) -> FrozenModel:
        """The table of its model."""
        return next(iter(self.models.values()))
