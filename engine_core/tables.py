"""What tables of a run file are made of: their base class, kinds of numbers, and the sampling options, which several tables share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
    """A TOML table with a fixed set of keys.

    Attributes:
        renamed: old names of keys of this table, each with its new name, see ``engine_core.specs.Options``.
    """

    renamed: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, arbitrary_types_allowed=True
    )


def _doc(text: str) -> object:
    return Field(description=text)


@dataclass(frozen=True)
class Distribution:
    """The sampling options that say what a token is drawn from: of ``[rollout]``, ``[eval]``, ``[[eval.set]]`` and requests.

    Log-probs are of this distribution, and rollout files name it. The default of each option but the temperature
    leaves all tokens.
    """

    temperature: Annotated[
        NonNegativeFloat,
        _doc(
            "Softmax temperature; 0 is greedy (evaluation only). The trainer computes log-probs at that of `[rollout]`."
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1),
        _doc("Nucleus: sample from the smallest set of tokens with this probability."),
    ] = 1.0
    top_k: Annotated[NonNegativeInt, _doc("Sample from the k most likely tokens; 0: all.")] = 0

    @property
    def cutting(self) -> list[str]:
        """The options by which some tokens are never drawn."""
        return [name for name in CUTTING if getattr(self, name) != DEFAULTS[name]]

    @property
    def cuts(self) -> bool:
        """Whether a token is drawn, and not from all tokens."""
        return self.temperature > 0 and bool(self.cutting)


@dataclass(frozen=True)
class SamplingOptions(Distribution):
    """Every sampling option, declared once: a key of ``[rollout]`` and a field of requests, with type, default, bounds, text."""

    max_response_tokens: Annotated[PositiveInt, _doc("A response is cut after this many tokens.")] = 256
    stop: Annotated[tuple[Text, ...], _doc("Strings that end a response; the match stays in it.")] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], _doc("Token ids that end a response, besides the tokenizer's own end token.")
    ] = ()


DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingOptions)}
"""Every sampling option and its default."""
DISTRIBUTION = tuple(field.name for field in dataclasses.fields(Distribution))
CUTTING = DISTRIBUTION[1:]
BASE_SAMPLING = frozenset({"temperature", "top_p", "top_k", "max_response_tokens", "stop", "stop_token_ids"})
"""Options that a sampler implements unless its entry says otherwise. One that is added later is not among them."""
