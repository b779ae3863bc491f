"""``[eval]`` and ``[[eval.set]]``: what is evaluated, how it is sampled, what is told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from engine_core.config.wording import Problem
from engine_core.tables import Distribution, NonNegativeFloat, NonNegativeInt, PositiveInt, Table

if TYPE_CHECKING:
    from engine_core.config.models import DataConfig, EngineConfig

UNNAMED = "validation"
"""What files call the set of `data.validation`."""


class SetOptions(Table, Distribution):  # type: ignore[misc]  # a table is not frozen
    """Keys of ``[eval]`` that a set may have for itself."""

    max_prompts: PositiveInt | None = None
    """Only the first n prompts of a set."""
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


def _with_set_options(table: type[EvalSetConfig]) -> type[EvalSetConfig]:
    """Add ``SetOptions`` without their defaults: a key that is not given is that of ``[eval]``."""
    fields: dict[str, Any] = {
        name: (field.rebuild_annotation() | None, Field(default=None, description=field.description))
        for name, field in SetOptions.model_fields.items()
    }
    return create_model(
        table.__name__, __base__=table, __module__=table.__module__, __doc__=table.__doc__, **fields
    )


@_with_set_options
class EvalSetConfig(Table):
    """``[[eval.set]]``: one held-out set with metrics of its own, ``eval/NAME/...``; a key that it lacks is that of ``[eval]``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the set in metrics and files."""
    path: str | list[str]
    """Files, of the layout of ``[data]``. Relative to the folder of the TOML that names them."""

    @property
    def own(self) -> dict[str, Any]:
        """The keys that are given."""
        return {key: value for key, value in self if value is not None}


class EvalConfig(SetOptions):  # type: ignore[misc]  # a table is not frozen
    """``[eval]``: scores on held-out files, during training and by ``engine eval``."""

    temperature: NonNegativeFloat = (
        0.0  # not in SetOptions: pydantic would take the default of Distribution here
    )
    """Sampling temperature; 0 is greedy. What `[rollout]` says of the distribution has no effect here."""
    every_steps: NonNegativeInt = 0
    """Evaluate after every n steps; 0: never."""
    at_start: bool = False
    """Evaluate before the first step."""
    at_end: bool = False
    """Evaluate after the last step."""
    set: list[EvalSetConfig] = []
    """Held-out sets beside `data.validation`."""

    @property
    def during_training(self) -> bool:
        """A run evaluates."""
        return bool(self.every_steps or self.at_start or self.at_end)


class HeldOut(SetOptions):  # type: ignore[misc]  # a table is not frozen
    """One set to evaluate with every key filled in; the keys of ``[[eval.set]]``."""

    name: str  # empty: that of data.validation
    path: str | list[str]
    max_response_tokens: PositiveInt

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
    shared = {key: getattr(evaluation, key) for key in SetOptions.model_fields}
    shared["max_response_tokens"] = evaluation.max_response_tokens or config.rollout.max_response_tokens
    if any(config.data.validation) or config.data.source:
        sets.append(HeldOut(name="", path=config.data.validation, **shared))
    return sets + [HeldOut(**shared | each.own) for each in evaluation.set]


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
