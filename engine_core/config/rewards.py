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
    """Model folder or hub name. Relative to the folder of the TOML that names it when it exists there."""
    tokenizer: str | None = None
    """Folder or hub name of its tokenizer; default: `path`."""
    attention: str | None = None
    """Attention implementation; default: that of ``[model]``."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. It is executed with your rights; said in the log."""

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
    """The question to it, in which ``{completion}`` is the response, ``{question}`` the last message of the user, ``{prompt}`` the whole prompt as the actor saw it, and ``{answer}`` or any other name a column of the data."""
    system: str | None = None
    """System message before it."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str) -> str:
        if "completion" not in PLACEHOLDER.findall(prompt):
            raise ValueError("{completion} is missing: the model would not see the response.")
        return prompt


class FrozenScorer(FrozenModel, ChoosingTable):
    """A reward's model that is read in one forward pass, by a train engine without an optimizer."""

    backend: str = "torch"
    """Train engine that runs it, by name; its options stand in the table of that name."""
    max_tokens_per_rank: PositiveInt = 8192
    """Token budget of one micro-batch on one rank; a longer sequence has its own micro-batch."""
    max_tokens: PositiveInt | None = None
    """Longest sequence; a longer one fails by `on_error`. Default: what the model's config says."""

    def as_role(self) -> RoleConfig:
        """Return the table as that of a train role."""
        role = RoleConfig(backend=self.backend, max_tokens_per_rank=self.max_tokens_per_rank, path=self.path)
        role.options = self.options
        return role


class RewardModelConfig(FrozenScorer):
    """``[reward.model]``: the reward is the score of a sequence classifier with one label, such as ``trainer = "reward_model"`` makes."""

    chat_template: bool | None = None
    """Render conversations with the reward model's own chat template; default: where the row is one and it has one."""
    reuse_token_ids: bool = True
    """Score the sampled tokens themselves where its tokenizer is the actor's. False always renders the text again."""
    score_at: Literal["end", "sampled"] = "end"
    """``end``: read the score where the chat template (plain text: the end of sequence) ends a response, which is added where it lacks that. ``sampled``: at the last sampled token."""


class VerdictConfig(Asked, FrozenScorer):
    """``[reward.verdict]``: a language model is asked about a response, and the reward is what it would answer on average: sum over the verdicts of probability times value. Nothing is generated."""

    verdicts: dict[str, FiniteFloat] = {"Yes": 1.0, "No": 0.0}
    """Answers and what each is worth. Each is one token of the model, with which its answer would begin."""

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
    """Answers to each question; the reward is the mean of those that can be read."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    verdicts: dict[str, FiniteFloat] = {}
    """Words and what each is worth, case left aside: ``{ right = 1, wrong = 0 }``. Empty: a number is read."""
    pattern: str | None = None
    """Regular expression (Python's) of a verdict: its last match counts, of it the first group. Default: a word of `verdicts`, or a number."""
    scale: tuple[FiniteFloat, FiniteFloat] | None = None
    """The number's range, mapped to 0..1; a number outside cannot be read. Default: the number itself."""

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
    """``[reward.judge]``: a language model writes about a response, and the reward is read from what it wrote."""

    backend: str = "hf"
    """Rollout engine that runs it, by name; its options stand in the table of that name."""
    max_tokens: PositiveInt | None = None
    """Longest question and answer together; a longer question fails by `on_error`. Default: what the model's config says."""
    max_response_tokens: PositiveInt = 256
    """Its answer is cut after this many tokens."""
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
    """The reward, by name (``engine plugins``); its options are in ``[reward.NAME]`` below. With a dedicated model: any name."""
    weight: float = 1.0
    """Factor in the sum of rewards. 0 only measures."""
    clip: tuple[float, float] | None = None
    """Clip raw values to this range before weighting."""
    timeout_seconds: PositiveFloat = 10.0
    """Time for one sample; after it the worker is killed and the sample follows `on_timeout`."""
    workers: NonNegativeInt | None = None
    """Worker processes; 0 runs the function in the controller, where it cannot be killed. Default: what the reward's plugin says, 1 or as many as there are cores for this process (16 at most)."""
    max_memory_gb: NonNegativeFloat = 0.0
    """Address space of one worker, 10^9 bytes; more is a MemoryError in the function. 0: no limit."""
    on_error: Literal["drop", "zero", "fail"] = "drop"
    """When the function raises, dies or returns nonsense: leave the sample out of the update, give it 0, or end the run."""
    on_timeout: Literal["drop", "zero", "fail"] | None = None
    """The same for a time-out. Default: what the reward's plugin says: zero where only what the policy wrote can make it slow, else drop."""
    max_failure_share: Fraction = 0.5
    """A step in which more than this share of samples failed ends the run."""
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
