"""``[eval]`` and ``[[eval.set]]``: held-out sets, sampling and metrics of evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from engine_core.config.wording import Problem
from engine_core.tables import Distribution, NonNegativeFloat, NonNegativeInt, PositiveInt, Table, Text

if TYPE_CHECKING:
    from engine_core.config.models import DataConfig, EngineConfig

UNNAMED = "validation"
"""Name of the set of `data.validation` in files."""


class SetOptions(Table, Distribution):  # type: ignore[misc]  # a table is not frozen
    """Keys of ``[eval]`` that each ``[[eval.set]]`` may set too."""

    max_prompts: PositiveInt | None = None
    """Maximum number of prompts of a set that are evaluated, from the first prompt on; default: all."""
    max_response_tokens: PositiveInt | None = None
    """A response is cut after this many tokens; default: `rollout.max_response_tokens`."""
    stop: tuple[Text, ...] | None = None
    """Strings that end a response; default: `rollout.stop`."""
    samples_per_prompt: PositiveInt = 1
    """n: number of responses for each prompt."""
    k: list[PositiveInt] = []
    """Measure pass@k for each k of this list (https://arxiv.org/abs/2107.03374): the probability that at least one of k responses passes. Each k is at most `samples_per_prompt`."""
    majority: str = "off"
    """Also measure maj@k: how often the most frequent answer of k responses is correct. ``text``: compare whole responses. Name of a reward: compare the answers that this reward extracts. ``off``: do not measure."""
    rewards: list[str] = []
    """Names of the rewards that score the responses; default: all rewards of the run file."""
    score: str | None = None
    """Name of the reward whose score decides accuracy, pass@k and maj@k; default: the first of `rewards`, or of the run file."""
    pass_threshold: float = 1.0
    """Minimum score of a response that passes."""


class EvalSetConfig(SetOptions):  # type: ignore[misc]  # a table is not frozen
    """``[[eval.set]]``: a held-out set with its own metrics, ``eval/NAME/...``. An unset key takes the value of ``[eval]``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the set in metrics and files."""
    path: str | list[str] = []
    """Files in the layout of ``[data]``. A relative path starts at the folder of the TOML file that names it."""
    source: str = ""
    """Data source of a plugin, by name, in place of `path`: its held-out rows. Its options are in ``[eval.set.NAME]`` below, as those of ``[data]`` do not apply here."""
    chat_template: bool | None = None
    """Render prompts with the tokenizer's chat template; default: `data.chat_template`. Without it, `data.system` does not apply."""
    temperature: NonNegativeFloat = 0.0  # as in EvalConfig
    """Sampling temperature; 0 is greedy."""
    options: Any = Field(default=None, exclude=True)
    """The table of the data source, filled in by the loader."""


class EvalConfig(SetOptions):  # type: ignore[misc]  # a table is not frozen
    """``[eval]``: scores on held-out files, during training and by ``engine eval``."""

    # not in SetOptions: pydantic would take the default of Distribution here
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy. The sampling options of `[rollout]` have no effect here."""
    every_steps: NonNegativeInt = 0
    """Evaluate after every n steps; 0: never."""
    at_start: bool = False
    """Evaluate before the first step."""
    at_end: bool = False
    """Evaluate after the last step."""
    set: list[EvalSetConfig] = []
    """Held-out sets in addition to `data.validation`."""

    @property
    def during_training(self) -> str:
        """The keys by which a run evaluates during training, as text; "" if it does not."""
        keys = ("every_steps", "at_start", "at_end")
        return " and ".join(f"eval.{key}" for key in keys if getattr(self, key))


class HeldOut(EvalSetConfig):  # type: ignore[misc]  # a table is not frozen
    """A held-out set with every key of ``[[eval.set]]`` filled in; `source` is not read if there are files."""

    name: str = ""  # empty: the set of data.validation
    temperature: NonNegativeFloat = 0.0  # as in EvalConfig
    """Sampling temperature; 0 is greedy."""
    max_response_tokens: PositiveInt

    @property
    def prefix(self) -> str:
        """Prefix of the set's metrics."""
        return f"eval/{self.name}/" if self.name else "eval/"

    def data(self, config: EngineConfig) -> DataConfig:
        """Return ``[data]`` with the files of this set as its validation files.

        The layout and the columns of ``[data]`` are those of the run's rows, so a set with its own source has the
        default ones. A set of plain text has no system message.
        """
        layout = type(config.data)() if self.name and self.source else config.data
        chat = config.data.chat_template if self.chat_template is None else self.chat_template
        own: dict[str, Any] = {"chat_template": chat, "format": layout.format, "columns": layout.columns}
        if self.chat_template is False:  # what only a template can show
            own |= {"system": None, "chat_template_kwargs": {}}
        return config.data.model_copy(update={"validation": self.path, **own})

    def key(self, key: str) -> tuple[str, ...]:
        """Return the path of a key of this set in a run file."""
        return ("eval", "set", self.name, key) if self.name else ("eval", key)


def held_out_sets(config: EngineConfig) -> list[HeldOut]:
    """Return the set of ``data.validation`` or ``data.source``, then each ``[[eval.set]]``.

    The set of a data source has no path.
    """
    evaluation, data, sets = config.eval, config.data, []
    shared = {key: getattr(evaluation, key) for key in SetOptions.model_fields}
    shared["max_response_tokens"] = evaluation.max_response_tokens or config.rollout.max_response_tokens
    shared["stop"] = config.rollout.stop if evaluation.stop is None else evaluation.stop
    if any(data.validation) or data.source:
        sets.append(HeldOut(path=data.validation, source=data.source, **shared))
    for each in evaluation.set:
        own = {key: value for key, value in each if key in each.model_fields_set and value is not None}
        sets.append(HeldOut(**shared | own))
    return sets


def set_problems(config: EngineConfig) -> Iterator[Problem]:
    """Yield the problems of the names and files of ``[[eval.set]]``."""
    for name, count in Counter(each.name for each in config.eval.set).items():
        if count > 1:
            text = f"'{name}' is listed {count} times, expected once. Rename the others."
            yield Problem(("eval", "set", name), text)
        if name == UNNAMED:
            text = f"'{name}' is the name of data.validation in files. Rename the set."
            yield Problem(("eval", "set", name, "name"), text)
    for each in config.eval.set:
        if any(each.path) == bool(each.source):
            text = "expected either files in path, or the name of a data source in source (engine plugins)."
            yield Problem(("eval", "set", each.name), text)


def sampling_problems(config: EngineConfig) -> Iterator[Problem]:
    """Yield the problems of how ``[eval]`` and its sets sample."""
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
