"""``[eval]`` and ``[[eval.set]]``: what is evaluated, how it is sampled, what is told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from engine_core.config.tables import NonNegativeFloat, NonNegativeInt, PositiveInt, Table
from engine_core.config.wording import Problem

if TYPE_CHECKING:
    from engine_core.config.models import DataConfig, EngineConfig

INHERITED = (
    "max_prompts",
    "temperature",
    "top_p",
    "top_k",
    "max_response_tokens",
    "samples_per_prompt",
    "k",
    "majority",
    "score",
    "pass_threshold",
)
"""Keys of ``[eval]`` that a set may have for itself."""


UNNAMED = "validation"
"""What files call the set of `data.validation`."""


class EvalSetConfig(Table):
    """``[[eval.set]]``: one held-out set with metrics of its own, ``eval/NAME/...``; a key that it lacks is that of ``[eval]``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the set in metrics and files."""
    path: str | list[str]
    """Files, of the layout of ``[data]``. Relative to the folder of the TOML that names them."""
    max_prompts: PositiveInt | None = None
    """Only the first n prompts."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus, as in ``[rollout]``."""
    top_k: NonNegativeInt | None = None
    """Sample from the k most likely tokens; 0: all."""
    max_response_tokens: PositiveInt | None = None
    """A response is cut after this many tokens."""
    samples_per_prompt: PositiveInt | None = None
    """Responses for each prompt."""
    k: list[PositiveInt] | None = None
    """The k of pass@k and maj@k."""
    majority: str | None = None
    """``off``, ``text``, or the reward whose answers are voted on."""
    score: str | None = None
    """The reward that a response is judged by."""
    pass_threshold: float | None = None
    """A response passes where its score is at least this."""


class EvalConfig(Table):
    """``[eval]``: scores on held-out files, during training and by ``engine eval``."""

    every_steps: NonNegativeInt = 0
    """Evaluate after every n steps; 0: never."""
    at_start: bool = False
    """Evaluate before the first step."""
    at_end: bool = False
    """Evaluate after the last step."""
    max_prompts: PositiveInt | None = None
    """Only the first n prompts of a set."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus, as in ``[rollout]``, whose value has no effect here."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0: all."""
    max_response_tokens: PositiveInt | None = None
    """A response is cut after this many tokens; default: `rollout.max_response_tokens`."""
    samples_per_prompt: PositiveInt = 1
    """n: responses for each prompt."""
    k: list[PositiveInt] = []
    """Measure pass@k for each of these k, at most `samples_per_prompt`: one of k responses passes (https://arxiv.org/abs/2107.03374)."""
    majority: str = "off"
    """Measure maj@k too, the most frequent answer of k responses: ``text`` votes on whole responses, the name of a reward on the answers that it extracts."""
    score: str | None = None
    """The reward that a response is judged by in accuracy, pass@k and maj@k; default: the first of the file."""
    pass_threshold: float = 1.0
    """A response passes where its score is at least this."""
    set: list[EvalSetConfig] = []
    """Held-out sets beside `data.validation`."""

    @property
    def during_training(self) -> bool:
        """A run evaluates."""
        return bool(self.every_steps or self.at_start or self.at_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One set to evaluate with every key filled in; the keys of ``[[eval.set]]``."""

    name: str  # empty: that of data.validation
    path: str | list[str]
    max_prompts: int | None
    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    samples_per_prompt: int
    k: list[int]
    majority: str
    score: str | None
    pass_threshold: float

    @property
    def prefix(self) -> str:
        """Of its metrics."""
        return f"eval/{self.name}/" if self.name else "eval/"

    def data(self, config: EngineConfig) -> DataConfig:
        """``[data]`` with the files of this set as its validation files."""
        return config.data.model_copy(update={"validation": self.path})

    def key(self, key: str) -> tuple[str, ...]:
        """Where a key of this set stands in a run file."""
        return ("eval", "set", self.name, key) if self.name else ("eval", key)


def held_out_sets(config: EngineConfig) -> list[HeldOut]:
    """Return ``data.validation`` (or the set that ``data.source`` may give: it has no path), then every ``[[eval.set]]``."""
    evaluation, sets = config.eval, []
    own: dict[str, Any] = {key: getattr(evaluation, key) for key in INHERITED}
    own["max_response_tokens"] = evaluation.max_response_tokens or config.rollout.max_response_tokens
    if any(config.data.validation) or config.data.source:
        sets.append(HeldOut(name="", path=config.data.validation, **own))
    for each in evaluation.set:
        given = {key: getattr(each, key) for key in INHERITED if getattr(each, key) is not None}
        sets.append(HeldOut(name=each.name, path=each.path, **{**own, **given}))
    return sets


def evaluation_problems(config: EngineConfig) -> Iterator[Problem]:
    """What cannot be measured as it is asked for."""
    for name, count in Counter(each.name for each in config.eval.set).items():
        if count > 1:
            text = f"'{name}' stands {count} times; each name may stand once. Rename one."
            yield Problem(("eval", "set", name), text)
        if name == UNNAMED:
            text = f"'{name}' is the name of data.validation in files. Rename the set."
            yield Problem(("eval", "set", name, "name"), text)
    for held_out in held_out_sets(config):
        samples = held_out.samples_per_prompt
        if max(held_out.k, default=0) > samples:
            yield Problem(
                held_out.key("k"),
                f"got {held_out.k}, expected at most samples_per_prompt ({samples}): pass@k is measured on at least "
                "k responses. Raise samples_per_prompt.",
            )
        if samples > 1 and held_out.temperature == 0:
            yield Problem(
                held_out.key("samples_per_prompt"),
                f"got {samples} with temperature 0: a greedy sampler gives a prompt the same response every time. "
                "Set a temperature such as 0.6, or sample once.",
            )
