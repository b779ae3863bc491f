"""Building blocks of run file tables: the base class, number types, and the shared sampling options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST = 2**31
"""No count in a run file is as high; the text of a key's type leaves this bound out."""
PositiveInt = Annotated[int, Field(gt=0, lt=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
    """A TOML table with a fixed set of keys."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, arbitrary_types_allowed=True
    )


class ChoosingTable(Table):
    """A table with a key that chooses a name."""

    options: Any = Field(default=None, exclude=True)
    """The table of the chosen name, filled in by the loader."""


def _doc(text: str) -> object:
    return Field(description=text)


@dataclass(frozen=True)
class Distribution:
    """The sampling options that define the token distribution of ``[rollout]``, ``[eval]``, ``[[eval.set]]``, requests.

    Log-probs are of this distribution, and rollout files record it. Except for the temperature, the defaults keep all
    tokens.
    """

    temperature: Annotated[
        NonNegativeFloat,
        _doc(
            "Softmax temperature; 0 is greedy (evaluation only). "
            "The trainer computes log-probs at the temperature of `[rollout]`."
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1),
        _doc("Nucleus sampling: sample from the smallest set of tokens with this total probability."),
    ] = 1.0
    top_k: Annotated[NonNegativeInt, _doc("Sample from the k most likely tokens; 0: all.")] = 0

    @property
    def cutting(self) -> list[str]:
        """The options that exclude some tokens."""
        return [name for name in CUTTING if getattr(self, name) != DEFAULTS[name]]

    @property
    def cuts(self) -> bool:
        """Whether tokens are sampled (not greedy) from a subset of the vocabulary."""
        return self.temperature > 0 and bool(self.cutting)


@dataclass(frozen=True)
class SamplingOptions(Distribution):
    """The sampling options: keys of ``[rollout]`` and fields of requests, with type, default, bounds, description."""

    max_response_tokens: Annotated[PositiveInt, _doc("A response is cut after this many tokens.")] = 256
    stop: Annotated[tuple[Text, ...], _doc("Strings that end a response. The response keeps the match.")] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], _doc("Token ids that end a response, in addition to the tokenizer's end token.")
    ] = ()


DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingOptions)}
"""Every sampling option and its default."""
DISTRIBUTION = tuple(field.name for field in dataclasses.fields(Distribution))
CUTTING = DISTRIBUTION[1:]
BASE_SAMPLING = frozenset({"temperature", "top_p", "top_k", "max_response_tokens", "stop", "stop_token_ids"})
"""Options that a sampler supports unless its spec says otherwise. Options added later are not in this set."""
