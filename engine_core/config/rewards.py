"""``[[reward]]``, and the models that a reward may have: a scorer, a judge that writes, a judge that is read."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine_core.config.roles import ModelConfig, RoleConfig, RolloutConfig
from engine_core.tables import (
    ChoosingTable,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Table,
)

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]

PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)\}")
"""What is filled in a judge's question; other braces are text."""

PREFIX = "reward."
"""Before a reward's name: the role of its model."""


class FrozenModel(Table):
    """The options of every model of a reward: it is loaded once and never trained."""

    path: str
    """Model folder or hub name. A relative folder starts at the folder of the TOML file that names it, if the folder exists there."""
    tokenizer: str | None = None
    """Folder or hub name of the model's tokenizer; default: `path`."""
    attention: str | None = None
    """Attention implementation; default: the implementation of ``[model]``."""
    trust_remote_code: bool = False
    """Run Python code of the model folder. The code runs with your permissions, and the log reports it."""

    def as_model(self, model: ModelConfig) -> ModelConfig:
        """Return the table as a ``[model]`` table; overrides of `[model]` apply only to the actor."""
        return ModelConfig(
            path=self.path,
            tokenizer=self.tokenizer,
            attention=self.attention or model.attention,
            trust_remote_code=self.trust_remote_code,
        )


class Asked(Table):
    """A language model that is asked about each response."""

    prompt: str
    """Question to the language model. ``{completion}`` is the response and must occur. ``{question}`` is the user's last message. ``{prompt}`` is the whole prompt as the actor saw it. ``{answer}``, or any other name, is a column of the data."""
    system: str | None = None
    """System message before the question."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str) -> str:
        if "completion" not in PLACEHOLDER.findall(prompt):
            raise ValueError("{completion} is missing: the model would not see the response.")
        return prompt


class FrozenScorer(FrozenModel, ChoosingTable):
    """A reward's model that is read in one forward pass, by a train engine without an optimizer."""

    backend: str = "torch"
    """Train engine that runs the model, by name. The options of the engine are in the table of that name."""
    max_tokens_per_rank: PositiveInt = 8192
    """Token budget of one micro-batch on one rank. A longer sequence gets a separate micro-batch."""
    max_tokens: PositiveInt | None = None
    """Maximum length of a sequence in tokens; a longer sequence follows `on_error`. Default: the limit in the model's config."""

    def as_role(self) -> RoleConfig:
        """Return the table as that of a train role."""
        role = RoleConfig(backend=self.backend, max_tokens_per_rank=self.max_tokens_per_rank, path=self.path)
        role.options = self.options
        return role


class RewardModelConfig(FrozenScorer):
    """``[reward.model]``: the reward is the score of a sequence classifier with one label. The trainer ``reward_model`` trains such a model."""

    chat_template: bool | None = None
    """Render conversations with the reward model's chat template. Default: true for a row that is a conversation, if the reward model has a chat template."""
    reuse_token_ids: bool = True
    """Score the sampled token ids if the reward model's tokenizer is the actor's tokenizer. ``false``: always tokenize the text again."""
    score_at: Literal["end", "sampled"] = "end"
    """Token at which the score is read. ``end``: the token with which the chat template ends a response, or the end of sequence in plain text; a missing end is added. ``sampled``: the last sampled token."""


class VerdictConfig(Asked, FrozenScorer):
    """``[reward.verdict]``: a language model is asked about a response, but generates nothing. The reward is the expected value of its answer: the sum over the verdicts of probability times value."""

    verdicts: dict[str, FiniteFloat] = {"Yes": 1.0, "No": 0.0}
    """Answers and their values. Each answer must be one token of the model: the first token of its answer. The probabilities of these tokens are normalized to the sum 1."""

    @field_validator("verdicts")
    @classmethod
    def _several(cls, verdicts: dict[str, float]) -> dict[str, float]:
        if len(set(verdicts.values())) < 2:
            raise ValueError(
                "verdicts must have two values at least, or every response gets the same reward."
            )
        return verdicts


class WrittenVerdict(Asked):
    """A language model that writes about each response, and how the reward is read from what it wrote."""

    votes: PositiveInt = 1
    """Number of answers to each question. The reward is the mean of the readable answers."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    verdicts: dict[str, FiniteFloat] = {}
    """Words and their values, for example ``{ right = 1, wrong = 0 }``. The case of letters is ignored. Empty: the answer is a number."""
    pattern: str | None = None
    """Python regular expression that finds the verdict in an answer. The last match counts: its first group, or the whole match if the expression has no group. Default: the expression finds a word of `verdicts`, or a number."""
    scale: tuple[FiniteFloat, FiniteFloat] | None = None
    """Range of the number in the answer. The range is mapped to 0..1; a number outside the range counts as unreadable. Default: the number is not mapped."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}.") from error
        return pattern

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"votes = {self.votes} with temperature = 0 gives the same answer each time; set temperature."
            )
        if self.scale is not None and (self.verdicts or self.scale[0] >= self.scale[1]):
            why = (
                "verdicts have their own values"
                if self.verdicts
                else "expected [low, high] with low below high"
            )
            raise ValueError(f"scale = {list(self.scale)}: {why}.")
        return self


class JudgeConfig(WrittenVerdict, FrozenModel, ChoosingTable):
    """``[reward.judge]``: a language model writes about a response. The reward is read from its text."""

    backend: str = "hf"
    """Rollout engine that runs the judge, by name. The options of the engine are in the table of that name."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of question and answer together. A longer question follows `on_error`. Default: the limit in the model's config."""
    max_response_tokens: PositiveInt = 256
    """The judge's answer is cut after this many tokens."""
    options: Any = Field(default=None, exclude=True)
    """The backend's own table, filled in by the loader."""

    def as_sampler(self) -> RolloutConfig:
        """Return the table as a ``[rollout]`` table."""
        table = RolloutConfig(
            backend=self.backend,
            group_size=self.votes,
            temperature=self.temperature,
            max_response_tokens=self.max_response_tokens,
        )
        table.options = self.options
        return table


MODELS = ("model", "judge", "verdict")
"""Tables of which one may stand in a ``[[reward]]``."""


class RewardConfig(ChoosingTable):
    """``[[reward]]``: one reward; several are summed by weight."""

    name: str
    """The reward, by name (``engine plugins``). Its options are in ``[reward.NAME]`` below. A reward with a dedicated model may have any name."""
    weight: float = 1.0
    """Factor in the sum of rewards. A reward with weight 0 is only measured."""
    clip: tuple[float, float] | None = None
    """Range to which raw values are clipped before weighting."""
    timeout_seconds: PositiveFloat = 10.0
    """Maximum time for one sample. After this time the worker is killed, and the sample follows `on_timeout`."""
    workers: NonNegativeInt | None = None
    """Number of worker processes. 0: the function runs in the controller, which cannot kill it. Default: set by the reward's plugin; either 1, or the number of CPU cores of this process (16 at most)."""
    max_memory_gb: NonNegativeFloat = 0.0
    """Maximum address space of one worker, in units of 10^9 bytes. A larger allocation raises a MemoryError in the function. 0: no limit."""
    on_error: Literal["drop", "zero", "fail"] = "drop"
    """Treatment of a sample whose function raises an error, dies or returns an invalid value. ``drop``: leave the sample out of the update. ``zero``: give it reward 0. ``fail``: end the run."""
    on_timeout: Literal["drop", "zero", "fail"] | None = None
    """Treatment of a sample that exceeds `timeout_seconds`: same values as `on_error`. Default: set by the reward's plugin. ``zero`` if only the policy's text can make the reward slow, else ``drop``."""
    max_failure_share: Fraction = 0.5
    """Maximum share of samples that may fail in one step. A step with a larger share ends the run."""
    model: RewardModelConfig | None = None
    """A reward model gives the reward, and no plugin."""
    judge: JudgeConfig | None = None
    """A language model writes a verdict, from which the reward is read."""
    verdict: VerdictConfig | None = None
    """A language model's probabilities of some verdicts give the reward."""

    def clipped(self, value: float) -> float:
        """``value`` within `clip`."""
        if self.clip is None:
            return value
        low, high = self.clip
        return min(max(value, low), high)

    @property
    def role(self) -> str:
        """The role of its model; empty without one."""
        return f"{PREFIX}{self.name}"

    @property
    def models(self) -> dict[str, FrozenModel]:
        """The tables of its models, by name; at most one in a valid file."""
        return {kind: getattr(self, kind) for kind in MODELS if getattr(self, kind) is not None}

    @property
    def has_model(self) -> bool:
        """Whether a dedicated model gives the reward, instead of a function."""
        return bool(self.models)

    @property
    def own_model(self) -> FrozenModel:
        """The table of its model."""
        return next(iter(self.models.values()))
